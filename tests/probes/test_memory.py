"""Memory that does not hold what was written is found, and the rank, the address and the bits named."""

import re
from pathlib import Path

import pytest
import torch

from pytest_gpufleet.model.metric import GiB
from pytest_gpufleet.probes.memory import ROW, SHARE, _block_bytes, patterns

EACH_GPU = Path(__file__).parents[2] / "acceptance" / "test_4_each_gpu.py"
HOLDS = "test_memory_holds_patterns"

# Flips a bit of memory on one rank, after it was written and before it is compared.
FAULT = """
import os
import pytest

def plant(rank, number, bit):
    import torch

    genuine = torch.ne
    comparisons = 0

    def ne(words, expected, out):
        nonlocal comparisons
        comparisons += words.numel() > 10_000  # not the small piece of memory that is tried out first
        if comparisons == number:
            words.view(-1)[12345] ^= 1 << bit
        return genuine(words, expected, out=out)

    if rank.index == 1:
        torch.ne = ne

@pytest.fixture(autouse=True, scope="session")
def fault(world):
    world.run(plant, int(os.environ["COMPARISON"]), int(os.environ["BIT"]))
"""


@pytest.mark.parametrize(
    ("comparison", "bit", "pattern"),
    [(2, 3, "address in address"), (10, 46, "random"), (150, 20, r"walking ones, step \d+")],
)
def test_a_flipped_bit_is_found_and_its_address_named(run_pytest, comparison, bit, pattern):
    options = ("--rehearse=2", "--fleet-dir=runs", "-p", "faulty")
    environment = {"PYTHONPATH": ".", "COMPARISON": str(comparison), "BIT": str(bit)}
    run = run_pytest(f"{EACH_GPU}::{HOLDS}", *options, files={"faulty.py": FAULT}, **environment)
    assert run.status == 1, run.text
    message = run.check(HOLDS).message
    assert "CPU rank 0" not in message
    found = re.search(
        r"CPU rank 1: wrong words in memory: 1; address 0x(\w+) "
        r"\(block 0x(\w+) to 0x(\w+)\) held 0x(\w{16}), expected 0x(\w{16}), wrong bits 0x(\w{16}), pattern (.+)",
        message,
    )
    assert found, message
    address, begin, _, held, expected, wrong = (int(group, 16) for group in found.groups()[:6])
    assert address - begin == 8 * 12345
    assert wrong == held ^ expected == 1 << bit
    assert re.match(pattern, found[7])


def test_patterns_give_every_bit_both_values_and_every_word_its_own():
    words = torch.empty(1024, dtype=torch.int64)
    ones, zeros, alone = (torch.zeros(1024, dtype=torch.int64) for _ in range(3))
    for pattern in patterns(words.device, seed=0):
        pattern.fill(words, 1 << 40)
        ones |= words
        zeros |= ~words
        if pattern.name in ("address in address", "random", "inverse of random"):
            assert len(words.unique()) == 1024, pattern.name
        if pattern.name.startswith("walking ones"):
            halves = words.view(torch.int32)
            assert all(bin(half & 2**32 - 1).count("1") == 1 for half in halves.tolist())
            alone |= words
    for seen in (ones, zeros, alone):
        assert (seen == -1).all()


def test_a_pattern_is_the_same_each_time_it_is_made():
    first, again = (torch.empty(1024, dtype=torch.int64) for _ in range(2))
    for one, other in zip(patterns(first.device, seed=3), patterns(first.device, seed=3), strict=True):
        one.fill(first, 4096)
        other.fill(again, 4096)
        assert (first == again).all(), one.name


@pytest.mark.parametrize("gigabytes", [2, 4, 6, 8, 16, 141, 288])
def test_a_block_and_its_comparison_fit_beside_what_is_tested(gigabytes):
    free = gigabytes * GiB
    # The comparison takes an eighth, the addresses at which rows begin a 32nd.
    assert _block_bytes(free) * (1 + 1 / 8 + 1 / 32) < (1 - SHARE) * free
    assert _block_bytes(free) % (8 * ROW) == 0

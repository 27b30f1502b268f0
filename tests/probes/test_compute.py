"""Matrix products that go wrong on one rank are found, and the rank and the element named."""

from collections import Counter
from pathlib import Path

import pytest

EACH_GPU = Path(__file__).parents[2] / "acceptance" / "test_4_each_gpu.py"
REPEAT = "test_products_repeat_bit_for_bit"
EXACT = "test_matrix_product_is_exact"

# Spoils element [5, 9] of results of torch.mm on one rank: of the third product, or of each.
FAULT = """
import os
import pytest

BITS = {2: "int16", 4: "int32", 8: "int64"}

def plant(rank, fault):
    import torch

    genuine = torch.mm
    products = 0

    def mm(a, b):
        nonlocal products
        products += 1
        result = genuine(a, b)
        if "always" in fault or products == 3:
            if "bit" in fault:
                result.view(getattr(torch, BITS[result.element_size()]))[5, 9] ^= 1
            else:
                result[5, 9] = float("nan")
        return result

    if rank.index == 1:
        torch.mm = mm

@pytest.fixture(autouse=True)  # for each test: what one test changes on a rank, the next does not find
def fault(world):
    world.run(plant, os.environ["FAULT"])
"""


@pytest.fixture
def with_fault(run_pytest):
    def run(fault, *checks, ranks=3):
        nodes = [f"{EACH_GPU}::{check}" for check in checks]
        options = (f"--rehearse={ranks}", "--fleet-dir=runs", "-p", "faulty")
        return run_pytest(*nodes, *options, files={"faulty.py": FAULT}, PYTHONPATH=".", FAULT=fault)

    return run


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            "one bit",
            {f"{REPEAT}[fp32]": ("wrong elements: 1, in 1 of ", "product 3, row 5, column 9 is 0x")},
        ),
        (
            "one NaN",
            {f"{REPEAT}[fp64]": ("product 3, row 5, column 9 is 0x7ff8000000000000, expected 0x",)},
        ),
        (
            "always bit",
            {
                f"{REPEAT}[fp16]": (
                    "computes another product than 2 of 3 ranks (CPU)",
                    "1 row (the first is 5) and 1 column (the first is 9) differ",
                ),
                f"{EXACT}[fp32]": ("1 of 262,144 elements are wrong: row 5, column 9 is",),
            },
        ),
        (
            "always NaN",
            {
                f"{REPEAT}[fp32]": ("NaN or infinite elements in the first product: 1",),
                f"{EXACT}[bf16]": ("1 of 262,144 elements are wrong: row 5, column 9 is nan, expected",),
            },
        ),
    ],
)
def test_a_wrong_element_is_found_and_the_rank_named(with_fault, fault, words):
    run = with_fault(fault, *words)
    assert run.status == 1, run.text
    for check, phrases in words.items():
        message = run.check(check).message
        assert "CPU rank 1: " in message
        assert "rank 0 of 3" not in message
        assert "rank 2 of 3" not in message
        for phrase in phrases:
            assert phrase in message


def test_of_two_ranks_that_disagree_neither_is_believed(with_fault):
    message = with_fault("always bit", f"{REPEAT}[fp32]", ranks=2).check(f"{REPEAT}[fp32]").message
    assert "computes another product than 1 of 2 ranks (CPU)" in message
    assert "nobody can say which is right" in message


def test_without_a_fault_the_same_checks_pass(run_pytest):
    run = run_pytest(f"{EACH_GPU}::{REPEAT}", f"{EACH_GPU}::{EXACT}", "--rehearse=3", "--fleet-dir=runs")
    assert run.status == 0, run.text
    assert Counter(run.outcomes.values()) == {"passed": 8, "not applicable": 4}

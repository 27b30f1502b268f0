"""Whether the memory of a GPU holds what was written."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_gpufleet.model.metric import MiB
from pytest_gpufleet.probes.bits import hexadecimal
from pytest_gpufleet.world.rank import Rank

SHARE = 0.96  # of the free memory is tested; the rest is for the block below, its comparison, and the driver
# The comparison of a block takes an eighth more: in GPUs with less than 8 GiB no more than a part of them fits there.
MOST_BLOCK_BYTES, LEAST_BLOCK_BYTES, BLOCK_SHARE = 256 * MiB, MiB, 0.03
REHEARSAL_BYTES = 4 * MiB
ROW = 32  # words: every size is a whole number of rows
SHOWN = 3  # wrong words that are described


@dataclass(frozen=True)
class Pattern:
    """`fill(words, address)` puts what belongs at `address` and after it into rows of int64. `row`: what each of them
    holds, wherever it is, so that a block can be compared without another one that holds what it should."""

    name: str
    fill: Callable[[Tensor, int], object]
    row: Tensor | None = None


@dataclass(frozen=True)
class PatternTest:
    """What `hold_patterns` saw on one rank; sizes in bytes.

    `free` of `total` was free before; `tested` of that was allocated and tested; `kept` was not free again afterwards.
    `wrong` counts words of 8 bytes that did not hold what was written, over all `sweeps`; `trouble` describes the first
    of them, "" if there were none.
    """

    total: int
    free: int
    tested: int
    kept: int
    sweeps: int
    wrong: int
    trouble: str


def hold_patterns(rank: Rank, seconds: float) -> PatternTest:
    """Fill nearly all free memory with one pattern after the other and look whether it is still there.

    Sweeps go up and down through the memory in turn. Each compares a block with the pattern before and then writes the
    next one, so that a pattern, its inverse and the pattern again are the moving inversions of memtest86. Whole rounds
    of all `patterns`, at least one, until `seconds` have passed. torch.OutOfMemoryError if memory that is free cannot
    be allocated.
    """
    # Kernels take memory when they are first used.
    _march(rank, torch.empty(1024, dtype=torch.int64, device=rank.device), LEAST_BLOCK_BYTES, 0)
    free, total = _free_and_total(rank.device)
    words = torch.empty(int(SHARE * free) // (8 * ROW) * ROW, dtype=torch.int64, device=rank.device)
    tested = words.nbytes
    sweeps, wrong, descriptions = _march(rank, words, _block_bytes(free), seconds)
    del words
    kept = free - _free_and_total(rank.device)[0]
    trouble = "; ".join([f"wrong words in memory: {wrong:,}", *descriptions]) if wrong else ""
    return PatternTest(total, free, tested, kept, sweeps, wrong, trouble)


def patterns(device: torch.device, seed: int) -> list[Pattern]:
    """One round of patterns, in the order in which they follow each other.

    Address in address finds wrong address lines; random data and its inverse, weak cells; zeros, ones and alternating
    bits as moving inversions, cells that influence each other; walking ones, wrong data lines.
    """
    address = Pattern("address in address", _own_address)
    random = Pattern("random", _random(device, seed))
    zeros = _rows("zeros", torch.zeros(ROW, dtype=torch.int64, device=device))
    alternating = _rows("alternating bits", torch.full((ROW,), 0x5555_5555_5555_5555, device=device))
    return [
        *(address, _inverse(address)),
        *(random, _inverse(random)),
        *(zeros, _inverse(zeros), zeros),
        *(alternating, _inverse(alternating), alternating),
        *(_rows(f"walking ones, step {step}", _walking_ones(device, step)) for step in range(32)),
    ]


def _rows(name: str, row: Tensor) -> Pattern:
    return Pattern(name, lambda words, _: words.view(-1, ROW).copy_(row), row)


def _own_address(words: Tensor, address: int) -> Tensor:
    begins = torch.arange(address, address + words.nbytes, 8 * ROW, device=words.device)
    offsets = torch.arange(0, 8 * ROW, 8, device=words.device)
    return torch.add(begins.unsqueeze(1), offsets, out=words.view(-1, ROW))


def _random(device: torch.device, seed: int) -> Callable[[Tensor, int], Tensor]:
    generator = torch.Generator(device)

    def fill(words: Tensor, address: int) -> Tensor:
        generator.manual_seed(address + seed)
        return words.random_(-(2**63), None, generator=generator)  # all 64 bits

    return fill


def _walking_ones(device: torch.device, step: int) -> Tensor:
    """A single one in each half of a word, one place further in each word of a row and in each step."""
    place = (torch.arange(ROW, device=device) + step) % 32
    one = torch.ones_like(place)
    return one << place | one << place + 32


def _inverse(pattern: Pattern) -> Pattern:
    name = f"inverse of {pattern.name}"
    if pattern.row is not None:
        return _rows(name, ~pattern.row)

    def fill(words: Tensor, address: int) -> None:
        pattern.fill(words, address)
        torch.bitwise_not(words, out=words)

    return Pattern(name, fill)


def _block_bytes(free: int) -> int:
    return max(LEAST_BLOCK_BYTES, min(MOST_BLOCK_BYTES, int(BLOCK_SHARE * free) // (8 * ROW) * (8 * ROW)))


def _march(rank: Rank, words: Tensor, block_bytes: int, seconds: float) -> tuple[int, int, list[str]]:
    """How many sweeps there were, how many words were wrong, and a description of the first few."""
    blocks = torch.split(words, block_bytes // 8)
    expected = torch.empty_like(blocks[0])
    unequal = torch.empty_like(blocks[0], dtype=torch.bool)
    held: Pattern | None = None
    sweeps, wrong = 0, 0
    descriptions: list[str] = []
    for following in itertools.chain(_rounds(rank.device, seconds), (None,)):  # the last sweep only compares
        with rank.phase(f"memory pattern: {following.name if following else 'the last'}"):
            for block in reversed(blocks) if sweeps % 2 else blocks:
                if held:
                    count, first = _compare(block, held, expected[: len(block)], unequal[: len(block)])
                    wrong += count
                    descriptions += first[: SHOWN - len(descriptions)]
                if following:
                    following.fill(block, block.data_ptr())
        held = following
        sweeps += 1
    return sweeps, wrong, descriptions


def _rounds(device: torch.device, seconds: float) -> Iterator[Pattern]:
    until = time.monotonic() + seconds
    for seed in itertools.count():
        yield from patterns(device, seed)
        if time.monotonic() >= until:
            return


def _compare(block: Tensor, pattern: Pattern, expected: Tensor, unequal: Tensor) -> tuple[int, list[str]]:
    """How many words of a block are not as the pattern has them, and a description of the first few."""
    begin = block.data_ptr()
    if pattern.row is not None:
        torch.ne(block.view(-1, ROW), pattern.row, out=unequal.view(-1, ROW))
    else:
        pattern.fill(expected, begin)
        torch.ne(block, expected, out=unequal)
    if not unequal.view(torch.int64).any():  # eight at a time
        return 0, []
    pattern.fill(expected, begin)
    # Only what is near the first one: a list of all could be larger than the memory that is left.
    first = int(unequal.view(torch.uint8).argmax())
    near = unequal[first : first + 4096].nonzero().flatten() + first
    descriptions = []
    for index in near[:SHOWN].tolist():
        found, wanted = int(block[index]), int(expected[index])
        shown = [hexadecimal(word, 8) for word in (found, wanted, found ^ wanted)]
        descriptions.append(
            f"address {begin + 8 * index:#x} (block {begin:#x} to {begin + block.nbytes:#x}) "
            f"held {shown[0]}, expected {shown[1]}, wrong bits {shown[2]}, pattern {pattern.name}"
        )
    return int(unequal.sum()), descriptions


def _free_and_total(device: torch.device) -> tuple[int, int]:
    """Bytes of memory of a device, after this process has given back what it keeps in reserve."""
    if device.type == "cpu":
        return REHEARSAL_BYTES, REHEARSAL_BYTES
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)

"""How fast the memory of a GPU and of the host is, and whether that of a GPU holds what was written."""

import itertools
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from statistics import geometric_mean, median
from threading import Barrier, BrokenBarrierError
from typing import NamedTuple

import torch
from torch import Tensor

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.health import ClocksUnderLoad
from pytest_gpufleet.machine.processors import by_numa_node
from pytest_gpufleet.model.conditions import FAR
from pytest_gpufleet.model.endings import not_applicable
from pytest_gpufleet.model.metric import GiB, Measurement, MiB, Reading
from pytest_gpufleet.model.place import Place
from pytest_gpufleet.probes.comparison import SHOWN, hexadecimal
from pytest_gpufleet.probes.measure import together
from pytest_gpufleet.probes.timing import calls_in, read_under_load, seconds_each, warm_up
from pytest_gpufleet.world.world import Rank, World

ARRAY_BYTES = {"cuda": 2 * GiB, "cpu": MiB}  # far larger than any cache
WARM_UP_SECONDS, SAMPLE_SECONDS = {"cuda": 0.5, "cpu": 0.0}, {"cuda": 0.2, "cpu": 0.002}
SAMPLES = 3
# Boards of one model with other part numbers differ in each of the two, one the better in one and one in the other: of
# the H200 by 0.6 and 0.7 %, and by 0.03 % in the geometric mean of both (six machines, 2026-11-21 and 23).
BOTH = "copy and triad"


def memory_bandwidth(rank: Rank) -> list[Reading]:
    """GB/s of copy (c = a) and triad (a = b + 0.4 * c) on arrays of float64, counted as BabelStream does: copy moves
    2, triad 3 arrays. And the geometric mean of both, one figure of a GPU's memory."""
    kind = rank.device.type
    a, b, c = (torch.rand(ARRAY_BYTES[kind] // 8, dtype=torch.float64, device=rank.device) for _ in range(3))
    operations: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2, lambda: c.copy_(a)),
        "triad": (3, lambda: torch.add(b, c, alpha=0.4, out=a)),
    }
    rates = {}
    warm_up(rank.device, operations["copy"][1], WARM_UP_SECONDS[kind])  # and the triad follows without a rest
    for name, (arrays, work) in operations.items():
        with rank.phase(f"memory {name}"):
            work()  # the first call may load or choose a kernel
            repeats = calls_in(rank.device, work, SAMPLE_SECONDS[kind])
            times = [seconds_each(rank.device, work, repeats) for _ in range(SAMPLES)]
        rates[name] = tuple(arrays * a.nbytes / each / 1e9 for each in times)
    rates[BOTH] = tuple(map(geometric_mean, zip(*rates.values(), strict=True)))
    at_once, details = "all" if rank.size > 1 else "one", {"dtype": "float64"}
    return [
        Reading("memory_bandwidth", median(each), {"operation": name, "at_once": at_once}, each, None, details)
        for name, each in rates.items()
    ]


COPIES = 50
COPIED_BYTES = 512 * MiB
SECONDS = 2.0  # power is an average over the last second (nvml.h, nvmlDeviceGetPowerUsage)
CLOCKS = ("sm_clock_mhz", "memory_clock_mhz", "clock_event_reasons")
LIMITS = ("sm_clock_max_mhz", "memory_clock_max_mhz", "power_watts")


def clocks_under_load(rank: Rank) -> ClocksUnderLoad | None:
    """The highest clocks that NVML showed while memory was copied, for SECONDS or until both were at their maximum.
    None where NVML does not know. Copies leave the power that matmuls do not: who is not held runs at its maximum."""
    a = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=rank.device)
    b = torch.empty_like(a)

    def copy() -> None:
        for _ in range(COPIES):
            b.copy_(a)

    seen = ClocksUnderLoad(0, 0, 0, 0.0)
    for sm, memory, reasons, *limits, watts in read_under_load(rank, copy, (*CLOCKS, *LIMITS), SECONDS):
        if None in (sm, memory, reasons):
            return None
        if sm > seen.sm:
            seen = seen._replace(sm=sm, reasons=reasons)
        seen = seen._replace(memory=max(seen.memory, memory), watts=max(seen.watts, watts or 0.0))
        if all(limit and clock >= limit for clock, limit in zip((seen.sm, seen.memory), limits, strict=True)):
            break
    return seen


ARRAYS = 3  # that a triad moves: two are read, one is written


def host_memory_bandwidth(world: World, nbytes: int, seconds: float) -> list[Measurement]:
    """GB/s of the host's memory at each NUMA node: the triad of STREAM, a = b + 3 c, counted as there: what the
    processor reads of `a` before it writes does not count. Not applicable where a container leaves too little. A thread
    on each processor works on arrays of `nbytes` of its own, to which it is the first to write, so they lie in the
    memory of its NUMA node. The nodes of a machine are divided among its ranks. A node is held against the other ones:
    how fast its modules are, and on how many channels, only the firmware knows. Then the same with arrays in the memory
    of a node half of all nodes on, both ways at once, which is what the links between sockets carry."""
    every = (world.each(world.nodes, _triads, nbytes, seconds, operation) for operation in ("triad", FAR))
    return [figure for each in every for figure in together(world, [found for ranks in each for found in ranks])]


def _triads(rank: Rank, nbytes: int, seconds: float, operation: str) -> list[Reading]:
    nodes = sorted(by_numa_node().items())  # those of a socket one after the other: half of all on is another socket
    if not nodes:
        not_applicable("this process may not use any NUMA node with all its processors and memory")
    processors = sum(len(each) for _, each in nodes)
    if short := tools.short_of(processors, ARRAYS * nbytes * processors):
        not_applicable(short)
    half = len(nodes) // 2 if operation == FAR else 0
    if operation == FAR and not half:
        return []
    mine = list(zip(nodes, nodes[half:] + nodes[:half], strict=True))[rank.index :: rank.size]
    return [_triad(rank, *node, near, nbytes, seconds, operation) for node, (_, near) in mine]


def _triad(
    rank: Rank, number: int, processors: Sequence[int], near: Sequence[int], nbytes: int, seconds: float, operation: str
) -> Reading:
    """`near`: the processors next to the memory."""
    start = Barrier(len(processors))

    def rates(processor: int, next_to_memory: int) -> list[float]:
        try:
            os.sched_setaffinity(0, {next_to_memory})  # of this thread alone
            a, b, c = (_first_touched(nbytes, value) for value in (0.0, 1.0, 2.0))
            os.sched_setaffinity(0, {processor})
            return [_rate(a, b, c, seconds) for _ in range(SAMPLES) if start.wait() >= 0]
        except BrokenBarrierError:
            return []  # another thread has the reason
        except BaseException:
            start.abort()  # nobody waits for this thread
            raise

    torch.set_num_threads(1)  # of each thread that is started from now on, until the next test
    with rank.phase(f"{operation} at NUMA node {number}"), ThreadPoolExecutor(len(processors)) as threads:
        by_processor = list(threads.map(rates, processors, itertools.cycle(near)))
    samples = tuple(map(sum, zip(*by_processor, strict=True)))
    details = {"processors": len(processors), "bytes": nbytes * len(processors)}
    where = Place(rank.node, "numa", number)
    return Reading("host_memory_bandwidth", median(samples), {"operation": operation}, samples, where, details)


def _first_touched(nbytes: int, value: float) -> Tensor:
    """Memory that no other thread has ever had: an allocator may give what lies at another NUMA node."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel or a Python without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float64).fill_(value)


def _rate(a: Tensor, b: Tensor, c: Tensor, seconds: float) -> float:
    times, began = 0, time.perf_counter()
    while times == 0 or time.perf_counter() - began < seconds:
        torch.add(b, c, alpha=3.0, out=a)
        times += 1
    return times * ARRAYS * a.nbytes / (time.perf_counter() - began) / 1e9


SHARE = 0.96  # of the free memory is tested; the rest is for the block below, its comparison, and the driver
# The comparison of a block takes an eighth more: in GPUs with less than 8 GiB no more than a part of them fits there.
MOST_BLOCK_BYTES, LEAST_BLOCK_BYTES, BLOCK_SHARE = 256 * MiB, MiB, 0.03
REHEARSAL_BYTES = 4 * MiB
ROW = 32  # words: every size is a whole number of rows


class Pattern(NamedTuple):
    """`fill(words, address)` puts what belongs at `address` there. `row`: what each row of int64 holds, if alike."""

    name: str
    fill: Callable[[Tensor, int], Tensor]
    row: Tensor | None = None


class PatternTest(NamedTuple):
    """Sizes in bytes."""

    total: int
    free: int  # before
    kept: int  # not free again afterwards
    trouble: str  # how many words were wrong, and the first of them


def hold_patterns(rank: Rank, seconds: float) -> PatternTest:
    """Fill nearly all free memory with one pattern after the other: whole rounds, at least one, until `seconds` have
    passed. Sweeps go up and down in turn, and each compares a block with the pattern before and then writes the next
    one: a pattern, its inverse and the pattern again are the moving inversions of memtest86."""
    # Kernels take memory when they are first used.
    _march(rank, torch.empty(1024, dtype=torch.int64, device=rank.device), LEAST_BLOCK_BYTES, 0)
    free, total = _free_and_total(rank.device)
    words = torch.empty(int(SHARE * free) // (8 * ROW) * ROW, dtype=torch.int64, device=rank.device)
    trouble = _march(rank, words, _block_bytes(free), seconds)
    del words
    if shares_memory(rank.device):  # the page cache and other processes take and leave it: that is no fault
        return PatternTest(free, free, 0, trouble)
    return PatternTest(total, free, free - _free_and_total(rank.device)[0], trouble)


def shares_memory(device: torch.device) -> bool:
    """Whether it has the host's memory, whose page cache is not free (unslothai/unsloth pull request 10704)."""
    return device.type == "cuda" and bool(torch.cuda.get_device_properties(device).is_integrated)


def patterns(device: torch.device, seed: int) -> list[Pattern]:
    """One round of patterns. Address in address finds wrong address lines; random data and its inverse, weak cells;
    zeros, ones and alternating bits, cells that influence each other; walking ones, wrong data lines."""
    generator, column = torch.Generator(device), torch.arange(ROW, device=device)

    def own_address(words: Tensor, address: int) -> Tensor:
        begins = torch.arange(address, address + words.nbytes, 8 * ROW, device=device)
        return torch.add(begins.unsqueeze(1), 8 * column, out=words.view(-1, ROW))

    def all_64_bits(words: Tensor, address: int) -> Tensor:
        return words.random_(-(2**63), None, generator=generator.manual_seed(address + seed))

    def walking_ones(step: int) -> Tensor:
        """A single one in each half of a word, one place further in each word of a row and in each step."""
        one, at = torch.ones_like(column), (column + step) % 32
        return one << at | one << at + 32

    address, random = Pattern("address in address", own_address), Pattern("random", all_64_bits)
    zeros = _rows("zeros", torch.zeros_like(column))
    alternating = _rows("alternating bits", torch.full_like(column, 0x5555_5555_5555_5555))
    return [
        *(address, _inverse(address)),
        *(random, _inverse(random)),
        *(zeros, _inverse(zeros), zeros),
        *(alternating, _inverse(alternating), alternating),
        *(_rows(f"walking ones, step {step}", walking_ones(step)) for step in range(32)),
    ]


def _rows(name: str, row: Tensor) -> Pattern:
    return Pattern(name, lambda words, _: words.view(-1, ROW).copy_(row), row)


def _inverse(pattern: Pattern) -> Pattern:
    name = f"inverse of {pattern.name}"
    if pattern.row is not None:
        return _rows(name, ~pattern.row)
    return Pattern(name, lambda words, address: pattern.fill(words, address).bitwise_not_())


def _block_bytes(free: int) -> int:
    return max(LEAST_BLOCK_BYTES, min(MOST_BLOCK_BYTES, int(BLOCK_SHARE * free) // (8 * ROW) * (8 * ROW)))


def _march(rank: Rank, words: Tensor, block_bytes: int, seconds: float) -> str:
    blocks = torch.split(words, block_bytes // 8)
    expected = torch.empty_like(blocks[0])
    unequal = torch.empty_like(blocks[0], dtype=torch.bool)
    held: Pattern | None = None
    wrong, texts, until = 0, list[str](), time.monotonic() + seconds
    seeds = itertools.takewhile(lambda seed: not seed or time.monotonic() < until, itertools.count())
    every = itertools.chain.from_iterable(patterns(rank.device, seed) for seed in seeds)
    for sweep, following in enumerate(itertools.chain(every, (None,))):  # the last sweep only compares
        with rank.phase(f"memory pattern: {following.name if following else 'the last'}"):
            for block in reversed(blocks) if sweep % 2 else blocks:
                if held:
                    count, first = _compare(block, held, expected[: len(block)], unequal[: len(block)])
                    wrong += count
                    texts += first[: SHOWN - len(texts)]
                if following:
                    following.fill(block, block.data_ptr())
        held = following
    return "; ".join([f"wrong words in memory: {wrong:,}", *texts]) if wrong else ""


def _compare(block: Tensor, pattern: Pattern, expected: Tensor, unequal: Tensor) -> tuple[int, list[str]]:
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
    texts = []
    for index in near[:SHOWN].tolist():
        held, right, wrong = map(hexadecimal, (block[index], expected[index], block[index] ^ expected[index]))
        texts.append(
            f"address {begin + 8 * index:#x} (block {begin:#x} to {begin + block.nbytes:#x}) "
            f"held {held}, expected {right}, wrong bits {wrong}, pattern {pattern.name}"
        )
    return int(unequal.sum()), texts


def _free_and_total(device: torch.device) -> tuple[int, int]:
    """Bytes of memory of a device, after this process has given back what it keeps in reserve."""
    if device.type == "cpu":
        return REHEARSAL_BYTES, REHEARSAL_BYTES
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)

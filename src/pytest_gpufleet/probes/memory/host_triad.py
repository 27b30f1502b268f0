"""How fast the memory of the host is, at each of its NUMA nodes."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from statistics import median
from threading import Barrier, BrokenBarrierError

import torch
from torch import Tensor

from pytest_gpufleet.hardware import host
from pytest_gpufleet.model import place
from pytest_gpufleet.model.endings import not_applicable
from pytest_gpufleet.model.measurement import Measurement, Reading
from pytest_gpufleet.probes.measure import together
from pytest_gpufleet.world.rank import Rank
from pytest_gpufleet.world.world import World

ARRAYS = 3  # that a triad moves: two are read, one is written
FACTOR = 3.0
SAMPLES = 3


def host_memory_bandwidth(world: World, nbytes: int, seconds: float) -> list[Measurement]:
    """GB/s of the host's memory at each NUMA node: the triad of STREAM, a = b + 3 c.

    A thread on each processor works on arrays of `nbytes` of its own. It is the first to write to them, so they lie in
    the memory of its NUMA node. The nodes of a machine are divided among its ranks. Each of three samples takes about
    `seconds`. Counted as STREAM does: what the processor reads of `a` before it writes there does not count.

    Not applicable where a container leaves too little of the processors or of the memory: a node of which a process has
    a part only shows what that part reaches.

    A node is held against the other ones. One alone shows what it reaches and not what it should: how many channels its
    processor has, and how fast its modules are, only the firmware knows (DMI), which virtual machines do not show.
    """
    by_rank = [found for ranks in world.each(world.nodes, _triads, nbytes, seconds) for found in ranks]
    return together(world, by_rank)


def _triads(rank: Rank, nbytes: int, seconds: float) -> list[Reading]:
    """Of the NUMA nodes that are this rank's share."""
    nodes = sorted(host.processors_by_numa_node().items())
    if not nodes:
        not_applicable("this process may use no NUMA node whole, with all its processors and its memory")
    processors = sum(len(each) for _, each in nodes)
    if short := host.short_of(processors, ARRAYS * nbytes * processors):
        not_applicable(short)
    return [_triad(rank, number, processors, nbytes, seconds) for number, processors in nodes[rank.index :: rank.size]]


def _triad(rank: Rank, number: int, processors: Sequence[int], nbytes: int, seconds: float) -> Reading:
    start = Barrier(len(processors))

    def rates(processor: int) -> list[float]:
        try:
            os.sched_setaffinity(0, {processor})  # of this thread alone
            a, b, c = (_first_touched(nbytes, value) for value in (0.0, 1.0, 2.0))
            return [_rate(a, b, c, seconds) for _ in range(SAMPLES) if start.wait() >= 0]
        except BrokenBarrierError:
            return []  # another thread tells why
        except BaseException:
            start.abort()  # nobody waits for this thread
            raise

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # of each thread that is started from now on
    try:
        with rank.phase(f"triad at NUMA node {number}"), ThreadPoolExecutor(len(processors)) as threads:
            by_processor = list(threads.map(rates, processors))
    finally:
        torch.set_num_threads(before)
    samples = tuple(map(sum, zip(*by_processor, strict=True)))
    details = {"processors": len(processors), "bytes": nbytes * len(processors)}
    where = place.numa_node(number, rank.node)
    return Reading("host_memory_bandwidth", median(samples), {"operation": "triad"}, samples, where, details)


def _first_touched(nbytes: int, value: float) -> Tensor:
    """Memory that no other thread has ever had: an allocator may give what lies at another NUMA node."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel or a Python without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float64).fill_(value)


def _rate(a: Tensor, b: Tensor, c: Tensor, seconds: float) -> float:
    """GB/s that this thread moves."""
    times, began = 0, time.perf_counter()
    while times == 0 or time.perf_counter() - began < seconds:
        torch.add(b, c, alpha=FACTOR, out=a)
        times += 1
    return times * ARRAYS * a.nbytes / (time.perf_counter() - began) / 1e9

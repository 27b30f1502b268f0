"""How fast collectives are.

Small ones come from CUDA graphs where the GPUs can do that: launched one by one, two H200 showed 20 to 85 us for what
takes them 5 to 7 (8 bytes to 32 KiB), so the figure was the host's. From 4 MiB on the host keeps up. The condition
`method` says which way a small one was launched; the two are never compared.

Bus bandwidth as nccl-tests defines it (doc/PERFORMANCE.md there): algbw = S / t, busbw = algbw x factor, GB = 1e9
bytes. S is the size of the larger of a rank's two buffers, so where a rank has a part for each rank (all_gather,
reduce_scatter, all_to_all, gather, scatter) the bytes of all ranks together.
"""

import ctypes
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from pytest_gpufleet.machine.nccl_log import asked_for
from pytest_gpufleet.machine.software import steering
from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.measurement import Reading
from pytest_gpufleet.model.metric import MiB, Size
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.probes.collectives.table import COLLECTIVES
from pytest_gpufleet.probes.timing import line_up, replayed, timing
from pytest_gpufleet.world.rank import Rank
from pytest_gpufleet.world.world import World

WORD = 4  # bytes of a float32
SAMPLES = 3
LATENCY_SAMPLES = 5
SMALL = 1 * MiB  # S up to which collectives come from CUDA graphs
FILLED = 0.8  # of the memory of a GPU, by buffers


def bus_bandwidth(rank: Rank, name: str, nbytes: int, in_place: bool | None = None) -> Reading:
    """Bus bandwidth in GB/s of one collective with S = `nbytes` of float32, by the method of nccl-tests: operations in
    a row without a gap, random data, sum, root 0. The median of three samples; the slowest rank counts. `in_place`:
    where torch has both ways; nccl-tests has a column for each."""
    seconds, moved, conditions, details = _timed(rank, name, nbytes, in_place, SAMPLES)
    rates = tuple(moved / each * COLLECTIVES[name].factor(rank.size) / 1e9 for each in seconds)
    return Reading("busbw", median(rates), conditions, rates, WORLD, details)


def collective_latency(rank: Rank, name: str, nbytes: int) -> Reading:
    """Time in us of one collective of many in a row, as `bus_bandwidth` measures it, for small S = `nbytes` (at least
    one element for each part). The median of five samples; the slowest rank counts."""
    seconds, _, conditions, details = _timed(rank, name, nbytes, None, LATENCY_SAMPLES)
    times = tuple(each * 1e6 for each in seconds)
    return Reading("collective_latency", median(times), conditions, times, WORLD, details)


def sweep(rank: Rank, figure: Callable[..., Reading], name: str, sizes: Sequence[int], **how: Any) -> list[Reading]:
    """`bus_bandwidth` or `collective_latency` (`figure`) of a collective at several sizes: a curve."""
    return [figure(rank, name, nbytes, **how) for nbytes in sizes]


def fitting(world: World, name: str, sizes: Iterable[Size[int]]) -> list[int]:
    """Those of the sizes of which the buffers fit into the memory of every GPU."""
    memory = min((gpu.memory_bytes for gpu in world.gpus), default=math.inf)
    on_ranks = (size.on(world) for size in sizes)
    return [nbytes for nbytes in on_ranks if COLLECTIVES[name].held(nbytes, world.size) <= FILLED * memory]


def nvls(device: torch.device) -> bool:
    """Whether NCCL may use NVLink SHARP (in-switch reduction): the device supports multicast, and no variable rules it
    out. What it did stands in its log alone."""
    if device.type != "cuda" or asked_for("nvls_not_used", steering()):
        return False
    multicast_supported = 132  # cuda.h: CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    value = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(value), multicast_supported, device.index)
    return bool(value.value)


def _timed(
    rank: Rank, name: str, nbytes: int, in_place: bool | None, samples: int
) -> tuple[tuple[float, ...], int, dict[str, Condition], dict[str, Condition]]:
    """Seconds of one collective, by sample, the bytes of S, the conditions, and how often it was done."""
    collective, n, count = COLLECTIVES[name], rank.size, nbytes // WORD
    in_place = collective.timed_in_place if in_place is None else in_place
    if collective.in_parts:
        # As nccl-tests: each part a multiple of 16 bytes, or the figure would depend on how the parts are aligned.
        block = n * 16 // WORD
        count = count // block * block or count
    total = collective.total(count, n)
    small = total * WORD <= SMALL
    zeros = partial(torch.zeros, device=rank.device)
    with rank.phase(f"{name} {nbytes:,} bytes"):
        input, output = collective.buffers(total, n, rank.index, in_place, zeros)
        launch = partial(collective.run, rank.group, output, input)
        method, took = "replayed", replayed(rank, launch, samples) if small else None
        if took is None:
            # Random data anew each time: sums in place grow out of all bounds.
            method, took = "eager", timing(rank, launch, samples, before=input.uniform_)
        del input, output, launch
    if rank.device.type == "cuda":
        torch.cuda.empty_cache()  # the next check may need all memory
    conditions: dict[str, Condition] = {
        "collective": name, "bytes": max(nbytes, n * WORD) if collective.in_parts else nbytes,
        "dtype": "float32", "ranks": n, "in_place": in_place, "nvls": nvls(rank.device),
        **({"method": method} if small else {}),
    }  # fmt: skip
    return took.seconds, total * WORD, conditions, {"iterations": took.iterations, "runs": took.runs}


NAME, NBYTES = "all_reduce", 8
LAUNCHES = 25  # of a run: far fewer than the thousand that a GPU takes before its host has to wait
RUNS = 9  # of a sample: what holds a host up now and then spoils some of them, and not their median
LAUNCH_SAMPLES = 5


def launch_time(rank: Rank) -> Reading:
    """Time in us that this rank's host needs to launch an all_reduce of 8 bytes, while the other ranks do the same; it
    does not wait for any. The median of five samples. On CPU ranks the whole operation."""
    data = torch.zeros(NBYTES // 4, device=rank.device)
    launch = partial(COLLECTIVES[NAME].run, rank.group, data, data)
    with rank.phase(f"launches of {NAME}"):
        launch()
        samples = tuple(median(_each(rank, launch) for _ in range(RUNS)) * 1e6 for _ in range(LAUNCH_SAMPLES))
    conditions: dict[str, Condition] = {"collective": NAME, "bytes": NBYTES, "ranks": rank.size}
    return Reading("launch_time", median(samples), conditions, samples)


def _each(rank: Rank, launch: Callable[[], object]) -> float:
    """Seconds of one launch."""
    line_up(rank)
    began = time.perf_counter()
    for _ in range(LAUNCHES):
        launch()
    return (time.perf_counter() - began) / LAUNCHES

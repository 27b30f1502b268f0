"""How fast collectives are.

Small ones come from CUDA graphs where the GPUs can do that: launched one by one, two H200 showed 20 to 85 us for what
takes them 5 to 7 (8 bytes to 32 KiB), so the figure was the host's. From 4 MiB on the host keeps up.

Bus bandwidth as nccl-tests defines it (doc/PERFORMANCE.md there): algbw = S / t, busbw = algbw x factor, GB = 1e9
bytes. S is the size of the larger of a rank's two buffers, so where a rank has a part for each rank (all_gather,
reduce_scatter, all_to_all, gather, scatter) the bytes of all ranks together."""

import ctypes
import math
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from pytest_gpufleet.machine.nccl_log import asked_for
from pytest_gpufleet.machine.software import steering
from pytest_gpufleet.model.conditions import ACROSS, ALGORITHMS, INSIDE, Condition, c_number
from pytest_gpufleet.model.metric import MiB, Reading, Size
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.probes.collectives.table import COLLECTIVES
from pytest_gpufleet.probes.timing import everyones, line_up, replayed, timing
from pytest_gpufleet.world.world import Rank, World

SMALL = 1 * MiB  # S up to which collectives come from CUDA graphs
FILLED = 0.8  # of the memory of a GPU, by buffers


def bus_bandwidth(rank: Rank, name: str, nbytes: int, in_place: bool | None = None) -> Reading:
    """Bus bandwidth in GB/s of one collective with S = `nbytes` of float32, as nccl-tests measures it: operations in a
    row without a gap, random data, sum, root 0. The median of three samples. `in_place`: where torch has both ways."""
    factor = COLLECTIVES[name].factor(rank.size)
    return _timed(rank, "busbw", name, nbytes, 3, lambda seconds, moved: moved / seconds * factor / 1e9, in_place)


def collective_latency(rank: Rank, name: str, nbytes: int) -> Reading:
    """Microseconds of one collective of many in a row, as `bus_bandwidth` measures it. The median of five samples."""
    return _timed(rank, "collective_latency", name, nbytes, 5, lambda seconds, moved: seconds * 1e6)


def sweep(rank: Rank, figure: Callable[..., Reading], name: str, sizes: Sequence[int], **how: Any) -> list[Reading]:
    """`bus_bandwidth` or `collective_latency` (`figure`) of a collective at several sizes: a curve."""
    return [figure(rank, name, nbytes, **how) for nbytes in sizes]


def fitting(world: World, name: str, sizes: Iterable[Size[int]]) -> list[int]:
    """Those of the sizes of which the buffers fit into the memory of every GPU."""
    memory = min((gpu.memory_bytes for gpu in world.gpus if gpu.memory_bytes), default=math.inf)
    on_ranks = (size.on(world) for size in sizes)
    return [nbytes for nbytes in on_ranks if COLLECTIVES[name].held(nbytes, world.size) <= FILLED * memory]


def nvls(device: torch.device) -> bool:
    """Whether NCCL may use NVLink SHARP (in-switch reduction): multicast is there, and no variable rules it out."""
    if device.type != "cuda" or asked_for("nvls_not_used", steering()):
        return False
    multicast_supported = 132  # cuda.h: CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    value = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(value), multicast_supported, device.index)
    return bool(value.value)


MNNVL = "NCCL_MNNVL_ENABLE"  # NCCL's manual: 0 leaves NVLinks to other nodes out


def network_conditions(rank: Rank) -> dict[str, Condition]:
    """Of GPUs of several nodes: version (22809 is 2.28.9, as in nccl.h) and algorithm of NCCL where all have the same;
    whether all are in one NVLink domain, where any is in one. What the network can do is known to the run."""
    if rank.device.type != "cuda":
        return {}
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    asked, mnnvl = steering().get("NCCL_ALGO", "").lower(), steering().get(MNNVL)
    domain = rank.gpu.domain if rank.gpu and not (mnnvl and c_number(mnnvl) == 0) else None
    mine = [
        rank.node,
        10_000 * major + 100 * minor + patch,
        ALGORITHMS.index(asked) if asked in ALGORITHMS else -1,
        zlib.crc32(repr(domain).encode()) if domain else 0,
    ]
    nodes, versions, algorithms, domains = map(set, zip(*everyones(rank, mine), strict=True))
    found: dict[str, Condition] = {}
    if len(nodes) == 1:
        return found
    if len(versions) == 1:
        found["nccl"] = int(*versions)
    if len(algorithms) == 1 and algorithms != {-1}:
        found["algorithm"] = ALGORITHMS[int(*algorithms)]
    if any(domains):
        found["domain"] = INSIDE if len(domains) == 1 else ACROSS
    return found


def _timed(
    rank: Rank, metric: str, name: str, nbytes: int, samples: int, figure: Callable[[float, int], float],
    in_place: bool | None = None,
) -> Reading:  # fmt: skip
    """`figure(seconds, moved)`: of one collective, with so many bytes of S."""
    collective, n = COLLECTIVES[name], rank.size
    with rank.phase(f"{name} {nbytes:,} bytes"):
        input, output = collective.zeros(rank, nbytes, in_place)
        moved = 4 * max(input.numel(), output.numel())
        launch = partial(collective.run, rank.group, output, input)
        method, took = "replayed", replayed(rank, launch, samples) if moved <= SMALL else None
        if took is None:
            # Random data anew each time: sums in place grow out of all bounds.
            method, took = "eager", timing(rank, launch, samples, before=input.uniform_)
        del input, output, launch
    torch.cuda.empty_cache()  # the next check may need all memory
    conditions: dict[str, Condition] = {
        "collective": name, "bytes": max(nbytes, 4 * n) if collective.one_part else nbytes,
        "dtype": "float32", "ranks": n, "in_place": collective.timed_in_place if in_place is None else in_place,
        "nvls": nvls(rank.device), **({"method": method} if moved <= SMALL else {}), **network_conditions(rank),
    }  # fmt: skip
    figures = tuple(figure(each, moved) for each in took.seconds)
    details: dict[str, Condition] = {"iterations": took.iterations, "runs": took.runs}
    return Reading(metric, median(figures), conditions, figures, WORLD, details)


LAUNCHES = 25  # of a run: far fewer than the thousand that a GPU takes before its host has to wait
RUNS = 9  # of a sample: what holds a host up now and then spoils some of them, and not their median


def launch_time(rank: Rank) -> Reading:
    """Time in us that this rank's host needs to launch an all_reduce of 8 bytes, while the other ranks do the same; it
    does not wait for any. The median of five samples. On CPU ranks the whole operation."""
    data = torch.zeros(2, device=rank.device)
    launch = partial(COLLECTIVES["all_reduce"].run, rank.group, data, data)
    with rank.phase("launches of all_reduce"):
        launch()
        samples = tuple(median(_each(rank, launch) for _ in range(RUNS)) * 1e6 for _ in range(5))
    conditions: dict[str, Condition] = {"collective": "all_reduce", "bytes": 8, "ranks": rank.size}
    return Reading("launch_time", median(samples), conditions, samples)


def _each(rank: Rank, launch: Callable[[], object]) -> float:  # seconds of one launch
    line_up(rank)
    began = time.perf_counter()
    for _ in range(LAUNCHES):
        launch()
    return (time.perf_counter() - began) / LAUNCHES

"""Collectives: one table of them, and how fast they are.

Bus bandwidth as nccl-tests defines it (doc/PERFORMANCE.md there): algbw = S / t, busbw = algbw x factor, GB = 1e9
bytes. S is the size of the larger of a rank's two buffers, so where a rank has a part for each rank (all_gather,
reduce_scatter, all_to_all, gather, scatter) the bytes of all ranks together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from pytest_gpufleet.hardware.environment import steering
from pytest_gpufleet.model.measurement import Reading
from pytest_gpufleet.model.metric import WORLD, Condition
from pytest_gpufleet.probes.timing.all_ranks import Timing, timing
from pytest_gpufleet.world.rank import Rank

SAMPLES = 3
LATENCY_SAMPLES = 5

Combine = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Collective:
    """One collective over n ranks.

    `launch(group, output, input, root, op)` starts it and gives what to wait for.
    `expected(inputs, me, root, combine)` is rank `me`'s output from the stacked inputs of all ranks, None where it is
    undefined; `combine` is what the operation makes of stacked inputs.
    `in_parts`: S has a part for each rank; `one_part`: the buffer that holds only one of them.
    `in_place`: whether torch has it in place only, also, or never.
    """

    launch: Callable[[ProcessGroup, Tensor, Tensor, int, Any], list[dist.Work]]
    expected: Callable[[Tensor, int, int, Combine], Tensor | None]
    factor: Callable[[int], float]
    in_parts: bool = False
    one_part: Literal["input", "output"] | None = None
    in_place: Literal["always", "also", "never"] = "never"
    reduces: bool = False
    rooted: bool = False

    def total(self, count: int, n: int) -> int:
        """Elements of S: at least `count`, and as many for each part."""
        return -(-count // n) * n if self.in_parts else count

    def buffers(
        self, total: int, n: int, me: int, in_place: bool, empty: Callable[[int], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Rank `me`'s input and output, made by `empty(count)`; in place they share memory."""
        part = total // n
        if in_place:
            whole = empty(total)
            mine = whole[part * me : part * (me + 1)]
            return mine if self.one_part == "input" else whole, mine if self.one_part == "output" else whole
        sizes = [part if self.one_part == buffer else total for buffer in ("input", "output")]
        return empty(sizes[0]), empty(sizes[1])


def _start(function: Callable[..., Any], *tensors: Any, **how: Any) -> list[dist.Work]:
    return [function(*tensors, **how, async_op=True)]


def _send_to_next(group: ProcessGroup, output: Tensor, input: Tensor) -> list[dist.Work]:
    me, n = dist.get_rank(group), dist.get_world_size(group)
    send = dist.P2POp(dist.isend, input, _global(group, (me + 1) % n), group)
    receive = dist.P2POp(dist.irecv, output, _global(group, (me - 1) % n), group)
    works: list[dist.Work] = dist.batch_isend_irecv([send, receive])
    return works


def _global(group: ProcessGroup, rank: int) -> int:
    return dist.get_global_rank(group, rank)


def _at_root(group: ProcessGroup, root: int, whole: Tensor) -> list[Tensor] | None:
    """The parts of a buffer that only the root has."""
    return list(whole.chunk(dist.get_world_size(group))) if dist.get_rank(group) == root else None


def _part(tensor: Tensor, index: int, n: int) -> Tensor:
    return tensor.chunk(n)[index]


COLLECTIVES = {
    "all_reduce": Collective(
        launch=lambda group, output, input, root, op: _start(dist.all_reduce, output, op, group=group),
        expected=lambda inputs, me, root, combine: combine(inputs),
        factor=lambda n: 2 * (n - 1) / n,
        in_place="always",
        reduces=True,
    ),
    "all_gather": Collective(
        launch=lambda group, output, input, root, op: _start(dist.all_gather_into_tensor, output, input, group=group),
        expected=lambda inputs, me, root, combine: inputs.flatten(),
        factor=lambda n: (n - 1) / n,
        in_parts=True,
        one_part="input",
        in_place="also",
    ),
    "reduce_scatter": Collective(
        launch=lambda group, output, input, root, op: _start(
            dist.reduce_scatter_tensor, output, input, op, group=group
        ),
        expected=lambda inputs, me, root, combine: _part(combine(inputs), me, len(inputs)),
        factor=lambda n: (n - 1) / n,
        in_parts=True,
        one_part="output",
        in_place="also",
        reduces=True,
    ),
    "broadcast": Collective(
        launch=lambda group, output, input, root, op: _start(dist.broadcast, output, _global(group, root), group=group),
        expected=lambda inputs, me, root, combine: inputs[root],
        factor=lambda n: 1.0,
        in_place="always",
        rooted=True,
    ),
    "reduce": Collective(
        launch=lambda group, output, input, root, op: _start(
            dist.reduce, output, _global(group, root), op, group=group
        ),
        expected=lambda inputs, me, root, combine: combine(inputs) if me == root else None,
        factor=lambda n: 1.0,
        in_place="always",
        reduces=True,
        rooted=True,
    ),
    "all_to_all": Collective(
        launch=lambda group, output, input, root, op: _start(dist.all_to_all_single, output, input, group=group),
        expected=lambda inputs, me, root, combine: torch.cat([_part(each, me, len(inputs)) for each in inputs]),
        factor=lambda n: (n - 1) / n,
        in_parts=True,
    ),
    "gather": Collective(
        launch=lambda group, output, input, root, op: _start(
            dist.gather, input, _at_root(group, root, output), _global(group, root), group=group
        ),
        expected=lambda inputs, me, root, combine: inputs.flatten() if me == root else None,
        factor=lambda n: (n - 1) / n,
        in_parts=True,
        one_part="input",
        rooted=True,
    ),
    "scatter": Collective(
        launch=lambda group, output, input, root, op: _start(
            dist.scatter, output, _at_root(group, root, input), _global(group, root), group=group
        ),
        expected=lambda inputs, me, root, combine: _part(inputs[root], me, len(inputs)),
        factor=lambda n: (n - 1) / n,
        in_parts=True,
        one_part="output",
        rooted=True,
    ),
    "sendrecv": Collective(
        launch=lambda group, output, input, root, op: _send_to_next(group, output, input),
        expected=lambda inputs, me, root, combine: inputs[me - 1],
        factor=lambda n: 1.0,
    ),
}


def bus_bandwidth(
    rank: Rank, name: str, nbytes: int, dtype: torch.dtype = torch.float32, in_place: bool | None = None
) -> Reading:
    """Bus bandwidth in GB/s of one collective with S = `nbytes`, by the method of nccl-tests: launches in a row, one
    synchronisation, random data, sum, root 0. The median of three samples; the slowest rank counts.

    torch has all_reduce, broadcast and reduce in place only; the others are measured out of place, or `in_place` where
    the table says "also". nccl-tests has a column for each.
    """
    took, moved, conditions = _timed(rank, name, nbytes, dtype, in_place, SAMPLES)
    rates = tuple(moved / seconds * COLLECTIVES[name].factor(rank.size) / 1e9 for seconds in took.seconds)
    return Reading("busbw", median(rates), conditions, rates, WORLD, _launches(took))


def latency(rank: Rank, name: str, nbytes: int, dtype: torch.dtype = torch.float32) -> Reading:
    """Time in us from one launch of a collective to the next, as `bus_bandwidth` measures it, for small S = `nbytes`
    (at least one element for each part). The median of five samples; the slowest rank counts."""
    took, _, conditions = _timed(rank, name, nbytes, dtype, None, LATENCY_SAMPLES)
    times = tuple(seconds * 1e6 for seconds in took.seconds)
    return Reading("collective_latency", median(times), conditions, times, WORLD, _launches(took))


def _launches(took: Timing) -> dict[str, Condition]:
    return {"iterations": took.iterations, "runs": took.runs}


def sweep(rank: Rank, figure: Callable[..., Reading], name: str, sizes: Sequence[int], **how: Any) -> list[Reading]:
    """`bus_bandwidth` or `latency` (`figure`) of a collective at several sizes: a curve."""
    return [figure(rank, name, nbytes, **how) for nbytes in sizes]


def buffer_bytes(name: str, nbytes: int, n: int) -> int:
    """GPU memory that `bus_bandwidth` needs for its buffers, out of place where there is a choice."""
    collective = COLLECTIVES[name]
    if collective.in_place == "always":
        return nbytes
    return nbytes + nbytes // n if collective.one_part else 2 * nbytes


def nvls(device: torch.device) -> bool:
    """Whether NCCL may use NVLink SHARP (in-switch reduction): the device supports multicast and it is not disabled."""
    if device.type != "cuda" or steering().get("NCCL_NVLS_ENABLE") == "0":
        return False
    multicast_supported = 132  # cuda.h: CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    value = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(value), multicast_supported, device.index)
    return bool(value.value)


def _timed(
    rank: Rank, name: str, nbytes: int, dtype: torch.dtype, in_place: bool | None, samples: int
) -> tuple[Timing, int, dict[str, Condition]]:
    """The time of one collective, the bytes of S, and the conditions."""
    collective, n = COLLECTIVES[name], rank.size
    if in_place is None:
        in_place = collective.in_place == "always"
    count = nbytes // dtype.itemsize
    if collective.in_parts:
        # As nccl-tests: each part a multiple of 16 bytes, or the figure would depend on how the parts are aligned.
        block = n * max(1, 16 // dtype.itemsize)
        count = count // block * block or count
    total = collective.total(count, n)
    with rank.phase(f"{name} {nbytes:,} bytes"):
        took = _timing(rank, collective, total, dtype, in_place, samples)
    if rank.device.type == "cuda":
        torch.cuda.empty_cache()  # the next check may need all memory
    conditions: dict[str, Condition] = {
        "collective": name,
        "bytes": max(nbytes, n * dtype.itemsize) if collective.in_parts else nbytes,
        "dtype": str(dtype).removeprefix("torch."),
        "ranks": n,
        "in_place": in_place,
        "nvls": nvls(rank.device),
    }
    return took, total * dtype.itemsize, conditions


def _timing(rank: Rank, collective: Collective, total: int, dtype: torch.dtype, in_place: bool, samples: int) -> Timing:
    input, output = collective.buffers(
        total, rank.size, rank.index, in_place, lambda count: torch.empty(count, dtype=dtype, device=rank.device)
    )
    return timing(
        rank,
        lambda: collective.launch(rank.group, output, input, 0, dist.ReduceOp.SUM),
        samples,
        before=input.uniform_,  # anew each time: sums in place grow out of all bounds
    )

"""Collectives: what each must deliver, and how fast it does.

Bus bandwidth as nccl-tests defines it (doc/PERFORMANCE.md there): algbw = S / t, busbw = algbw x factor, GB = 1e9
bytes. S is the size of the larger of a rank's two buffers, so for all_gather, reduce_scatter and all_to_all the bytes
of all ranks together.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from pytest_gpufleet.probes.reading import WORLD, Reading
from pytest_gpufleet.world.rank import Rank

# As nccl-tests: so many launches one after the other, then one synchronisation. Fewer where that would take longer
# than SAMPLE_SECONDS: on a broken machine an operation can take a hundred times as long.
ITERATIONS = 20
MIN_ITERATIONS = 2
SAMPLE_SECONDS = 2.0
WARM_UP = 3
SAMPLES = 3

# How many bits of an integer each dtype holds exactly.
EXACT_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53, torch.int64: 62}


@dataclass(frozen=True)
class Collective:
    """One collective over n ranks.

    `launch(group, output, input, root)` starts it and gives what to wait for; in-place ones get their input as a copy
    in `output`.
    `expected(inputs, me, root)` is rank `me`'s output from every rank's input, None where it is undefined.
    `input_parts`, `output_parts`: which buffer holds only one of n parts of S.
    """

    launch: Callable[[ProcessGroup, Tensor, Tensor, int], list[dist.Work]]
    expected: Callable[[list[Tensor], int, int], Tensor | None]
    factor: Callable[[int], float]
    one_part_in: bool = False
    one_part_out: bool = False
    in_place: bool = False

    def counts(self, total: int, n: int) -> tuple[int, int]:
        """Elements of a rank's input and output when S has `total` elements, a multiple of n."""
        return total // n if self.one_part_in else total, total // n if self.one_part_out else total


def _start(function: Callable[..., Any], *tensors: Any, group: ProcessGroup) -> list[dist.Work]:
    return [function(*tensors, group=group, async_op=True)]


def _send_to_next(group: ProcessGroup, output: Tensor, input: Tensor) -> list[dist.Work]:
    me, n = dist.get_rank(group), dist.get_world_size(group)
    send = dist.P2POp(dist.isend, input, _global(group, (me + 1) % n), group)
    receive = dist.P2POp(dist.irecv, output, _global(group, (me - 1) % n), group)
    works: list[dist.Work] = dist.batch_isend_irecv([send, receive])
    return works


def _global(group: ProcessGroup, rank: int) -> int:
    return dist.get_global_rank(group, rank)


def _chunk(tensor: Tensor, index: int, n: int) -> Tensor:
    return tensor.chunk(n)[index]


def _sum(inputs: list[Tensor]) -> Tensor:
    return torch.stack(inputs).sum(0)


COLLECTIVES = {
    "all_reduce": Collective(
        launch=lambda group, output, input, root: _start(dist.all_reduce, output, group=group),
        expected=lambda inputs, me, root: _sum(inputs),
        factor=lambda n: 2 * (n - 1) / n,
        in_place=True,
    ),
    "all_gather": Collective(
        launch=lambda group, output, input, root: _start(dist.all_gather_into_tensor, output, input, group=group),
        expected=lambda inputs, me, root: torch.cat(inputs),
        factor=lambda n: (n - 1) / n,
        one_part_in=True,
    ),
    "reduce_scatter": Collective(
        launch=lambda group, output, input, root: _start(dist.reduce_scatter_tensor, output, input, group=group),
        expected=lambda inputs, me, root: _chunk(_sum(inputs), me, len(inputs)),
        factor=lambda n: (n - 1) / n,
        one_part_out=True,
    ),
    "broadcast": Collective(
        launch=lambda group, output, input, root: _start(dist.broadcast, output, _global(group, root), group=group),
        expected=lambda inputs, me, root: inputs[root],
        factor=lambda n: 1.0,
        in_place=True,
    ),
    "reduce": Collective(
        launch=lambda group, output, input, root: _start(dist.reduce, output, _global(group, root), group=group),
        expected=lambda inputs, me, root: _sum(inputs) if me == root else None,
        factor=lambda n: 1.0,
        in_place=True,
    ),
    "all_to_all": Collective(
        launch=lambda group, output, input, root: _start(dist.all_to_all_single, output, input, group=group),
        expected=lambda inputs, me, root: torch.cat([_chunk(each, me, len(inputs)) for each in inputs]),
        factor=lambda n: (n - 1) / n,
    ),
    "sendrecv": Collective(
        launch=lambda group, output, input, root: _send_to_next(group, output, input),
        expected=lambda inputs, me, root: inputs[me - 1],
        factor=lambda n: 1.0,
    ),
}


def pattern(index: int, count: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rank `index`'s data: `count` int64 values that look random, differ by position and rank, and of which `n` can be
    added up in `dtype` without rounding. A swapped, lost or doubled element changes the result."""
    # Fibonacci hashing. Tensors of int64 wrap around; the offset must be made to.
    offset = ((index + 1) * -4417276706812531889 + 2**63) % 2**64 - 2**63
    values = torch.arange(1, count + 1, device=device) * -7046029254386353131 + offset
    values ^= values >> 29
    return values.remainder(2 ** EXACT_BITS[dtype] // n)


def exchange(rank: Rank, name: str, dtype: torch.dtype, total: int, root: int = 0) -> str:
    """Run a collective on `pattern` data with S of about `total` elements; "" if every element of this rank's result is
    exactly right (0 ULP), else how many are wrong and the first of them."""
    collective, n = COLLECTIVES[name], rank.size
    count_in, count_out = collective.counts(total // n * n, n)
    inputs = [pattern(index, count_in, n, dtype, rank.device) for index in range(n)]
    mine = inputs[rank.index].to(dtype)
    output = mine.clone() if collective.in_place else torch.full((count_out,), -1, dtype=dtype, device=rank.device)
    with rank.phase(f"{name} of {dtype}"):
        for work in collective.launch(rank.group, output, mine, root):
            work.wait()
        result = output.cpu()
    expected = collective.expected(inputs, rank.index, root)
    return "" if expected is None else wrong_elements(result, expected.to(dtype).cpu())


def wrong_elements(result: Tensor, expected: Tensor) -> str:
    """ "" if all elements are equal (NaN is not), else the count of wrong ones and the first three."""
    wrong = (result != expected).nonzero().flatten()
    if not len(wrong):
        return ""
    first = "; ".join(f"[{i}] is {result[i].item()}, expected {expected[i].item()}" for i in wrong[:3].tolist())
    return f"{len(wrong):,} of {len(expected):,} elements are wrong: {first}"


def bus_bandwidth(rank: Rank, name: str, nbytes: int, dtype: torch.dtype = torch.float32) -> Reading:
    """Bus bandwidth in GB/s of one collective with S = `nbytes`, by the method of nccl-tests: back-to-back launches,
    one synchronisation, random data. The median of three samples; the slowest rank counts."""
    collective, n = COLLECTIVES[name], rank.size
    count_in, count_out = collective.counts(nbytes // dtype.itemsize // n * n, n)
    input = torch.rand(count_in, dtype=dtype, device=rank.device)
    # In place, the two are one buffer.
    output = input if collective.in_place else torch.empty(count_out, dtype=dtype, device=rank.device)

    def seconds(iterations: int) -> float:
        input.uniform_()  # sums in place would grow out of all bounds
        _line_up(rank)
        began = time.perf_counter()
        # Not waited for one by one: the launches follow each other without a gap, as those of nccl-tests do.
        works = [collective.launch(rank.group, output, input, 0) for _ in range(iterations)]
        for work in itertools.chain(*works):
            work.wait()
        _synchronize(rank)
        return (time.perf_counter() - began) / iterations

    with rank.phase(f"{name} {nbytes:,} bytes"):
        seconds(WARM_UP)
        iterations = _agree(rank, min(ITERATIONS, max(MIN_ITERATIONS, int(SAMPLE_SECONDS / seconds(1)))))
        samples = tuple(nbytes / seconds(iterations) * collective.factor(n) / 1e9 for _ in range(SAMPLES))
    return Reading(
        metric="busbw",
        value=median(samples),
        samples=samples,
        conditions={
            "collective": name,
            "bytes": nbytes,
            "dtype": str(dtype).removeprefix("torch."),
            "ranks": n,
            "nvls": nvls(rank.device),
        },
        place=WORLD,
        details={"iterations": iterations},
    )


def buffer_bytes(name: str, nbytes: int, n: int) -> int:
    """GPU memory that `bus_bandwidth` needs for its buffers."""
    collective = COLLECTIVES[name]
    count_in, count_out = collective.counts(nbytes, n)
    return count_in if collective.in_place else count_in + count_out


def nvls(device: torch.device) -> bool:
    """Whether NCCL may use NVLink SHARP (in-switch reduction): the device supports multicast and it is not disabled."""
    if device.type != "cuda" or os.environ.get("NCCL_NVLS_ENABLE") == "0":
        return False
    multicast_supported = 132  # cuda.h: CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    value = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(value), multicast_supported, device.index)
    return bool(value.value)


def _line_up(rank: Rank) -> None:
    """All ranks start the clock together."""
    dist.all_reduce(torch.zeros(1, device=rank.device), group=rank.group)
    _synchronize(rank)


def _agree(rank: Rank, number: int) -> int:
    """The smallest number any rank came with: all must launch equally often."""
    smallest = torch.tensor(number, device=rank.device)
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=rank.group)
    return int(smallest.item())


def _synchronize(rank: Rank) -> None:
    if rank.device.type == "cuda":
        torch.cuda.synchronize()

"""Whether an all_reduce is exact that is far larger than two gigabytes, where offsets need more than 31 bits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pytest_gpufleet.probes.collectives.table import COLLECTIVES
from pytest_gpufleet.probes.timing.all_ranks import wait
from pytest_gpufleet.world.rank import Rank

# The numbers repeat after so many elements: a prime, so that data moved by any block or chunk of NCCL's look different.
PERIOD = 251
AT_A_TIME = {"cuda": 1 << 26, "cpu": 1 << 12}  # elements that are made or compared; the data alone may fill half a GPU


def large_all_reduce(rank: Rank, nbytes: int) -> str:
    """What is wrong with an all_reduce of `nbytes` of float32, which takes them in GPU memory once; "" if every element
    is exactly right."""
    data = torch.empty(nbytes // 4, device=rank.device)
    with rank.phase(f"all_reduce of {nbytes:,} bytes, exactly"):
        for part, positions in _parts(data):
            part.copy_(_numbers(positions, rank.index))
        wait([COLLECTIVES["all_reduce"].launch(rank.group, data, data)])
        wrong, first = 0, ""
        for part, positions in _parts(data):
            expected = torch.zeros_like(part)
            for index in range(rank.size):
                expected += _numbers(positions, index)
            bad = (part != expected).nonzero().flatten()
            if bad.numel() and not wrong:
                where = int(bad[0])
                found = f"{part[where].item():g}, expected {expected[where].item():g}"
                first = f"the first is number {int(positions[where]):,}: {found}"
            wrong += bad.numel()
    return f"{wrong:,} of {data.numel():,} elements are wrong; {first}" if wrong else ""


def _parts(data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The data part by part, with the position of each element."""
    begin = 0
    for part in torch.split(data, AT_A_TIME[data.device.type]):
        yield part, torch.arange(begin, begin + part.numel(), device=data.device)
        begin += part.numel()


def _numbers(positions: Tensor, index: int) -> Tensor:
    """Whole numbers of a rank, so small that float32 holds the sum of thousands of ranks."""
    return (positions + 3 * index).remainder_(PERIOD).float()

"""Whether collectives stay exact again and again, and while two of them run at the same time."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_gpufleet.probes.collectives.exactness import LARGE, OPERATIONS, SHOWN, bounded, whole_numbers
from pytest_gpufleet.probes.collectives.table import COLLECTIVES
from pytest_gpufleet.probes.timing.all_ranks import agree, seconds, wait
from pytest_gpufleet.world import process_group
from pytest_gpufleet.world.rank import Rank


def stays_exact(rank: Rank, duration: float) -> tuple[int, str]:
    """all_reduce of one large tensor of float32 again and again for about `duration` seconds: how often it was done,
    and "" if every element of every result was exactly right."""
    n = rank.size
    count = bounded(LARGE[rank.device.type], n)
    numbers = whole_numbers(OPERATIONS["sum"], count, n, torch.float32, rank.device)
    mine, expected = numbers[rank.index].float(), numbers.sum(0).float()
    del numbers
    buffer = torch.empty_like(mine)

    def repeat() -> Tensor:
        buffer.copy_(mine)
        wait([COLLECTIVES["all_reduce"].launch(rank.group, buffer, buffer)])
        return (buffer != expected).sum()

    with rank.phase("all_reduce, repeated"):
        seconds(rank, repeat, 1)
        times = agree(rank, max(1, int(duration / seconds(rank, repeat, 3))))
        wrong = torch.zeros(times, dtype=torch.int64, device=rank.device)
        for number in range(times):
            wrong[number] = repeat()
    bad = wrong.nonzero().flatten().tolist()
    if not bad:
        return times, ""
    where = ", ".join(f"number {i:,} ({int(wrong[i]):,} elements)" for i in bad[:SHOWN])
    return times, f"{len(bad):,} of {times:,} results of {count:,} elements are wrong: {where}"


def two_at_once(rank: Rank, times: int = 10) -> str:
    """all_reduce in one group and all_gather in another of the same ranks, each on a stream of its own, at the same
    time: what is wrong on this rank, "" if nothing is. All ranks of the world call it."""
    second = dist.new_group(dist.get_process_group_ranks(rank.group), timeout=process_group.TIMEOUT)
    assert isinstance(second, dist.ProcessGroup)  # else this rank is no member
    jobs = [_Job("all_reduce", rank.group, rank), _Job("all_gather", second, rank)]
    _synchronize(rank)  # the data are there before other streams use them
    with rank.phase("all_reduce and all_gather at once"):
        for _ in range(times):
            works = [job.launch() for job in jobs]
            for job, work in zip(jobs, works, strict=True):
                job.check(work)
        _synchronize(rank)
        wrong = [f"{job.name}: {count:,} wrong elements" for job in jobs if (count := int(job.wrong.item()))]
    dist.destroy_process_group(second)
    return ", ".join(wrong)


def _synchronize(rank: Rank) -> None:
    if rank.device.type == "cuda":
        torch.cuda.synchronize()


class _Job:
    """A collective that is run again and again on a stream of its own."""

    def __init__(self, name: str, members: dist.ProcessGroup, rank: Rank) -> None:
        self.name, self.members, collective, add = name, members, COLLECTIVES[name], OPERATIONS["sum"]
        self.collective = collective
        self.stream = torch.cuda.Stream() if rank.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        count = bounded(LARGE[rank.device.type], rank.size)
        total, in_place = collective.total(count, rank.size), collective.in_place == "always"
        self.input, self.output = collective.buffers(
            total, rank.size, rank.index, in_place, lambda size: torch.empty(size, device=rank.device)
        )
        numbers = whole_numbers(add, self.input.numel(), rank.size, torch.float32, rank.device)
        expected = collective.expected(numbers, rank.index, 0, add.combine)
        assert expected is not None
        self.mine, self.expected = numbers[rank.index].float(), expected.float()
        self.wrong = torch.zeros((), dtype=torch.int64, device=rank.device)

    def launch(self) -> list[dist.Work]:
        with torch.cuda.stream(self.stream):
            self.input.copy_(self.mine)
            return self.collective.launch(self.members, self.output, self.input)

    def check(self, works: list[dist.Work]) -> None:
        with torch.cuda.stream(self.stream):
            wait([works])  # on a GPU it is the stream that waits
            self.wrong += (self.output != self.expected).sum()

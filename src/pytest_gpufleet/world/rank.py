"""What a rank knows about itself, and the process groups that it has with others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.events import LossCurve
from pytest_gpufleet.model.metric import conditions, number
from pytest_gpufleet.model.place import Gpu, Where
from pytest_gpufleet.world.call import Members
from pytest_gpufleet.world.engines.rank_files import Progress

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass
class Rank:
    """One process of a world, seen from inside.

    `index` and `size` count within the world, subset or group that runs the function, `local_size` the ranks of this
    machine (`node`) that run it, in whatever group: they share its cores. `device` is already the current one of torch,
    `gpu` None in a rehearsal. `kept`: what functions leave here for the next call of the same test, by name."""

    index: int
    size: int
    node: int
    local_size: int
    device: torch.device
    gpu: Gpu | None
    kept: dict[str, Any] = field(repr=False)
    _groups: dict[Members, ProcessGroup] = field(repr=False)
    _members: Members | None = field(repr=False)  # of the group, if it has one
    _progress: Progress = field(repr=False)
    _losses: list[LossCurve] = field(default_factory=list, repr=False)
    _phase: str = field(default="", repr=False)

    @property
    def group(self) -> ProcessGroup:
        """The process group of this world, subset or group: NCCL on GPUs, Gloo on CPUs."""
        if self._members is None:
            raise RuntimeError("this rank has no process group: use the fixture nccl_group instead of world")
        return self._groups[self._members]

    def record_losses(
        self, training: Mapping[str, Condition], by_step: Mapping[int, float], place: Where | None = None
    ) -> None:
        """Put the losses of a training on record, for trackers: `gpufleet export` has them. Nothing is judged by them.

        `training`: what was trained and how, like {"model": "resnet50", "ranks": 1}. `by_step`: the loss by steps done,
        if it is finite. `place`: this rank's own GPU, or WORLD where all train one model, which one of them records."""
        losses = {int(step): number(loss, "a loss") for step, loss in by_step.items()}
        finite = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
        about = conditions(training, "what was trained")
        self._losses.append(LossCurve(about, tuple(finite), tuple(finite.values()), place))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what this rank is doing, for the report of a hang or crash. Phases nest; costs about a microsecond. An
        exception leaves the phase as it is, so that the report shows where it was raised."""
        outer, self._phase = self._phase, name
        self._progress.phase(name)
        yield
        self._phase = outer
        self._progress.phase(outer)


# The deadline of a call is the controller's; the process group's own must never fire before it.
TIMEOUT = timedelta(days=7)
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
_stores: list[Any] = []  # where the ranks of all nodes meet, once they have


def alone(rank: Rank, init_method: str) -> Rank:
    """This rank with a process group of those that run the function, who meet by `init_method` and do nothing else."""
    everyone = tuple(range(rank.size))
    join(rank, [everyone], init_method)
    return replace(rank, _members=everyone)


def join(rank: Rank, groups: Sequence[Members], init_method: str) -> None:
    """Make the process group of each of `groups`. Every rank of the world calls it, in the same order of groups."""
    import torch.distributed as dist

    if not dist.is_initialized():
        with rank.phase(f"process group: {BACKENDS[rank.device.type]}"):
            _begin(rank, init_method=init_method, rank=rank.index, world_size=rank.size)
    everyone = tuple(range(rank.size))
    for members in groups:
        with rank.phase(f"process group of ranks {list(members)}"):
            group = dist.group.WORLD if members == everyone else dist.new_group(list(members), timeout=TIMEOUT)
            if rank.index in members:
                assert isinstance(group, dist.ProcessGroup)
                _connect(rank, members, group)


def join_alone(rank: Rank, groups: Sequence[Members], number: int, init_method: str) -> None:
    """Make a world of its own of each of `groups`, which have no rank in common, in the place of what its members had.
    Every rank of the whole world calls it, with another `number` each time. For ranks of several nodes.

    Only its members make a world, at the same time as others, and one that hangs keeps nobody else. By
    torch.distributed.new_group all ranks make each group, one after the other. (With use_local_synchronization members
    find each other by how many groups each has made before, which differs here.)"""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if not _stores:
        with rank.phase("meeting of all ranks"):
            _stores.append(next(rendezvous(init_method, rank.index, rank.size, timeout=TIMEOUT))[0])
    # All members of a world leave it together, also those that get no other: on two H200 (NCCL 2.28) one that went
    # alone did not come back, and torch asks that all ranks call destroy_process_group.
    leaving = {each for members in groups for each in members}
    if dist.is_initialized() and not leaving.isdisjoint({rank.index}.union(*rank._groups)):
        with rank.phase("leaving a process group"):
            dist.destroy_process_group()
        rank._groups.clear()
    for index, members in enumerate(groups):
        if rank.index in members:
            with rank.phase(f"process group of ranks {list(members)}"):
                store = PrefixStore(f"{number}/{index}", _stores[0])
                _begin(rank, store=store, rank=members.index(rank.index), world_size=len(members))
                assert isinstance(dist.group.WORLD, dist.ProcessGroup)
                _connect(rank, members, dist.group.WORLD)


def _begin(at: Rank, **members: Any) -> None:
    import torch.distributed as dist

    device = at.device if at.device.type == "cuda" else None
    dist.init_process_group(BACKENDS[at.device.type], timeout=TIMEOUT, device_id=device, **members)


def _connect(rank: Rank, members: Members, group: ProcessGroup) -> None:
    """By a first collective: here, so that no measurement pays for it."""
    import torch
    import torch.distributed as dist

    rank._groups[members] = group
    dist.all_reduce(torch.zeros(1, device=rank.device), group=group)
    if rank.device.type == "cuda":
        torch.cuda.synchronize()

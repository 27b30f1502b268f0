"""The process group of a world and those of its subsets. Runs on ranks."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from pytest_gpufleet.world.call import Members
from pytest_gpufleet.world.rank import Rank

# The deadline of a call is the controller's; the process group's own must never fire before it.
TIMEOUT = timedelta(days=7)

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def alone(rank: Rank, init_method: str) -> Rank:
    """This rank with a process group of nobody but the ranks that run the function, who meet by `init_method`. For
    ranks that were started to do nothing else: those of a whole world have one group above all others."""
    everyone = tuple(range(rank.size))
    join(rank, [everyone], init_method)
    return replace(rank, _members=everyone)


def join(rank: Rank, groups: Sequence[Members], init_method: str) -> None:
    """Make the process group of each of `groups`. Every rank of the world calls it, in the same order of groups."""
    if not dist.is_initialized():
        with rank.phase(f"process group: {BACKENDS[rank.device.type]}"):
            dist.init_process_group(
                BACKENDS[rank.device.type],
                init_method=init_method,
                rank=rank.index,
                world_size=rank.size,
                timeout=TIMEOUT,
                device_id=rank.device if rank.device.type == "cuda" else None,
            )
    everyone = tuple(range(rank.size))
    for members in groups:
        with rank.phase(f"process group of ranks {list(members)}"):
            group = dist.group.WORLD if members == everyone else dist.new_group(list(members), timeout=TIMEOUT)
            if rank.index in members:
                assert isinstance(group, dist.ProcessGroup)
                rank._groups[members] = group
                # The first collective connects the ranks: here, so that no measurement pays for it.
                dist.all_reduce(torch.zeros(1, device=rank.device), group=group)
                if rank.device.type == "cuda":
                    torch.cuda.synchronize()

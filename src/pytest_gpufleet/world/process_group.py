"""The process group of a world and those of its subsets. Runs on ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from pytest_gpufleet.world.rank import Rank

# The deadline of a call is the controller's; the process group's own must never fire before it.
TIMEOUT = timedelta(days=7)

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def join(rank: Rank, members: tuple[int, ...], store: str) -> None:
    """Make the process group of `members`. Every rank of the world calls it, in the same order of groups.

    `store` is a file in a folder that only this user can enter: ranks find each other through it, so that no port is
    open for strangers and none can be in use already.
    """
    if not dist.is_initialized():
        with rank.phase(f"process group: {BACKENDS[rank.device.type]}"):
            dist.init_process_group(
                BACKENDS[rank.device.type],
                store=dist.FileStore(store, rank.size),  # type: ignore[attr-defined]  # documented, not declared
                rank=rank.index,
                world_size=rank.size,
                timeout=TIMEOUT,
                device_id=rank.device if rank.device.type == "cuda" else None,
            )
    everyone = tuple(range(rank.size))
    with rank.phase(f"process group of ranks {list(members)}"):
        group = dist.group.WORLD if members == everyone else dist.new_group(list(members), timeout=TIMEOUT)
        if rank.index in members:
            assert isinstance(group, dist.ProcessGroup)
            rank._groups[members] = group
            # The first collective connects the ranks: here, so that no measurement pays for it.
            dist.all_reduce(torch.zeros(1, device=rank.device), group=group)
            if rank.device.type == "cuda":
                torch.cuda.synchronize()

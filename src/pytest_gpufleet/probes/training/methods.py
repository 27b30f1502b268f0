"""DDP and FSDP: a copy of the network on every rank, or a part of its weights, their gradients and the state of the
optimizer."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from pytest_gpufleet.model.endings import not_applicable
from pytest_gpufleet.world.rank import Rank

# Newer versions of torch have renamed it.
_PARAMETERS = signature(DistributedDataParallel.__init__).parameters
_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"
_NO_BUFFERS: dict[str, Any] = {_BUFFERS: False}


def under(
    method: str, rank: Rank, module: nn.Module, parts: Iterable[nn.Module], dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A module as `method` trains it: "ddp", "fsdp" by these parts in `dtype`, or alone."""
    if method == "ddp":
        return distributed(rank, module)
    if method == "fsdp":
        return fully_sharded(rank, module, dtype, parts)
    return module


def without_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Backward passes within this leave gradients on their rank; where ranks do not train by DDP nothing changes."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def distributed(rank: Rank, module: nn.Module) -> DistributedDataParallel:
    """A copy of the network on every rank; the gradients are averaged."""
    return DistributedDataParallel(
        module,
        device_ids=[rank.device] if rank.gpu is not None else None,
        process_group=rank.group,
        gradient_as_bucket_view=True,
        bucket_cap_mb=_bucket_megabytes(rank),
        static_graph=True,
        **_NO_BUFFERS,
    )


def _bucket_megabytes(rank: Rank) -> int:
    """DDP's bucket size. Over NVLink all gradients in one: on 4x H200 (batch 512, amp, torch 2.11) scaling was 97.1 %
    against 96.4 % with the default of 25 MB, since the reductions take from the backward pass more than they hide.
    Over PCIe and between nodes, where a reduction takes long, the default, which overlaps them."""
    by_nvlink = rank.gpu is not None and rank.gpu.nvlinks_active and rank.size == rank.local_size
    return 300 if by_nvlink else 25


def fully_sharded(
    rank: Rank, model: nn.Module, dtype: torch.dtype = torch.float32, parts: Iterable[nn.Module] | None = None
) -> nn.Module:
    """`model` under FSDP: the parameters of one of `parts` (submodules, by default its children) are gathered when it
    is their turn. It computes in `dtype` and reduces gradients in fp32. FSDP takes no channels_last parameters."""
    if rank.device.type == "cpu" and torch.__version__ < "2.11":
        # https://github.com/pytorch/pytorch/issues/162338; before torch 2.7 it does not run there at all.
        not_applicable("FSDP on CPU ranks needs torch 2.11: older ones sum gradients where they should average")
    try:  # here, since it takes a second, and whoever only collects the checks shall not wait for it
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError:  # before torch 2.6
        from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard  # type: ignore[attr-defined]
    mesh = DeviceMesh.from_group(rank.group, rank.device.type)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*(model.children() if parts is None else parts), model):
        if next(module.parameters(), None) is not None:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def own_shard(rank: Rank, whole: Tensor) -> Tensor:
    """The part of a tensor that FSDP keeps on this rank; empty if there are fewer rows than ranks."""
    shards = whole.chunk(rank.size)
    return shards[rank.index] if rank.index < len(shards) else whole[:0]


def held(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter: its shard under FSDP, else all of it."""
    local: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach()

"""Copies that must be identical on every rank."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_gpufleet.world.rank import Rank


def differences(rank: Rank, tensors: Mapping[str, Tensor]) -> list[str]:
    """Where this rank's copy of tensors differs, in any bit, from the copy that most ranks have.

    All ranks call it with tensors of the same names and shapes. One line for each tensor that differs. Where no copy
    is on more than half of the ranks, as with two ranks that differ, every rank has a line and names another one.

    Ranks send each other digests of their copies, and the copies themselves only where these differ, so that it takes
    no more memory on thousands of ranks than on two.
    """
    lines = []
    for name, tensor in tensors.items():
        mine = tensor.detach().flatten().contiguous().view(torch.uint8)
        digests = _digests(rank, mine)
        usual, count = Counter(digests).most_common(1)[0]
        if count == rank.size:
            continue
        # Two copies are enough to tell each rank of one that is not its own.
        first = digests.index(usual)
        second = next(index for index, digest in enumerate(digests) if digest != usual)
        copies = {source: _copy_of(rank, mine, source) for source in (first, second)}
        majority = 2 * count > rank.size
        own = digests[rank.index]
        if majority and own == usual:
            continue
        other = second if own == usual else first
        wrong = (mine != copies[other]).nonzero().flatten()
        element = int(wrong[0]) // tensor.element_size()
        doubt = "" if majority else f", against rank {other}: no majority says which of them is right"
        lines.append(f"{name}: {len(wrong)} of {mine.numel()} bytes, first in element {element}{doubt}")
    return lines


def _digests(rank: Rank, mine: Tensor) -> list[bytes]:
    """SHA-256 of the copy of each rank."""
    digest = hashlib.sha256(mine.cpu().numpy().data).digest()
    own = torch.tensor([*digest], dtype=torch.uint8, device=mine.device)
    gathered = torch.empty(rank.size * own.numel(), dtype=torch.uint8, device=mine.device)
    dist.all_gather_into_tensor(gathered, own, group=rank.group)
    return [row.numpy().tobytes() for row in gathered.cpu().view(rank.size, -1)]


def _copy_of(rank: Rank, mine: Tensor, source: int) -> Tensor:
    copy = mine.clone()
    dist.broadcast(copy, dist.get_global_rank(rank.group, source), group=rank.group)
    return copy

"""Copies that must be identical on every rank."""

from __future__ import annotations

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
    """
    lines = []
    for name, tensor in tensors.items():
        mine = tensor.detach().flatten().contiguous().view(torch.uint8)
        gathered = torch.empty(rank.size * mine.numel(), dtype=torch.uint8, device=mine.device)
        dist.all_gather_into_tensor(gathered, mine, group=rank.group)
        copies = gathered.cpu().view(rank.size, -1)
        rows = [copy.numpy().tobytes() for copy in copies]
        own = rows[rank.index]
        most_common, count = Counter(rows).most_common(1)[0]
        majority = 2 * count > rank.size
        if majority and own == most_common:
            continue
        other = next(index for index, row in enumerate(rows) if row != own and (row == most_common or not majority))
        wrong = (copies[rank.index] != copies[other]).nonzero().flatten()
        element = int(wrong[0]) // tensor.element_size()
        doubt = "" if majority else f", against rank {other}: no majority says which of them is right"
        lines.append(f"{name}: {len(wrong)} of {mine.numel()} bytes, first in element {element}{doubt}")
    return lines

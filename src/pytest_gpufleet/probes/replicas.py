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

    All ranks call it with tensors of the same names and shapes. One line for each tensor that differs. With two ranks
    nobody is the majority, and the one with the higher index counts as different.
    """
    lines = []
    for name, tensor in tensors.items():
        mine = tensor.detach().contiguous().view(torch.uint8).flatten()
        copies = torch.empty(rank.size * mine.numel(), dtype=torch.uint8, device=mine.device)
        dist.all_gather_into_tensor(copies, mine, group=rank.group)
        each = copies.cpu().view(rank.size, -1)
        rows = [row.numpy().tobytes() for row in each]
        most_common = Counter(rows).most_common(1)[0][0]
        if rows[rank.index] != most_common:
            reference = each[rows.index(most_common)]
            wrong = (each[rank.index] != reference).nonzero().flatten()
            element = int(wrong[0]) // tensor.element_size()
            lines.append(f"{name}: {len(wrong)} of {len(reference)} bytes, first in element {element}")
    return lines

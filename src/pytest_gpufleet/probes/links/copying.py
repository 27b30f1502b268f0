"""Copies between memories, timed and verified as nvbandwidth does: 4 copies to warm up and 16 timed, three samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.probes.bits import hexadecimal
from pytest_gpufleet.probes.links.copier import WORD_BYTES, Copier, Copy, HostCopier, Meet
from pytest_gpufleet.probes.links.cuda_copier import CudaCopier
from pytest_gpufleet.world.rank import Rank

WARM_UP = 4
COPIES = 16
SAMPLES = 3
# A stream takes about a thousand in advance; of those that keep the way busy there are twice as many.
MOST_COPIES = 300
# Fewer copies where they would take longer than this: a broken link can be a hundred times as slow.
SAMPLE_SECONDS = 0.5
# What memory holds that nothing was copied to.
BLANK = -1


@dataclass(frozen=True)
class Copied:
    """What copies over links gave: their figures, and faults of the data that arrived."""

    measurements: list[Measurement]
    faults: list[Fault]


def copier(rank: Rank) -> Copier:
    """The one for this rank's device."""
    return HostCopier() if rank.device.type == "cpu" else CudaCopier(rank)


def bandwidth(
    copier: Copier, copies: Sequence[Copy], meet: Meet | None = None, lasting: float = 0.0
) -> tuple[float, ...]:
    """Samples in GB/s of the first of these copies, while the others keep the way busy, each of at least `lasting`
    seconds. Where other ranks copy at the same time, they `meet` before each sample."""
    copier.seconds(copies, 0, 1)  # the first use of a way makes it
    one = copier.seconds(copies, 0, 1, meet)
    enough = max(COPIES, math.ceil(lasting / one))
    timed = max(1, min(enough, int(SAMPLE_SECONDS / one), MOST_COPIES))
    warm_up = min(WARM_UP, timed)
    nbytes = copies[0].nbytes
    return tuple(nbytes / copier.seconds(copies, warm_up, timed, meet) / 1e9 for _ in range(SAMPLES))


def fill(words: Tensor, seed: int) -> Tensor:
    """Put data into memory of which no two words are alike, and none is like that at its place with another seed."""
    # Both hold for a step that is odd and whose change with the seed is even: tensors of int64 wrap around.
    torch.arange(len(words), out=words)
    return words.mul_(-7046029254386353131 + 2 * seed).add_(seed)


def difference(words: Tensor, expected: Tensor) -> str:
    """ "" if all words arrived, else how many did not, and the first of those."""
    wrong = words != expected
    if not (count := int(wrong.sum())):
        return ""
    first = int(wrong.int().argmax())
    found, right = (hexadecimal(int(each[first]), WORD_BYTES) for each in (words, expected))
    return f"{count:,} of {len(words):,} words of 8 bytes are wrong: word {first:,} is {found}, expected {right}"

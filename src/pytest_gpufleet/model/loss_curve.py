"""The losses of a training, for whoever follows them elsewhere: nothing is judged by them here."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pytest_gpufleet.model.codec import Finite
from pytest_gpufleet.model.event_values import Count
from pytest_gpufleet.model.place import Where


class LossCurve(msgspec.Struct, frozen=True):
    """`training`: what was trained and how, as the conditions of a figure are told. `steps`: how many were done when
    the loss at the same position was that. `place`: the GPU, or WORLD of one model on all ranks; None of a rank that
    does not say, whose own it then is."""

    training: Mapping[str, str | int | float | bool]
    steps: tuple[Count, ...]
    losses: tuple[Finite, ...]
    place: Where | None = None

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.losses):
            raise ValueError(f"{len(self.losses)} losses of {len(self.steps)} steps")

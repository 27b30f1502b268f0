"""What a GPU computes of fixed data, as hashes: all GPUs of one model with the same libraries have the same."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pytest_gpufleet.model.event_values import Sum
from pytest_gpufleet.model.place import Where


class Part(msgspec.Struct, frozen=True):
    """One piece of fixed work: the SHA-256 of the bits that go in and of those that come out. `output` is "" if the
    same device gave other bits when it did the work again."""

    inputs: Sum
    output: Sum


class Fingerprint(msgspec.Struct, frozen=True):
    """The parts, by names that tell shapes and types, as one place computed them. `kind`: the model, its compute
    capability and its number of SMs. `software`: the versions of what computes, and the variables that steer it. Only
    places with the same kind and software must have the same bits."""

    place: Where
    kind: str
    software: Mapping[str, str]
    parts: Mapping[str, Part]

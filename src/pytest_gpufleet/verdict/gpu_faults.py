"""Faults of one GPU, and of facts that a GPU has and does not tell."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_gpufleet.model.facts import Unavailable
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import Gpu


def gpu_fault(code: str, gpu: Gpu, what: str) -> Fault:
    return Fault(code, (gpu.place,), what)


def fact_unreadable(gpu: Gpu, fact: str, why: Unavailable) -> Fault:
    return gpu_fault("fact_unreadable", gpu, f"{fact} cannot be read ({why})")


def unreadable(gpu: Gpu, names: Iterable[str]) -> list[Fault]:
    """Facts that a GPU has and does not tell, each with the reason."""
    told = {name: gpu[name] for name in names}
    return [
        fact_unreadable(gpu, name, why) for name, why in told.items() if isinstance(why, Unavailable) and why.applicable
    ]

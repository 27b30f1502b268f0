"""Whom a failed check names: the GPUs that somebody has to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import WORLD, Pair, Place, Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict.accusations import accusations, at, causes, explaining, is_cause


@dataclass(frozen=True)
class Accused:
    """What a failed check says of GPUs, by their places.

    `named` are to blame. `beside` are only in pairs with one of those, and it says with which. `everybody`: all GPUs
    failed together, and nothing tells which of them is the cause. `explained`: what is said of these has one of
    `causes`, which say nothing against them; `is_explained` if that is so of all that the check says.
    """

    named: tuple[Place, ...] = ()
    beside: dict[Place, Place] = field(default_factory=dict)
    everybody: bool = False
    explained: tuple[Place, ...] = ()
    causes: tuple[Fault, ...] = ()
    is_explained: bool = False


def accused(record: Record) -> dict[str, Accused]:
    """Whom each check names that failed, or of which a figure missed its limit."""
    return _by_check(record, [gpu.place for gpu in record.topology.gpus], lambda fault: fault)


def accused_nodes(record: Record) -> dict[str, Accused]:
    """The same of the nodes of a run: what is said of a device is said of its node."""
    return _by_check(record, [Place(number, "node") for number in record.hosts], _at_nodes)


def _by_check(record: Record, everyone: Sequence[Place], seen: Callable[[Fault], Fault]) -> dict[str, Accused]:
    by_check: dict[str, list[Fault]] = {name: [] for name, check in record.checks.items() if check.outcome == "failed"}
    for fault in accusations(record):
        by_check.setdefault(fault.check, []).append(seen(fault))
    why = list(map(seen, causes(record)))
    return {check_id: _accused(faults, why, everyone) for check_id, faults in by_check.items()}


def _at_nodes(fault: Fault) -> Fault:
    return replace(fault, subjects=tuple(dict.fromkeys(map(_node_of, fault.subjects))))


def _node_of(where: Where) -> Where:
    parts = [Place(part.node, "node") if part.is_on_node else part for part in where.parts]
    return Pair(parts[0], parts[1]) if len({*parts}) > 1 else parts[0]


def times_named(accused: Iterable[Accused]) -> Counter[Place]:
    """How many checks name each GPU, by its place."""
    return Counter(where for each in accused for where in each.named)


def _accused(faults: Sequence[Fault], causes: Sequence[Fault], everyone: Sequence[Place]) -> Accused:
    why = {index: [fault] if is_cause(fault) else explaining(fault, causes) for index, fault in enumerate(faults)}
    named, beside, everybody = _named([fault for index, fault in enumerate(faults) if not why[index]], everyone)
    explained = [
        where
        for index, fault in enumerate(faults)
        for where in (at(fault.subjects) or at(subject for cause in why[index] for subject in cause.subjects))
        if why[index] and where in everyone and where not in named
    ]
    return Accused(
        tuple(named),
        beside,
        everybody and not named,
        tuple(dict.fromkeys(explained)),
        tuple(dict.fromkeys(cause for each in why.values() for cause in each)),
        bool(why) and all(why.values()),
    )


def _named(faults: Iterable[Fault], everyone: Collection[Place]) -> tuple[list[Place], dict[Place, Place], bool]:
    """Who is to blame, who is only in a pair with one of these, and whether it could be any of all."""
    named: list[Place] = []
    pairs: list[Pair] = []
    everybody = False
    for fault in faults:
        singles = [subject for subject in fault.subjects if isinstance(subject, Place) and subject in everyone]
        if len(singles) == len(everyone) > 1 or WORLD in fault.subjects:
            everybody = True
        else:
            named += singles
        pairs += [subject for subject in fault.subjects if isinstance(subject, Pair)]
    pairs = [pair for pair in pairs if pair.first in everyone and pair.second in everyone]
    culprits = _cover([pair for pair in pairs if not {*pair.parts} & {*named}], everyone)
    everybody = everybody or culprits is None
    named = list(dict.fromkeys((*named, *(culprits or ()))))
    beside = {}
    for pair in pairs:
        for where, other in (pair.parts, pair.parts[::-1]):
            if other in named and where not in named:
                beside[where] = other
    return named, beside, everybody


def _cover(pairs: list[Pair], everyone: Collection[Place]) -> list[Place] | None:
    """The fewest GPUs that explain these bad pairs, the one with the most first; None if it could be any of all."""
    cover: list[Place] = []
    left = pairs
    while left:
        counts = Counter(where for pair in left for where in pair.parts)
        most = max(counts.values())
        worst = [where for where, count in counts.items() if count == most]
        if len(worst) == len(everyone) > 2:
            return None
        cover += worst
        left = [pair for pair in left if not {*pair.parts} & {*worst}]
    return cover

"""Whether machines compute the same bits: one on which all GPUs agree on wrong ones shows only beside others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from pytest_gpufleet.model.language import Said
from pytest_gpufleet.model.place import Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict.fingerprint_rules import Work, computed, told, usual
from pytest_gpufleet.verdict.fleet.equality import Difference, difference

SHOWN = 12  # digits of a hash: who wants all of them has the evidence


def other_bits(records: Mapping[str, Record]) -> list[Difference]:
    """In which parts of their fingerprints machines differ that have the same GPUs, libraries and branch of the driver.

    Each machine counts once, with what most of its GPUs compute, however many they are: what spoils all of them is one
    cause. One whose GPUs do not agree among themselves takes no part: its own run says so.
    """
    split: dict[tuple[object, ...], list[tuple[str, Mapping[str, str]]]] = defaultdict(list)
    for (_, work), of_machines in _by_work(records).items():
        found = difference(work.part, of_machines, "machine_computes_otherwise")
        if found:
            apart = frozenset(found.others.values())
            split[work.kind, work.software, found.usual is None, apart].append((work.part, of_machines))
    return [_merged(str(kind), parts) for (kind, *_), parts in split.items()]


def in_common(records: Mapping[str, Record]) -> bool:
    """Whether there is anything of which two machines must have the same bits."""
    return any(len(of_machines) > 1 for of_machines in _by_work(records).values())


def _by_work(records: Mapping[str, Record]) -> dict[tuple[str, Work], dict[str, str]]:
    """What most GPUs of each machine computed."""
    found: dict[tuple[str, Work], dict[str, str]] = defaultdict(dict)
    for name, record in records.items():
        for work, hashes in _computed(record).items():
            if most := usual(hashes.values()):
                found[_branch(record), work][name] = most
    return found


def _merged(kind: str, parts: list[tuple[str, Mapping[str, str]]]) -> Difference:
    """The parts in which the same machines differ, as one difference with the hashes of the first."""
    shown = {name: each[:SHOWN] for name, each in parts[0][1].items()}
    what = Said("fingerprint of {kind}: {parts}", kind=kind, parts=told([part for part, _ in parts]))
    found = difference(what, shown, "machine_computes_otherwise")
    assert found is not None
    return found


def not_compared(records: Mapping[str, Record]) -> list[str]:
    """Why fingerprints of some machines are not held against those of others; nothing where there is only one kind."""
    setups: dict[str, list[str]] = defaultdict(list)
    for name, record in records.items():
        for setup in dict.fromkeys(_setup(record, work) for work in _computed(record)) or ["none"]:
            setups[setup].append(name)
    if len(setups) < 2:
        return []
    each = "; ".join(f"{setup} ({', '.join(names)})" for setup, names in setups.items())
    text = "fingerprints are compared only where GPU model, libraries and driver branch are the same: {setups}"
    return [Said(text, setups=each)]


def _computed(record: Record) -> Mapping[Work, Mapping[Where, str]]:
    return computed(each for taken in record.fingerprints.values() for each in taken)


def _branch(record: Record) -> str:
    """Of the driver, which compiles for a GPU what libraries have no code for."""
    return (record.topology.driver or "").partition(".")[0]


def _setup(record: Record, work: Work) -> str:
    software = ", ".join(f"{name} {version}" for name, version in work.software)
    return f"{work.kind}, driver {_branch(record) or 'none'}, {software}"

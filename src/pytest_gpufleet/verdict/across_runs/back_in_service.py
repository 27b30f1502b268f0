"""A machine that comes back from repair, compared with its own run before: which parts are others, by their serial
numbers, what changed, what got slower, and which checks of the suite it takes to be sure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_gpufleet.model import levels
from pytest_gpufleet.model.events import HostFound, Returns
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.language import rounded
from pytest_gpufleet.model.place import THIS_NODE, Gpu, Missing, Place
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import Suite
from pytest_gpufleet.verdict.across_runs.run_comparison import drift
from pytest_gpufleet.verdict.fleet.equality import other_bits
from pytest_gpufleet.verdict.gaps import gaps

LOAD = (
    "Exactness", "Links", "Transport", "Collectives", "Under load", "Training", "ResNet-50", "Transformer", "Inference",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """Of parts, with facts by their names in evidence."""

    called: str
    fact: str  # of the host, that lists them
    at: tuple[str, ...]  # what says where one is
    known_by: tuple[str, ...]  # what no other one has
    with_it: tuple[str, ...]  # what may be otherwise if it was replaced, or its firmware updated
    stays: tuple[str, ...]  # what may not
    touches: tuple[str, ...]  # the chapters of the suite whose checks it can change


# By the names that --fleet-replaced has for them, with a number behind those of which there are several.
KINDS = {
    "gpu": Kind(
        "GPU", "", ("pci_bus_id",), ("serial", "uuid"), ("board_part_number", "vbios", "inforom_version"),
        ("name", "memory_bytes", "pci_bus_id"),
        ("PCIe", "Fingerprint", "Compute", "Memory", *LOAD, "DCGM", "Endurance"),
    ),
    "nic": Kind(
        "network port", "network_ports", ("port",), ("guid",), ("firmware", "board"), ("port", "adapter"),
        ("PCIe", "Transport", "Network adapters"),
    ),
    "disk": Kind("drive", "nvme", ("address",), ("serial",), ("model", "firmware"), ("address", "bytes"), ("Disks",)),
    "dimm": Kind(
        "memory module", "memory_modules", ("locator", "bank"), ("serial",), ("part",), ("locator", "bank", "bytes"),
        ("Host", "Links", "Endurance"),
    ),
    "board": Kind(
        "mainboard", "dmi", (), ("board_serial",), ("board", "bios_version", "bios_date"), ("vendor", "product"),
        ("Host", "PCIe", "Disks", "Network adapters", *LOAD),
    ),
}  # fmt: skip
FIRMWARE = "firmware"  # --fleet-replaced: that of any part was updated
LINKS = ("NVLinks", "PCIe lanes")  # of a GPU: how many there are, of which more is a repair


@dataclass(frozen=True)
class Part:
    name: str  # "gpu3", as --fleet-replaced has it
    kind: Kind
    called: str  # "GPU 3"
    at: str
    place: Place
    facts: Mapping[str, Any]  # None: unknown

    @property
    def ids(self) -> set[tuple[str, Any]]:
        """What no other part has, as far as it can be read."""
        return {(fact, value) for fact in self.kind.known_by if (value := self.facts[fact])}

    @property
    def number(self) -> str:
        """Its serial number, of a network port its GUID."""
        return str(self.facts[self.kind.known_by[0]] or "unknown")


def parts(gpus: Iterable[Gpu], host: HostFound) -> Iterator[Part]:
    """Of one machine, in its order; an empty slot for memory is none."""
    for name, kind in KINDS.items():
        found: Any = gpus if name == "gpu" else host.get(kind.fact) or ()
        for number, each in enumerate([found] if name == "board" and found else found):
            facts = {fact: each.get(fact) for fact in (*kind.known_by, *kind.stays, *kind.with_it)}
            called = at = " ".join(str(each.get(key)) for key in kind.at if each.get(key))
            place = Place(0, "nic", number) if name == "nic" else THIS_NODE
            if name == "gpu":
                number, called, place = each.index, str(each.index), each.place
                at = at or called
                facts |= dict(zip(LINKS, (each.nvlinks_active, each.get("pcie_width_max")), strict=True))
            if name == "gpu" or each.get("bytes") != 0:
                numbered = f"{name}{number}" if kind.at else name
                yield Part(numbered, kind, f"{kind.called} {called}".rstrip(), at, place, facts)


# By chapter those that its limits follow from (physical_limits.py), and what NCCL sends over: they run before it.
BASIS = {
    "Collectives": ("Links", "Transport"),
    "Under load": ("Links", "Transport"),
    "Inference": ("Memory", "Inference"),
    "ResNet-50": ("Compute", "Memory", "ResNet-50"),
    "Transformer": ("Compute", "Memory", "Transformer"),
}


def parts_of(record: Record) -> list[Part]:
    return list(parts(record.topology.gpus, record.machine))


def matched(record: Record) -> list[tuple[Part | None, Part | None]]:
    """Each part before the repair, and now: by serial number wherever it is, then by place; None if there is none."""
    left, here = parts_of(record.before or Record()), parts_of(record)
    was: dict[str, Part] = {}
    for by_id in (True, False):
        for part in here:
            of_kind = (old for old in left if old.kind is part.kind)
            alike = (old for old in of_kind if (old.ids & part.ids if by_id else old.at == part.at))
            if part.name not in was and (old := next(alike, None)):
                was[part.name] = old
                left.remove(old)
    return [*((was.get(part.name), part) for part in here), *((old, None) for old in left)]


def is_other(old: Part | None, part: Part | None) -> bool:
    return old is None or part is None or bool(old.ids and part.ids and not old.ids & part.ids)


def not_as_before(record: Record, kind: str) -> list[Fault | str] | None:
    """What of one of KINDS is not as before, and what cannot be read any more; None where it could not be read then."""
    fact = KINDS[kind].fact
    if record.before is None or record.returns is None or (fact and record.before.machine.get(fact) is None):
        return None
    if fact and isinstance(why := record.machine.host.get(fact), Missing):
        return [f"what it has of each {KINDS[kind].called} cannot be read: {why}"]
    of_kind = (each for each in matched(record) if any(part and part.kind is KINDS[kind] for part in each))
    return [each for old, part in of_kind for each in _held(old, part, record.returns)]


def _held(old: Part | None, part: Part | None, returns: Returns) -> Iterator[Fault | str]:
    if part is None:
        yield Fault("part_gone", (THIS_NODE,), f"{old.called} ({old.number}) is not there any more" if old else "")
        return
    named, other = part.name in returns.replaced, is_other(old, part)
    whose = "" if part.place.kind == "gpu" else f"{part.called} ({part.number}): "  # a GPU is named by its place
    if other and not named:
        was = f"another part than before ({old.number})" if old else "not there before"
        yield Fault("part_not_named", (part.place,), f"{whose}{was}, and --fleet-replaced does not name {part.name}")
    elif named and not other:
        number = part.kind.known_by[0].replace("_", " ")
        unknown = f"{part.called}: without its {number} nobody knows whether it was replaced"
        still = Fault("part_not_replaced", (part.place,), f"{whose}the same part as before")
        yield still if old and old.ids & part.ids else unknown
    if old is None or (other and not named):
        return
    for fact in (*part.kind.stays, *(() if other or FIRMWARE in returns.replaced else part.kind.with_it), *LINKS):
        then, now, label = old.facts.get(fact), part.facts.get(fact), fact.replace("_", " ")
        if then is not None and now is None:
            yield f"{part.called}: {label} cannot be read any more"
        elif then is not None and (now < then if fact in LINKS else now != then):
            yield Fault("part_changed", (part.place,), f"{whose}{label} is {now}, before it was {then}")


def measured_otherwise(record: Record) -> tuple[list[Fault], int]:
    """What is worse than in the run before, by the rules of drift, and what GPUs compute of the same data with other
    bits; and how many measurements were held against it. Counters of errors are judged by what they are now."""
    runs = {"before": record.before or Record(), "now": record}
    found = drift(runs)
    faults = [Fault("machine_bits_differ", (), str(each.fact)) for each in other_bits(runs)]
    for each in found.worse:
        metric = each.figure.metric
        now, before = rounded(each.value), rounded(each.reference)
        what = f"{metric.title}: {now} {metric.unit}, before {before}: {each.worse:.1%} worse"
        faults.append(Fault("slower_than_before", (each.place,), f"{what}, of which {each.allowed:.1%} may be noise"))
    return faults, found.compared


def required(before: Record, replaced: Iterable[str], suite: Suite) -> tuple[str, ...]:
    """Of the level of the run before: what failed there, was open or did not exist, level quick, what parts touch."""
    kinds = {name.rstrip("0123456789") for name in replaced}
    touched = {chapter for kind in kinds for chapter in (suite.chapters if kind == FIRMWARE else KINDS[kind].touches)}
    again = {*map(levels.check_name, before.to_run_again), *(gap.check for gap in gaps(before) if gap.counts)}
    again |= suite.checks.keys() - before.suite.checks.keys()
    of_level = ((name, suite.checks[name]) for name in suite.required(before.run.level))
    return tuple(n for n, check in of_level if n in again or check.level == "quick" or check.chapter in touched)


def turn(check: str, before: Record, suite: Suite) -> int:
    """When a check has its turn: 0 what failed before and what its limits follow from, 1 level quick, 2 the rest."""
    known = suite.checks.get(levels.check_name(check))
    again = (suite.checks.get(levels.check_name(each)) for each in before.to_run_again)
    basis = {chapter for each in again if each and each.figures for chapter in BASIS.get(each.chapter, ())}
    if suite.known_as(check) in before.to_run_again or (known and known.chapter in basis):
        return 0
    return 1 if known is None or known.level == "quick" else 2

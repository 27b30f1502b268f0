"""How every GPU stands: one row a GPU, one cell a group of checks, so that the bad one is seen at a glance."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.place import Place
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.accused import Blame
from pytest_gpufleet.report.groups import Group

# What a cell can say. "affected": in a bad pair with a GPU that is to blame. "unclear": something that all GPUs do
# together failed, and nothing tells which of them is the cause. "shared": somebody else's process explains it.
SYMBOLS = {
    "ok": "✓",
    "failed": "✗",
    "affected": "!",
    "shared": "!",
    "unclear": "?",
    "not judged": "○",
    "not run": "○",
    "": "",
}


@dataclass(frozen=True)
class Cell:
    """What one group says of one GPU. `state` is a key of SYMBOLS; `text` is what the reader sees of it; `check` the
    first one that failed."""

    state: str
    text: str
    check: str = ""

    @property
    def symbol(self) -> str:
        return SYMBOLS[self.state]


@dataclass(frozen=True)
class Standing:
    """One row: a GPU, or (`gpu` is None) the machine, for what concerns no single GPU."""

    gpu: Gpu | None
    cells: tuple[Cell, ...]

    @property
    def failed(self) -> bool:
        return any(cell.state == "failed" for cell in self.cells)


def standings(record: Record, groups: Sequence[Group], blames: Mapping[str, Blame]) -> list[Standing]:
    """A row for each GPU and one for the machine, with a cell for each of `groups`."""
    rows = [
        Standing(gpu, tuple(_gpu_cell(gpu.place, group, blames) for group in groups)) for gpu in record.topology.gpus
    ]
    places = {row.gpu.place for row in rows if row.gpu}
    return [*rows, Standing(None, tuple(_machine_cell(group, blames, places) for group in groups))]


def _gpu_cell(place: Place, group: Group, blames: Mapping[str, Blame]) -> Cell:
    blamed = _blamed(group, blames)
    if checks := [check for check, blame in blamed.items() if place in blame.named]:
        return Cell("failed", "failed" if len(checks) == 1 else f"failed {len(checks)}x", checks[0])
    for check, blame in blamed.items():
        if place in blame.shared:
            return Cell("shared", "shared", check)
        if place in blame.beside:
            return Cell("affected", f"with {wording.place(blame.beside[place])}", check)
    for check, blame in blamed.items():
        if blame.everybody:
            return Cell("unclear", "unclear", check)
    states = {
        finding.state for finding in group.findings if any(place in at.parts for at in finding.measurement.values)
    }
    if "not judged" in states:
        return Cell("not judged", "not judged")
    return Cell("ok", "ok") if states & {"met", "missed"} or "passed" in _outcomes(group) else Cell("", "")


def _machine_cell(group: Group, blames: Mapping[str, Blame], gpus: Collection[Place]) -> Cell:
    """Failures that name no GPU; else what is still open and not told in the row of a GPU; else that all is well."""
    if checks := [check for check, blame in _blamed(group, blames).items() if not (blame.named or blame.shared)]:
        return Cell("failed", "failed" if len(checks) == 1 else f"failed {len(checks)}x", checks[0])
    outcomes = _outcomes(group)
    if not outcomes:
        return Cell("not run", "not run")
    unjudged = [place for each in group.findings if each.state == "not judged" for place in each.measurement.values]
    elsewhere = any(part not in gpus for place in unjudged for part in place.parts)
    if elsewhere or outcomes & {"skipped", "unfinished"}:
        return Cell("not judged", "not judged")
    return Cell("ok", "ok") if "passed" in outcomes else Cell("", "")


def _blamed(group: Group, blames: Mapping[str, Blame]) -> dict[str, Blame]:
    checks = dict.fromkeys((*group.checks, *(finding.check for finding in group.findings)))
    return {check: blames[check] for check in checks if check in blames}


def _outcomes(group: Group) -> set[str]:
    return {check.outcome if check else "unfinished" for check in group.checks.values()}

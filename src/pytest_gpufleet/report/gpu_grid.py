"""The state of every GPU: one row a GPU, one cell a group of checks, so that the bad one is seen at a glance."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from pytest_gpufleet.model import levels
from pytest_gpufleet.model.events import Check
from pytest_gpufleet.model.finding import Finding, distinct
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.place import Place
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.failures import Accused
from pytest_gpufleet.report.tables import Cell, Row


class Group(NamedTuple):
    """Checks of one kind and what they measured. Without any check: the level requires some that did not run."""

    title: str
    checks: dict[str, Check | None]  # by id; None for one that began and never ended
    findings: tuple[Finding, ...]

    @property
    def outcomes(self) -> list[str]:
        return [check.outcome if check else "unfinished" for check in self.checks.values()]


# The gravest first.
GRAVITY = ("failed", "unfinished", "skipped", "passed", "not applicable")


def check_lines(group: Group, blamed: Collection[str]) -> list[Row]:
    """The checks of a group with all of their cases, each with how it ended, which has the gravest state, and how long
    it took; in `details` the name. `blamed`: ids of those that count as failed."""
    lines = []
    for name, ids in grouped((check_id.partition("[")[0], check_id) for check_id in group.checks).items():
        ended = [check for check_id in ids if (check := group.checks[check_id])]
        outcomes: Counter[str] = Counter("failed" if check.id in blamed else check.outcome for check in ended)
        outcomes["unfinished"] += len(ids) - len(ended)
        states = [state for state in GRAVITY if outcomes[state]]
        result = say(", ").join(f"{outcomes[state]} {say(state)}" for state in states) if len(ids) > 1 else states[0]
        known = shipped().checks.get(levels.check_name(name))
        title = next((check.title for check in ended if check.title), known.title if known else name)
        seconds = sum(check.seconds for check in ended)
        took = Cell(wording.duration(seconds) if seconds > 0.1 else "")
        lines.append(Row(say(title), (Cell(result, states[0]), took), name))
    return lines


def group_title(check_id: str) -> str:
    """The heading under which a check stands, by its node id: for one that the suite had before, the first of its file;
    for a file that is not of the suite, its name."""
    name = levels.check_name(check_id)
    checks = shipped().checks
    file = name.partition("::")[0]
    if known := checks.get(name) or next((each for key, each in checks.items() if key.startswith(f"{file}::")), None):
        return known.chapter
    stem = PurePosixPath(wording.clean(name).partition("::")[0]).stem
    return wording.capitalised(stem.removeprefix("test_").replace("_", " ").strip() or stem)


def groups(record: Record) -> list[Group]:
    """The groups of a run that have checks or should have some: those of the suite in its order, then the others."""
    checks: dict[str, dict[str, Check | None]] = {title: {} for title in shipped().chapters}
    findings = grouped((group_title(finding.check), finding) for finding in distinct(record.findings))
    left_out = {group_title(each.id) for each in record.checks.values() if not each.asked}
    for check_id in dict.fromkeys((*record.started, *record.checks)):
        if (check := record.checks.get(check_id)) is None or check.asked:
            checks.setdefault(group_title(check_id), {})[check_id] = check
    real = record.run.level in levels.LEVELS and not record.run.rehearsal
    wanted = {group_title(name) for name in record.required} - left_out if real else set()
    return [
        Group(title, checks.get(title, {}), tuple(findings.get(title, ())))
        for title in dict.fromkeys((*checks, *findings))
        if checks.get(title) or title in findings or title in wanted
    ]


# What a cell can say, the gravest first; what several GPUs say of a group is the gravest of it.
SYMBOLS = {
    "failed": "✗", "unclear": "?", "explained": "!", "affected": "!", "not judged": "○", "not run": "○", "ok": "✓",
    "": "",
}  # fmt: skip
# What has to be said of a state beside its word.
MEANING = {
    "failed": "failed: a failed check names this GPU.",
    "affected": "with: it is in a bad pair with a GPU that is named more often.",
    "unclear": "unclear: something that all GPUs do together failed, and the cause is not known.",
    "explained": "explained: something that is no fault of this GPU explains it, and has to be mended first.",
}


class GridCell(NamedTuple):
    """What one group says of one GPU. `state`: of SYMBOLS; `text`: what is shown; `check`: the first that failed."""

    state: str
    text: str
    check: str = ""


class GridRow(NamedTuple):
    """One row: a GPU, or (`gpu` is None) the machine, for what concerns no single GPU."""

    gpu: Gpu | None
    cells: tuple[GridCell, ...]


def grid_rows(record: Record, groups: Sequence[Group], accused: Mapping[str, Accused]) -> list[GridRow]:
    """A row for each GPU and one for the machine, with a cell for each of `groups`."""
    gpus = record.topology.gpus
    rows = [GridRow(gpu, tuple(cell(gpu.place, each, accused, record.hosts) for each in groups)) for gpu in gpus]
    places = {gpu.place for gpu in gpus}
    return [*rows, GridRow(None, tuple(_machine_cell(group, accused, places) for group in groups))]


def cell(where: Place, group: Group, accused: Mapping[str, Accused], hosts: wording.Hosts) -> GridCell:
    """What a group says of a GPU, or of a node with all that is there."""
    found = _of_group(group, accused)
    if checks := [check for check, one in found.items() if where in one.named]:
        return _failed(checks)
    for check, one in found.items():
        if where in one.explained:
            return GridCell("explained", "explained", check)
        if where in one.beside:
            return GridCell("affected", say("with {place}", place=wording.place(one.beside[where], hosts)), check)
    for check, one in found.items():
        if one.everybody:
            return GridCell("unclear", "unclear", check)
    # What was measured on a device of a node was measured on the node.
    states = {
        finding.state
        for finding in group.findings
        for measured in finding.measurement.values
        for part in measured.parts
        if part == where or (where.kind == "node" and part.is_on_node and part.node == where.node)
    }
    if "not judged" in states:
        return GridCell("not judged", "not judged")
    return GridCell("ok", "ok") if states & {"met", "missed"} or "passed" in group.outcomes else GridCell("", "")


def _failed(checks: Sequence[str]) -> GridCell:
    text = say("failed") if len(checks) == 1 else say("failed {count}x", count=len(checks))
    return GridCell("failed", text, checks[0])


def _machine_cell(group: Group, accused: Mapping[str, Accused], gpus: Collection[Place]) -> GridCell:
    """Failures that name no GPU; else what is still open and not told in the row of a GPU; else that all is well."""
    if checks := [check for check, one in _of_group(group, accused).items() if not (one.named or one.is_explained)]:
        return _failed(checks)
    outcomes = {*group.outcomes}
    if not outcomes:
        return GridCell("not run", "not run")
    unjudged = [at for each in group.findings if each.state == "not judged" for at in each.measurement.values]
    elsewhere = any(part not in gpus for at in unjudged for part in at.parts)
    if elsewhere or outcomes & {"skipped", "unfinished"}:
        return GridCell("not judged", "not judged")
    return GridCell("ok", "ok") if "passed" in outcomes else GridCell("", "")


def _of_group(group: Group, accused: Mapping[str, Accused]) -> dict[str, Accused]:
    checks = dict.fromkeys((*group.checks, *(finding.check for finding in group.findings)))
    return {check: accused[check] for check in checks if check in accused}

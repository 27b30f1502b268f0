"""What somebody requires of a machine, line by line, each with the checks and metrics that answer it."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pytest_gpufleet.model import levels
from pytest_gpufleet.model.events import Requirement, Requirements
from pytest_gpufleet.model.finding import distinct
from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.metric import METRICS
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import shipped, titled
from pytest_gpufleet.verdict import toml_table
from pytest_gpufleet.verdict.toml_table import FileError, Text, hint, table_type

SHIPPED = Path(__file__).parent / "requirement_lists"
LIKE_IT = 0.9  # from here on a check of somebody's own is taken for one of the suite that is misspelt
_Names = Annotated[list[Text], Meta(min_length=1, description="a list of names in quotes")]
LineTable = table_type(
    "Line", {"id": Text, "text": Text}, {"checks": _Names, "metrics": _Names, "out_of_scope": Text}
)  # fmt: skip
ListTable = table_type("RequirementList", {"name": Text, "requirement": list[LineTable]})  # type: ignore[valid-type]

State = Literal["met", "missed", "not judged", "out of scope"]


def load(given: Path) -> Requirements:
    """Read a file of requirements, or the shipped one of this name, and check all of it. FileError for a file that
    cannot be read, a key that nothing reads, an id that is there twice, or a check or metric that nobody knows."""
    ours = SHIPPED / f"{given}.toml"
    path = ours if ours.is_file() and not given.exists() else given
    if not path.exists():
        names = ", ".join(sorted(each.stem for each in SHIPPED.glob("*.toml")))
        raise FileError(f"{given}: no such file, nor one of the shipped lists ({names})")
    top = toml_table.read(path)
    top.check(ListTable)
    seen: dict[str, int] = {}
    for number, table in enumerate(lines := top.tables("requirement"), 1):
        if (first := seen.setdefault(table.values["id"], number)) != number:
            raise table.error(f'"id" is that of requirement {first} too; give each its own.', "id")
        values = table.values
        if ("checks" in values or "metrics" in values) == ("out_of_scope" in values):
            either = 'give either the "checks" or "metrics" that answer it, or why it is "out_of_scope".'
            raise table.error(either, "id")
        for key in ("checks", "metrics"):
            for name in values.get(key, ()):
                if meant := _unknown(key, name):
                    raise table.error(f'"{key}" cannot have "{name}"; {meant}', key)
    if not lines:
        raise FileError(f"{path}: requires nothing; write a table [[requirement]] for each line, as in docs/orders.md.")
    content = msgspec.convert([table.values for table in lines], tuple[Requirement, ...])
    return Requirements(path.name, hashlib.sha256(path.read_bytes()).hexdigest(), top.values["name"], content)


def _unknown(key: str, name: str) -> str:
    """What was probably meant; "" for a metric or a check of the suite, a case of it, and a check in an own file."""
    if key == "metrics":
        return "" if name in METRICS else hint(name, METRICS)
    suite = shipped()
    check, case = levels.check_name(name), levels.case_name(name)
    if check in suite.checks:
        return "" if case in (check, *suite.cases(check)) else f'did you mean "{suite.cases(check)[0]}"?'
    own = "::" in name and check.partition("::")[0] not in suite.files
    near = get_close_matches(check, suite.checks, n=1, cutoff=LIKE_IT if own else 0.6)
    return f'did you mean "{near[0]}"?' if near else "" if own else "docs/checks.md has those of the suite."


@dataclass(frozen=True)
class Answer:
    """`why`: of a requirement that is not met."""

    requirement: Requirement
    state: State
    why: str


def names(requirement: Requirement) -> list[str]:
    metrics = (say(METRICS[name].title) if name in METRICS else name for name in requirement.metrics)
    return [*map(titled, requirement.checks), *metrics]


def answer(requirement: Requirement, runs: Sequence[Record], opened: Mapping[str, str], bad: Collection[str]) -> Answer:
    """What runs answer: one of a machine, or one on many nodes with those of each. All that a requirement names has to
    be judged, but for what does not apply, as long as anything else is. `opened`: why cases are not judged. `bad`: the
    checks that failed."""
    if requirement.out_of_scope:
        return Answer(requirement, "out of scope", requirement.out_of_scope)
    each = [_of_check(name, runs, opened, bad) for name in requirement.checks]
    each += [_of_metric(name, runs, opened) for name in requirement.metrics]
    found = [(name, *answer) for name, answer in zip(names(requirement), each, strict=True)]
    states = {state for _, state, _ in found}
    state: State = "missed" if "missed" in states else "not judged" if states - {"met", "none"} else "met"
    if state == "met" and (states == {"none"} or runs[0].run.rehearsal):
        state = "not judged"
        found = found if states == {"none"} else [("", state, "CPU ranks stood in for GPUs")]
    shown = ("not judged", "none") if state == "not judged" else (state,)
    whys = [say(": ").join(filter(None, (name, say(why)))) for name, was, why in found if was in shown and why]
    return Answer(requirement, state, say("; ").join(whys))


def _of_check(name: str, runs: Sequence[Record], opened: Mapping[str, str], bad: Collection[str]) -> tuple[str, str]:
    """Its state and why; "none" where it does not apply to these machines."""
    name, suite = levels.case_name(name), runs[0].suite
    every = (each for run in runs for each in run.checks.values())
    named = [each for each in every if name in (levels.case_name(each.id), levels.check_name(each.id))]
    if any(each.id in bad for each in named):
        return "missed", "failed"
    begun = {levels.case_name(each.id) for each in named}
    wanted = suite.cases(name) if name in suite.checks else [name] if not begun or "[" in name else []
    why = next((opened[case] for case in (*begun, *wanted) if case in opened), "")
    if why or {*wanted} - begun:
        return "not judged", why or "not run"
    if all(each.outcome == "not applicable" for each in named):
        return "none", named[0].message
    return "met", ""


def _of_metric(metric: str, runs: Sequence[Record], opened: Mapping[str, str]) -> tuple[str, str]:
    every = (each for run in runs for each in distinct(run.findings) if each.measurement.metric == metric)
    found = [(each, opened.get(levels.case_name(each.check), "")) for each in every]
    if any(each.state == "missed" and not why for each, why in found):
        return "missed", "outside limits"
    if left_open := next((why for _, why in found if why), ""):
        return "not judged", left_open
    judged = any(each.state == "met" or each.slower_than_peers is not None for each, _ in found)
    return ("met", "") if judged else ("not judged", "no measurement was judged")

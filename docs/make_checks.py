"""Writes docs/checks.md and the manifest of the suite: `python docs/make_checks.py`, after every change in acceptance/.

What a check is for and what to do about it is its docstring in acceptance/; its level, its cases and what it measures
are as pytest collects them; limits those of the shipped profiles.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from pytest_gpufleet import __version__
from pytest_gpufleet.model import codec, levels, suite
from pytest_gpufleet.model.conditions import CONDITIONS, ConditionType
from pytest_gpufleet.model.finding import Limit
from pytest_gpufleet.model.metric import (
    AS_NCCL_IS,
    MEASURED_UNDER,
    METRICS,
    ROWS,
    STEADY,
    UNSTEADY_FROM,
    UNSTEADY_IN_NCCL,
    GiB,
    row_of,
)
from pytest_gpufleet.plugin.selection import level_of
from pytest_gpufleet.report import wording
from pytest_gpufleet.verdict import profile
from pytest_gpufleet.verdict.judgement import MOST_LOST

ROOT = Path(__file__).parents[1]
ACCEPTANCE = ROOT / "acceptance"
PAGE = ROOT / "docs" / "checks.md"
COMMAND = "python docs/make_checks.py"


@dataclass(frozen=True)
class Judged:
    """How what a check measures is judged. Without a limit for one of `required` the verdict is INCOMPLETE; `of`: not
    for all of its figures, but for these. `peers`: which are held against those of the peers, "" for all, None for
    none."""

    required: tuple[str, ...] = ()
    of: str = ""
    peers: str | None = ""


# By which conditions the limits of a metric are told apart here; profiles have more of them.
TOLD_APART = {
    name: [key for key in under if CONDITIONS[key].leads or key in ("method", "bytes", "ranks", "batch")]
    for name, under in MEASURED_UNDER.items()
}

INTRODUCTION = f"""
# Checks

<!-- Written by `{COMMAND}`. Do not edit it: edit the docstrings in acceptance/. -->

Every check of the suite, in the order in which they run. Report and terminal name a failed one like
`test_5_links.py::test_pair_bandwidth[read]`: look for `test_pair_bandwidth` here. What stands in brackets is the case.

- **Level**: the lowest level that requires the check. `quick` is part of `standard`, and `standard` of `burnin`.
- **Limits** come from the profile of the GPU model; [the shipped ones](#limits-of-the-shipped-profiles) are below. If
  one is required and there is none, the figure is shown and the verdict is INCOMPLETE.
- **Peers** are the GPUs of one model in this machine, if there are three or more, and on machines with an NVSwitch the
  pairs of them; between nodes all GPUs of that model on all nodes, their rails, and pairs and groups of such nodes.
  They need no limit.
- Checks of `test_nodes_*.py` are **between nodes**: they take two, and do not apply to one machine. Published limits
  hold for the number of nodes and the network of their source. Where there is none, what is not required is judged by
  its peers, and is for information where it has none, as with two nodes.
- A judged figure whose samples differ by more than {wording.percent(STEADY)} ({" and ".join(UNSTEADY_IN_NCCL)} of
  {UNSTEADY_FROM // GiB} GiB and more: {wording.percent(AS_NCCL_IS)}) fails its check too ("spread of ..."):
  something else uses the GPU, or it throttles. What others use too, the host and the network, may scatter until
  {wording.percent(MOST_LOST)} of the time is lost.
- The health of all GPUs is read around every check. An error that comes up meanwhile fails the check during which it
  came up, whatever that check was for, and the message names the GPU.

What else can go wrong: [troubleshooting](troubleshooting.md).
"""

LIMITS = """
## Limits of the shipped profiles

The lowest and the highest of all GPU models, to show where there are any. The one that holds for a machine, and where
it comes from, stands beside each figure in the report. A profile may tell more conditions apart than these tables.
Limits of your own: [profiles](profiles.md).
"""


WORDS = """
## Words of a profile

The facts that a [profile](profiles.md) may have, the conditions that its limits may name, and the profiles that are
shipped. Which conditions a metric is measured under stands beside its limits.
"""


class Collected:
    """A plugin that keeps what pytest has collected."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


@cache
def collected() -> dict[str, list[pytest.Function]]:
    """The cases of each check of acceptance/ as it is, by the check's name."""
    collected = Collected()
    of_all = ("--fleet-level=burnin", "--rehearse", "--nodes=2")  # on one machine those between nodes are not asked for
    options = ("--collect-only", "-qqq", *of_all, "--import-mode=importlib", "-p", "no:cacheprovider")
    if status := pytest.main([*options, str(ACCEPTANCE)], plugins=[collected]):
        raise SystemExit(f"{ACCEPTANCE} cannot be collected: pytest ends with {status!r}")
    cases: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in collected.items:
        assert isinstance(item, pytest.Function)
        cases[levels.check_name(item.nodeid)].append(item)
    return cases


@cache
def suite_of_now() -> suite.Suite:
    """The manifest of acceptance/ as it is."""
    chapters = dict(
        mark.args for items in collected().values() for mark in [items[0].get_closest_marker("chapter")] if mark
    )
    return suite.Suite(
        __version__,
        {name: _suite_check(items) for name, items in collected().items()},
        {path.name: suite.digest(path) for path in sorted(ACCEPTANCE.glob("*.py"))}
        | {suite.ABOVE: suite.digest(ACCEPTANCE / suite.ABOVE)},
        chapters,
    )


def _suite_check(items: list[pytest.Function]) -> suite.SuiteCheck:
    first = items[0]
    nodes = max((mark.kwargs.get("nodes", 0) for mark in first.iter_markers("needs")), default=0)
    figures, chapter = first.get_closest_marker("figures"), first.get_closest_marker("chapter")
    assert chapter is not None, f"{first.nodeid} stands in no chapter of the report"
    return suite.SuiteCheck(
        level_of(first),
        (inspect.getdoc(first.function) or "").partition("\n")[0],
        tuple(item.callspec.id for item in items if hasattr(item, "callspec")),
        figures.args if figures else (),
        figures.kwargs.get("of_several", ()) if figures else (),
        chapter.args[0],
        first.get_closest_marker("proves_sound") is not None,
        first.get_closest_marker("at_the_end") is not None,
        nodes,
    )


def judged(items: list[pytest.Function]) -> Judged:
    """How the figures of a check are judged, as its mark says."""
    mark = items[0].get_closest_marker("figures")
    told = mark.kwargs if mark else {}
    return Judged(**{name: told[name] for name in ("required", "of", "peers") if name in told})


def page() -> str:
    """The text of docs/checks.md."""
    parts = [INTRODUCTION.strip()]
    for path in sorted(ACCEPTANCE.glob("test_*.py")):
        parts += _file(path)
    parts += [LIMITS.strip()]
    for row in ROWS:
        parts += _limits(row.metric.name)
    parts += [WORDS.strip(), *_words()]
    return "\n\n".join(parts) + "\n"


def _file(path: Path) -> Iterator[str]:
    module = ast.parse(path.read_text(encoding="utf-8"))
    yield f"## {path.name}"
    yield _text(ast.get_docstring(module) or "")
    for function in module.body:
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
            yield from _check(f"{path.name}::{function.name}", ast.get_docstring(function) or "")


def _check(name: str, docstring: str) -> Iterator[str]:
    title, _, advice = docstring.partition("\n")
    check, function = suite_of_now().checks[name], name.partition("::")[2]
    yield f"### `{function}`"
    yield _text(f"**{title}**")
    yield _text(advice)
    facts = [f"Level: {check.level}"] + ([f"{len(check.cases)} cases"] if len(check.cases) > 1 else [])
    facts += [f"from {check.nodes} nodes on"] if check.nodes else []
    figures = (*check.figures, *check.figures_of_several)
    yield ", ".join(facts) + (". Limits:" if figures else ". Limit: none, it is right or wrong.")
    if figures:
        yield "\n".join(_judged(figures, judged(collected()[name])))


def _judged(figures: tuple[str, ...], judged: Judged) -> Iterator[str]:
    for name in judged.required:
        yield f"- {_link(name)}: required{judged.of and f', {judged.of}'}"
    for name in figures:
        if name not in judged.required:
            yield f"- {_link(name)}: not required, judged where a profile has one"
    for name in figures:
        if (tolerance := METRICS[name].peer_tolerance) and judged.peers is not None:
            near = [each for each in row_of(METRICS[name]).tolerances if each.peers in judged.peers.lower()]
            worse = wording.percent(near[0].worse if near else tolerance)
            noise = any(row.metric == name for row in profile.of_every_gpu().spreads)
            by = "by how much healthy ones differ" if noise else f"at most {worse} worse"
            most = f"{by}, than the mean of the others{judged.peers and f', {judged.peers}'}"
            yield f"- peers: {METRICS[name].title} {most}"


def _link(name: str) -> str:
    return f"[{METRICS[name].title}](#{name})"


def _limits(name: str) -> Iterator[str]:
    metric, limits = METRICS[name], list(_shipped(name))
    yield f"### `{name}`"
    about = f"{metric.title[0].upper()}{metric.title[1:]}, {metric.unit}; {metric.better} is better."
    under = ", ".join(f"`{key}`" for key in MEASURED_UNDER[name])
    about += f" A limit may name {under}." if under else ""
    yield about if limits else f"{about} No shipped profile has a limit."
    rows: dict[str, list[tuple[str, Limit]]] = defaultdict(list)
    for model, limit in sorted(limits, key=_order):
        told = {key: limit.conditions[key] for key in TOLD_APART[name] if key in limit.conditions}
        rows[", ".join(wording.words(told)) or "all"].append((model, limit))
    if rows:
        sense = {"min": "at least", "max": "at most"}[limits[0][1].sense]
        sense += ", or (~) about what healthy machines reach" * any(limit.reference for _, limit in limits)
        lines = [f"| {under} | {_range(row)} |" for under, row in rows.items()]
        yield "\n".join([f"| measured under | {sense} |", "| --- | --- |", *lines])


def _range(row: list[tuple[str, Limit]]) -> str:
    """The limits of some models: the lowest and the highest, and of how many models."""
    row = sorted(row, key=lambda item: item[1].value)
    values = ["~" * bool(limit.reference) + wording.number(limit.value, 5) for _, limit in row]
    models = [model for model, _ in row]
    low, high = f"{values[0]} ({models[0]})", f"{values[-1]} ({models[-1]})"
    if len(row) == 1:
        return low
    return f"{values[0] if values[0] == values[-1] else f'{low} to {high}'}; {len(set(models))} models"


def _words() -> Iterator[str]:
    yield _table("fact", "what it is", ((f"`{name}`", what) for name, what in profile.FACTS.items()))
    yield _table(
        "condition", "values", ((f"`{name}`", _values(each)) for name, each in CONDITIONS.items() if each.values)
    )
    shipped = ((f"`{each.path.name}`", ", ".join(each.match)) for each in profile.shipped())
    yield _table("shipped profile", "GPU models, as NVML names them", shipped)


def _values(condition: ConditionType) -> str:
    """Those that a limit may name."""
    if isinstance(condition.values, tuple):
        return ", ".join(f"`{value}`" for value in condition.values)
    return "true or false" if condition.values is bool else "a whole number"


def _table(first: str, second: str, rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join([f"| {first} | {second} |", "| --- | --- |", *(f"| {one} | {other} |" for one, other in rows)])


def _shipped(metric: str) -> Iterator[tuple[str, Limit]]:
    """The limits of a metric, each with the name of its profile; what holds for every GPU once."""
    bases = {each.base.name: each.base for each in profile.shipped() if each.base}
    for each in (*bases.values(), *profile.shipped()):
        yield from ((each.name, limit) for limit in each.limits if limit.metric == metric)


def _order(item: tuple[str, Limit]) -> list[str]:
    """Sizes and numbers of ranks in their order."""
    limit = item[1]
    values = [limit.conditions.get(key, "") for key in TOLD_APART[limit.metric]]
    return [f"{value:020}" if isinstance(value, int) else str(value) for value in values]


def _text(docstring: str) -> str:
    """A docstring as paragraphs of Markdown."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    wrapped = (
        textwrap.wrap(_escaped(each), 120, break_long_words=False, break_on_hyphens=False) for each in paragraphs
    )
    return "\n\n".join("\n".join(lines) for lines in wrapped).replace(_SPACE, " ")


_SPACE = "\0"  # in code, which is not wrapped
_CODE_OR_BOLD = re.compile(r"(`[^`]*`|\*\*)")


def _escaped(text: str) -> str:
    """An asterisk in a docstring is an asterisk, unless it stands in code."""
    parts = _CODE_OR_BOLD.split(" ".join(text.split()))
    return "".join(
        part.replace(" ", _SPACE) if index % 2 else re.sub(r"([*<])", r"\\\1", part) for index, part in enumerate(parts)
    )


def manifest_text() -> str:
    """The text of the file by which a run knows the suite."""
    return json.dumps(codec.plain(suite_of_now()), indent=1) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    suite.SHIPPED.write_text(manifest_text(), encoding="utf-8")

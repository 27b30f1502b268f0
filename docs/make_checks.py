"""Writes docs/checks.md, and the sums of the suite's files: `python docs/make_checks.py`, after every change there.

What a check is for and what to do about it is its docstring in acceptance/, read without importing anything; level and
cases are those of verdict/levels.py; limits those of the shipped profiles.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_gpufleet import suite
from pytest_gpufleet.probes.reading import METRICS
from pytest_gpufleet.report import wording
from pytest_gpufleet.verdict import levels, profile
from pytest_gpufleet.verdict.finding import Limit
from pytest_gpufleet.verdict.judge import STEADY

ROOT = Path(__file__).parents[1]
ACCEPTANCE = ROOT / "acceptance"
PAGE = ROOT / "docs" / "checks.md"
COMMAND = "python docs/make_checks.py"


@dataclass(frozen=True)
class Figures:
    """What a check measures. Without a limit for one of `required` the verdict is INCOMPLETE; `of`: not for all of its
    figures, but for these. `peers`: which are held against those of the peers, "" for all, None for none."""

    required: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    of: str = ""
    peers: str | None = ""


TRAINING = ("train_throughput", "scaling_efficiency")
ONE_DIRECTION = "for one direction at a time"

# No file says what a check measures, so it stands here; a test holds it to what checks measure.
FIGURES = {
    "test_matrix_product_is_fast": Figures(("gemm",), of="at bf16, or fp16 where a GPU has no bf16"),
    "test_one_gpu_at_a_time": Figures(("gemm",)),
    "test_memory_bandwidth": Figures(("memory_bandwidth",)),
    "test_host_bandwidth_of_each_gpu": Figures(("host_bandwidth",), of=ONE_DIRECTION, peers=ONE_DIRECTION),
    "test_host_bandwidth_of_all_gpus": Figures(shown=("host_bandwidth",), peers=None),
    "test_pair_bandwidth": Figures(("pair_bandwidth",), of="when a GPU reads"),
    "test_pair_latency": Figures(shown=("pair_latency",)),
    "test_latency": Figures(shown=("collective_latency",)),
    "test_bandwidth_curve": Figures(shown=("busbw",)),
    "test_bus_bandwidth": Figures(("busbw",), of="for all collectives but gather and scatter"),
    "test_each_gpu_alone": Figures(("solo_train_throughput",)),
    "test_throughput_and_scaling": Figures(TRAINING, ("communication_share",), of="for the recipes tf32 and amp"),
    "test_peak_throughput_and_scaling": Figures(shown=(*TRAINING, "communication_share")),
    "test_training_fed_by_a_data_loader": Figures(shown=("loader_throughput",)),
    "test_data_parallel_ddp_and_fsdp": Figures(shown=(*TRAINING, "train_memory")),
    "test_batch_sizes": Figures(shown=("train_throughput", "train_memory")),
    "test_training_in_full_memory": Figures(shown=("train_memory",)),
    "test_burn_in": Figures(("burn_peak_power", "burn_retention"), ("gemm",)),
}

# By which conditions the limits of a metric are told apart here; profiles have more of them.
ROWS = {
    "busbw": ("collective", "bytes", "ranks"),
    "collective_latency": ("collective", "ranks"),
    "gemm": ("precision",),
    "memory_bandwidth": ("operation",),
    "host_bandwidth": ("direction",),
    "pair_bandwidth": ("direction",),
    "train_throughput": ("recipe", "ranks"),
    "solo_train_throughput": ("recipe",),
    "scaling_efficiency": ("ranks",),
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
  pairs of them. They need no limit.
- A judged figure whose samples differ by more than {wording.percent(STEADY)} fails its check too ("spread of ..."):
  something else uses the GPU, or it throttles. Find out which, and run the check again.
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


def page() -> str:
    """The text of docs/checks.md."""
    parts = [INTRODUCTION.strip()]
    for path in sorted(ACCEPTANCE.glob("test_*.py")):
        parts += _file(path)
    parts += [LIMITS.strip()]
    for metric in (name for name in METRICS if name != "spread"):
        parts += _limits(metric)
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
    function, cases = name.partition("::")[2], levels.cases(name)
    yield f"### `{function}`"
    yield _text(f"**{title}**")
    yield _text(advice)
    level = levels.CHECKS[name].level if name in levels.CHECKS else "none"
    facts = [f"Level: {level}"] + ([f"{cases} cases"] if cases > 1 else [])
    figures = FIGURES.get(function)
    yield ", ".join(facts) + (". Limits:" if figures else ". Limit: none, it is right or wrong.")
    if figures:
        yield "\n".join(_judged(figures))


def _judged(figures: Figures) -> Iterator[str]:
    for name in figures.required:
        yield f"- {_link(name)}: required{figures.of and f', {figures.of}'}"
    for name in figures.shown:
        yield f"- {_link(name)}: not required, judged where a profile has one"
    for name in (*figures.required, *figures.shown):
        if (tolerance := METRICS[name].peer_tolerance) and figures.peers is not None:
            worse = wording.percent(tolerance)
            of = figures.peers and f", {figures.peers}"
            yield f"- peers: {METRICS[name].title} at most {worse} worse than their median{of}"


def _link(name: str) -> str:
    return f"[{METRICS[name].title}](#{name})"


def _limits(name: str) -> Iterator[str]:
    metric, limits = METRICS[name], list(_shipped(name))
    yield f"### `{name}`"
    about = f"{metric.title[0].upper()}{metric.title[1:]}, {metric.unit}; {metric.better} is better."
    yield about if limits else f"{about} No shipped profile has a limit."
    rows: dict[str, list[tuple[str, Limit]]] = defaultdict(list)
    for model, limit in sorted(limits, key=_order):
        told = {key: limit.conditions[key] for key in ROWS.get(name, ()) if key in limit.conditions}
        rows[", ".join(wording.words(told)) or "all"].append((model, limit))
    if rows:
        sense = {"min": "at least", "max": "at most"}[limits[0][1].sense]
        lines = [f"| {under} | {_range(row)} |" for under, row in rows.items()]
        yield "\n".join([f"| measured under | {sense} |", "| --- | --- |", *lines])


def _range(row: list[tuple[str, Limit]]) -> str:
    """The limits of some models: the lowest and the highest, and of how many models."""
    row = sorted(row, key=lambda item: item[1].value)
    values = [wording.number(limit.value, 5) for _, limit in row]
    models = [model for model, _ in row]
    low, high = f"{values[0]} ({models[0]})", f"{values[-1]} ({models[-1]})"
    if len(row) == 1:
        return low
    return f"{values[0] if values[0] == values[-1] else f'{low} to {high}'}; {len(set(models))} models"


def _shipped(metric: str) -> Iterator[tuple[str, Limit]]:
    """The limits of a metric, each with the name of its profile; what holds for every GPU once."""
    bases = {each.base.name: each.base for each in profile.shipped() if each.base}
    for each in (*bases.values(), *profile.shipped()):
        yield from ((each.name, limit) for limit in each.limits if limit.metric == metric)


def _order(item: tuple[str, Limit]) -> list[str]:
    """Sizes and numbers of ranks in their order."""
    limit = item[1]
    values = [limit.conditions.get(key, "") for key in ROWS.get(limit.metric, ())]
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


def sums() -> str:
    """The text of the list by which a run knows the files of the suite."""
    paths = sorted(ACCEPTANCE.glob("*.py"))
    return "".join(f"{suite.digest(path)}  {path.name}\n" for path in paths)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    suite.SHIPPED.write_text(sums(), encoding="utf-8")

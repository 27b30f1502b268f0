"""Writes the compiled catalogues of the report's languages: `python docs/make_catalogue.py`, once a .po file changed.

It also knows which texts a report can say, so that a test can tell which have no translation.
"""

from __future__ import annotations

import ast
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jinja2
from jinja2 import nodes

from pytest_gpufleet.model import suite
from pytest_gpufleet.model.codes import CODES
from pytest_gpufleet.model.conditions import CONDITIONS
from pytest_gpufleet.model.limit import GRADES
from pytest_gpufleet.model.metric import METRICS
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.tolerance import Reference
from pytest_gpufleet.report import (
    banner,
    fleet_hosts,
    gpu_grid,
    misses,
    next_steps,
    node_standings,
    open_points,
    reason_texts,
    translation,
    wording,
)
from pytest_gpufleet.report.page import (
    figure_tables,
    fleet_page,
    health_section,
    hosts_part,
    identity,
    machine_section,
    rendering,
    summary_html,
    training_tables,
)
from pytest_gpufleet.report.plots import telemetry_plots
from pytest_gpufleet.report.plots.bars import LEGEND as OF_BARS
from pytest_gpufleet.report.plots.collective_pictures import PICTURES, WAYS
from pytest_gpufleet.report.plots.curves import LEGEND as OF_CURVES
from pytest_gpufleet.report.plots.curves import SIZES
from pytest_gpufleet.report.plots.method_bars import MEMORY, THROUGHPUT
from pytest_gpufleet.report.plots.scaling import LEGEND as OF_SCALING
from pytest_gpufleet.verdict import basis, given_limits, judgement, node_verdicts, verdict
from pytest_gpufleet.verdict.across_runs import drift
from pytest_gpufleet.verdict.fleet import equality, fleet_verdict

SOURCES = rendering.HERE.parents[1]
CHECKS = SOURCES.parents[1] / "acceptance"
COMMAND = "python docs/make_catalogue.py"
SAYING_MACROS = ("table", "heads", "state", "mark", "gaps_table")  # of parts.html.jinja: they say their arguments
TEMPLATES = (
    "page",
    "parts",
    "summary",
    "signoff",
    "failures",
    "sections",
    "machine",
    "hosts",
    "side_by_side",
    "fleet",
    "comparison",
)  # those that have a language
_NAMES = re.compile(r"\{[a-z]+\}")
_ENTRY = re.compile(r'^msgid ((?:".*"\s*)+)^msgstr ((?:".*"\s*)+)', re.MULTILINE)


def catalogues() -> list[Path]:
    return sorted(translation.LOCALE.glob("*/LC_MESSAGES/gpufleet.po"))


def translated(catalogue: Path) -> dict[str, str]:
    """What a .po file has for each text; under "" its own head."""
    found = _ENTRY.findall(catalogue.read_text(encoding="utf-8"))
    return {_joined(text): _joined(said) for text, said in found if _joined(said)}


def compiled(entries: dict[str, str]) -> bytes:
    """A catalogue as gettext reads it: https://www.gnu.org/software/gettext/manual/html_node/MO-Files.html, without
    the table of hashes, which is optional."""
    count, texts, head = len(entries), sorted(entries), 28
    strings = [*(text.encode() for text in texts), *(entries[text].encode() for text in texts)]
    table, at = b"", head + 16 * count
    for string in strings:
        table += struct.pack("<II", len(string), at)
        at += len(string) + 1
    return struct.pack("<7I", 0x950412DE, 0, count, head, head + 8 * count, 0, 0) + table + b"\0".join([*strings, b""])


def texts() -> list[str]:
    """Every text that the authors of this project wrote and a report says: those of tables, templates and code."""
    found = [*_of_tables(), *_of_fleets(), *_of_checks(), *_of_templates(), *_of_code(), *_of_rows()]
    return [text for text in dict.fromkeys(found) if any(letter.isalpha() for letter in text)]


def _of_tables() -> Iterator[str]:
    for stamp in banner.STAMPS.values():
        yield from (stamp.word, stamp.meaning)
    for code in CODES.values():
        yield from (code.message, code.next_step)
    for title, question in suite.shipped().chapters.items():
        yield from (title, question)
    for tables in (identity.NOTES, machine_section.LINKS, gpu_grid.MEANING):
        yield from tables.values()
    for keys in (wording.SYMBOLS, gpu_grid.SYMBOLS, summary_html.LEAVES_NOTHING_OPEN, GRADES, open_points.NOUNS):
        yield from keys
    yield from machine_section.INVENTORY
    constants = (getattr(reason_texts, name) for name in dir(reason_texts) if name.isupper())
    yield from (text for text in constants if isinstance(text, str))
    yield from ("host", "hosts", "lost", "no run that counts", fleet_hosts.OWN, fleet_hosts.ALIKE, fleet_hosts.PEERS)
    yield from ("What else ran", "Spread", "check", "checks", "figure", "figures", figure_tables.LIKE_PEERS)
    yield from sorted({f"{metric.better} is better" for metric in METRICS.values()})


def _of_fleets() -> Iterator[str]:
    """Of several hosts, nodes or runs."""
    for tables in (fleet_page.MEANS, fleet_verdict.TOLD, fleet_verdict.SEVERAL, node_standings.SECURED):
        yield from tables.values()
    yield from (fleet_verdict.NOBODY_SAID, fleet_verdict.REHEARSED, fleet_verdict.HELD_BACK)
    yield from (*equality.facts(), "Fact", "Others", *hosts_part.ODD)
    yield from (what for _, _, what in drift.CORRECTED)
    yield from (*get_args(Reference), "Median", "First run", "Change", "died", "no GPU", "CPU ranks (rehearsal)")
    yield from ("Figures: the worst place of each run", "Figures", "world", "node", "nodes")
    yield from (equality.UNKNOWN, equality.NOT_SET, "none")
    yield from ("nobody recorded how they are secured", "1 counter of errors grew")
    yield "1 figure is in one of the runs only: not compared"


def _of_checks() -> Iterator[str]:
    """Of what is checked and measured, and of what is left open."""
    for noun in open_points.NOUNS.values():
        yield from (noun, f"{noun}s")
    yield from next_steps.OTHERWISE.values()
    yield from (*node_verdicts.TOLD.values(), *get_args(node_verdicts.State), node_standings.NAMED)
    for version in ("0.1.0", "0.2.0", None):  # evidence of before is shown in words of before
        for check in suite.of_version(version).checks.values():
            yield check.title
    for metric in METRICS.values():
        yield metric.title
    for condition in CONDITIONS.values():
        yield from (condition.form, *condition.words.values())
    yield from (basis.ONE, basis.SOME, basis.MORE, basis.PHYSICAL, basis.TOO_LOW, verdict.SINCE, verdict.SINCE_ONE)
    yield from (verdict.REHEARSED, verdict.ALTERED)
    yield from (given_limits.OWN_LIMITS, given_limits.NOT_APPLIED, judgement.WEAK, misses.OF_THE_RUN)
    yield from (training_tables.NOTE, training_tables.LOST, training_tables.BY_LOADER, training_tables.FROM_MEMORY)
    yield from (*training_tables.TITLES.values(), training_tables.TITLE_LOST)
    yield from (*training_tables.HEADS_LOST, training_tables.EPOCH)
    yield from (quantity.title for quantity in telemetry_plots.QUANTITIES)
    yield from (label for _, label, _ in SIZES.values())
    for legend in (OF_BARS, OF_CURVES, OF_SCALING, WAYS):
        yield from legend
    for pictures in (PICTURES, WAYS):
        yield from (told for _, told in pictures.values())
    yield from (
        "ranks",
        MEMORY,
        THROUGHPUT,
        "all ranks together",
        " to ",
        "Node",
        "With others",
        "--rehearse was given",
    )
    yield from (heading for heading, _, _ in health_section.COLUMNS)


def _of_templates() -> Iterator[str]:
    environment = jinja2.Environment()
    environment.filters["say"] = str
    environment.filters |= {"prose": str, "titled": str}
    for name in TEMPLATES:
        tree = environment.parse((rendering.HERE / f"{name}.html.jinja").read_text(encoding="utf-8"))
        for use in tree.find_all(nodes.Filter):
            if use.name == "say" and use.node is not None:
                yield from _constants(use.node)
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in SAYING_MACROS:
                for argument in (*call.args[:1], *call.args[2:3]):  # of a table: its caption and the note beside it
                    yield from _constants(argument)
        for loop in tree.find_all(nodes.For):
            if isinstance(loop.iter, nodes.List):
                yield from _constants(loop.iter)


def _constants(node: Any) -> Iterator[str]:
    found = [node] if isinstance(node, nodes.Const) else node.find_all(nodes.Const)
    yield from (each.value for each in found if isinstance(each.value, str))


def _of_code() -> Iterator[str]:
    """What is given to `say` or Said where it stands, and, in modules that say anything, what has {names} of values.
    Constants are among the tables."""
    for path in sorted([*SOURCES.rglob("*.py"), *CHECKS.rglob("*.py")]):
        source = path.read_text(encoding="utf-8")
        says = re.search(r"\b(say|Said)\(", source)
        yield from _of_reasons(ast.parse(source))
        for call in ast.walk(ast.parse(source)):
            match call:
                case ast.Constant(value=str(text)) if says and _NAMES.search(text) and "\n" not in text:
                    yield text
                case ast.Call(func=ast.Name(id="say" | "Said"), args=[ast.IfExp(body=first, orelse=second), *_]):
                    yield from _texts_of(first, second)
                case ast.Call(func=ast.Name(id="say" | "Said"), args=[first, *_]):
                    yield from _texts_of(first)
                case ast.Assign(targets=[ast.Name(id="CAPTION")], value=ast.Constant(value=str(caption))):
                    yield caption
                case ast.Assign(value=ast.Tuple(elts=parts)) if path.stem == "reason_texts":
                    yield from _texts_of(*parts)


def _of_reasons(module: ast.Module) -> Iterator[str]:
    """Why checks are not applicable or not judged, as far as it is the same on all machines: where it stands, under a
    name, or as the answer of a function that tells what is lacking."""
    named = {}
    for node in ast.walk(module):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                named[name] = text
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Name(id="not_applicable" | "not_judged" | "Untold"), args=[ast.Name(id=name)]):
                yield from filter(None, [named.get(name)])
            case ast.Call(func=ast.Name(id="not_applicable" | "not_judged" | "Untold"), args=[first]):
                yield from _texts_of(first)
            case ast.FunctionDef(name="lacking" | "missing", body=body):
                told = [each.value for part in body for each in ast.walk(part) if isinstance(each, ast.Return)]
                yield from _texts_of(*filter(None, told))


def _texts_of(*parts: ast.expr) -> Iterator[str]:
    yield from (part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))


def _of_rows() -> Iterator[str]:
    """The names of the tables of facts, and of the facts: the first of each pair that stands in these modules."""
    yield from machine_section.facts(Record())
    for module in (identity, machine_section):
        for node in ast.walk(ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8"))):
            match node:
                case ast.Tuple(elts=[ast.Constant(value=str(name)), _]):
                    yield name


def _joined(lines: str) -> str:
    return "".join(ast.literal_eval(line) for line in lines.split("\n") if line.strip())


if __name__ == "__main__":
    for catalogue in catalogues():
        catalogue.with_suffix(".mo").write_bytes(compiled(translated(catalogue)))
        missing = [text for text in texts() if text not in translated(catalogue)]
        print(f"{catalogue}: {len(missing)} of {len(texts())} texts have no translation")

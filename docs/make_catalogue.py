"""Compiles the translations of the report, once a .po file changed, and lists the texts that have none:
`python docs/make_catalogue.py`, which ends with 1 if there is one.

Words that stand alone in a table are not looked for, nor what is put together of several texts.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po
from jinja2 import nodes

from pytest_gpufleet.model import suite
from pytest_gpufleet.model.conditions import CONDITIONS
from pytest_gpufleet.model.fault import CODES
from pytest_gpufleet.model.metric import METRICS

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "pytest_gpufleet"
CATALOGUES = sorted(SOURCES.glob("report/locale/*/LC_MESSAGES/gpufleet.po"))
SAYING = (
    "say",
    "Said",
    "not_applicable",
    "not_judged",
    "Absent",
    "Unreadable",
)  # functions whose first argument a report says
SAYING_MACROS = ("table", "heads", "state", "mark", "gaps_table")  # of templates
NAMES = re.compile(r"\{[a-z]+\}")
PROSE = re.compile(r"[A-Za-z,{-].* .*")
# Of constants where reports are made: what no report says, or in English only.
NOT_SAID = re.compile(
    r"DejaVu Sans|NVIDIA .*|between nodes|one (?:name|pending|failed)|run otherwise"
    r"|(?:default-src|assert|the run|pytest|no test) .*"
)


def texts() -> list[str]:
    """Every text that the authors of this project wrote and a report says: those of tables, templates and code."""
    found = dict.fromkeys([*_of_tables(), *_of_templates(), *_of_code()])
    return [text for text in found if any(letter.isalpha() for letter in text)]


def read(path: Path) -> Catalog:
    with path.open("rb") as file:
        return read_po(file)


def untranslated(catalogue: Catalog) -> list[str]:
    return [text for text in texts() if not (text in catalogue and catalogue[text].string)]


def _of_tables() -> Iterator[str]:
    for code in CODES.values():
        yield from (code.message, code.next_step)
    for metric in METRICS.values():
        yield from (metric.title, f"{metric.better} is better")
    for condition in CONDITIONS.values():
        yield from (condition.form, *condition.words.values())
    for title, question in suite.shipped().chapters.items():
        yield from (title, question)
    yield from (check.title for check in suite.shipped().checks.values())


def _of_templates() -> Iterator[str]:
    environment = jinja2.Environment()
    environment.filters |= {"say": str, "prose": str, "titled": str}
    for path in sorted(SOURCES.rglob("*.html.jinja")):
        tree = environment.parse(path.read_text(encoding="utf-8"))
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
    """What is given to a function that says it, where it stands or under a name of the module; and, in modules that
    say anything, what has {names} of values. In those that make reports, constants that read like prose too."""
    for path in sorted([*SOURCES.rglob("*.py"), *(ROOT / "acceptance").rglob("*.py")]):
        source = path.read_text(encoding="utf-8")
        module, says = ast.parse(source), path.name != "language.py" and re.search(r"\b(say|Said)\(", source)
        parts = path.relative_to(ROOT).parts
        of_reports = "report" in parts and not {"terminal", "exports.py"} & {*parts}
        assigned = [node for node in module.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
        named = {node.targets[0].id: node.value for node in ast.walk(module)
                 if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)}  # fmt: skip
        for node in assigned if of_reports or (says and "verdict" in parts) else ():
            yield from (each.value for each in ast.walk(node) if _is_text(each) and _is_prose(each.value))
        for node in ast.walk(module):
            match node:
                case ast.Constant(value=str(text)) if says and NAMES.search(text) and "\n" not in text:
                    yield text
                case ast.Tuple(elts=[ast.Constant(value=str(text)), _]) if of_reports and _is_prose(text):
                    yield text  # the name of a fact, before what it is
                case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in SAYING:
                    given = named.get(first.id) if isinstance(first, ast.Name) else first
                    parts = (given.body, given.orelse) if isinstance(given, ast.IfExp) else (given,)
                    yield from (part.value for part in parts if _is_text(part))
                case ast.FunctionDef(name=name) if name.startswith("test_") and path.is_relative_to(
                    ROOT / "acceptance"
                ):
                    advice = (ast.get_docstring(node) or "").split("\n\n")[1:]  # what a failure means, what to do
                    yield from (" ".join(paragraph.split()) for paragraph in advice)
                case ast.FunctionDef(name="lacking" | "missing", body=body):  # what a check cannot do without
                    ends = [each.value for part in body for each in ast.walk(part) if isinstance(each, ast.Return)]
                    yield from (end.value for end in ends if _is_text(end))


def _is_prose(text: str) -> bool:
    return bool(PROSE.fullmatch(text) and not NOT_SAID.fullmatch(text))


def _is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


if __name__ == "__main__":
    missing = []
    for path in CATALOGUES:
        with path.with_suffix(".mo").open("wb") as file:
            write_mo(file, read(path))
        missing += [f"{path.relative_to(ROOT)}: {text}" for text in untranslated(read(path))]
    sys.exit("\n".join(missing) or 0)

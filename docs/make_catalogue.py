"""Writes the compiled catalogues of the report's languages: `python docs/make_catalogue.py`, once a .po file changed.

It also knows which texts a report can say, so that a test can tell which have no translation.
"""

from __future__ import annotations

import ast
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes

from pytest_gpufleet.model import suite
from pytest_gpufleet.model.codes import CODES
from pytest_gpufleet.model.limit import GRADES
from pytest_gpufleet.model.metric import METRICS
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import banner, gpu_grid, reason_texts, translation, wording
from pytest_gpufleet.report.page import figure_tables, identity, machine_section, rendering, summary_html

SOURCES = rendering.HERE.parents[1]
COMMAND = "python docs/make_catalogue.py"
SAYING_MACROS = ("table", "heads", "state", "mark", "gaps_table")  # of parts.html.jinja: they say their arguments
TEMPLATES = ("page", "parts", "summary", "signoff", "failures", "sections", "machine")  # those that have a language
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
    found = [*_of_tables(), *_of_templates(), *_of_code(), *_of_rows()]
    return [text for text in dict.fromkeys(found) if any(letter.isalpha() for letter in text)]


def _of_tables() -> Iterator[str]:
    for stamp in (*banner.STAMPS.values(), banner.DRILL):
        yield from (stamp.word, stamp.meaning)
    for code in CODES.values():
        yield from (code.message, code.next_step)
    for title, question in suite.shipped().chapters.items():
        yield from (title, question)
    for tables in (identity.NOTES, machine_section.LINKS):
        yield from tables.values()
    for keys in (wording.SYMBOLS, gpu_grid.SYMBOLS, summary_html.LEAVES_NOTHING_OPEN, GRADES):
        yield from keys
    yield from machine_section.INVENTORY
    constants = (getattr(reason_texts, name) for name in dir(reason_texts) if name.isupper())
    yield from (text for text in constants if isinstance(text, str))
    yield from ("Spread", "check", "checks", "figure", "figures", figure_tables.LIKE_PEERS)
    yield from sorted({f"{metric.better} is better" for metric in METRICS.values()})


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
                for argument in call.args[:1]:
                    yield from _constants(argument)
        for loop in tree.find_all(nodes.For):
            if isinstance(loop.iter, nodes.List):
                yield from _constants(loop.iter)


def _constants(node: Any) -> Iterator[str]:
    found = [node] if isinstance(node, nodes.Const) else node.find_all(nodes.Const)
    yield from (each.value for each in found if isinstance(each.value, str))


def _of_code() -> Iterator[str]:
    """What is given to `say` where it stands, and what has names of values for it. Constants are among the tables."""
    for path in sorted(SOURCES.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match call:
                case ast.Call(func=ast.Name(id="say"), args=[ast.IfExp(body=first, orelse=second), *_]):
                    yield from _texts_of(first, second)
                case ast.Call(func=ast.Name(id="say"), args=[first, *_]):
                    yield from _texts_of(first)
                case ast.Assign(value=ast.Constant(value=str(text))) if path.stem == "reason_texts" and "{" in text:
                    yield text
                case ast.Assign(value=ast.Tuple(elts=parts)) if path.stem == "reason_texts":
                    yield from _texts_of(*parts)
                case ast.Assign(value=ast.IfExp(body=first, orelse=second)) if path.stem == "reason_texts":
                    yield from (text for text in _texts_of(first, second) if "{" in text)


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

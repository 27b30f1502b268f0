"""`gpufleet verify`: whether evidence, report and summary of a run belong together."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from pytest_gpufleet.commands.command import Command, printing
from pytest_gpufleet.commands.folder import EVIDENCE, REPORT, contradiction, is_judgement, record_of, stated_sums
from pytest_gpufleet.verdict import summary
from pytest_gpufleet.verdict.evidence import Record, sha256
from pytest_gpufleet.verdict.verdict import DIED, settled


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of a run")


def _run(given: argparse.Namespace) -> int:
    folder = given.folder
    record, digest = record_of(folder), sha256(folder / EVIDENCE)
    died = record.verdict is None
    record = settled(record, DIED) if died else record
    problems = list(_problems(folder, record, digest))
    with printing():
        for problem in problems:
            print(f"{folder}: {problem}")
        if not problems:
            verdict = f"{record.verdict}; {DIED}" if died else record.verdict
            print(f"{folder}: evidence, report and summary belong together, SHA-256 {digest}: {verdict}")
    return 1 if problems else 0


def _problems(folder: Path, record: Record, digest: str) -> Iterator[str]:
    if problem := contradiction(record):
        yield problem
    for name, stated in stated_sums(folder).items():
        if stated is None:
            yield f"{name} is missing"
        elif name == REPORT and is_judgement(folder):
            yield f"{name} is not the run's own, but a later judgement of its figures: `gpufleet report` writes its own"
        elif not stated:
            yield f"{name} does not say of which evidence it was made"
        elif stated != digest:
            yield f"{name} was made of other evidence: it says SHA-256 {stated}, {EVIDENCE} has {digest}"
        elif name == summary.FILE:
            yield from _contradictions(json.loads((folder / name).read_text(encoding="utf-8")), record, digest)


def _contradictions(given: dict[str, object], record: Record, digest: str) -> Iterator[str]:
    """What a summary that was made of this very evidence says differently: somebody changed it by hand."""
    if given.get("schema") != summary.SCHEMA:
        yield f"{summary.FILE} has schema {given.get('schema')}, but this version of the program knows {summary.SCHEMA}"
        return
    expected = json.loads(summary.text(record, digest))
    if wrong := [name for name in {**expected, **given} if given.get(name) != expected.get(name)]:
        yield f"{summary.FILE} does not say what the evidence says: {', '.join(wrong)}"


VERIFY = Command(
    "compare the SHA-256 of a run's evidence with the one in its report and in its summary",
    _arguments,
    _run,
    "This shows whether one of them was changed or mixed up later. It cannot show who wrote them: for that, compare "
    "the sum with the one on the signed paper.",
    "1 also if anything differs or is missing.",
)

"""Whether what a run left belongs together: evidence, summary and page, and the verdict that all three state."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_gpufleet import __version__
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import code
from pytest_gpufleet.run import summary
from pytest_gpufleet.run.folder import EVIDENCE, REPORT, SUMMARY, RunFolder, Stated
from pytest_gpufleet.verdict.fleet.fleet_verdict import ALONE, Fleet, ended
from pytest_gpufleet.verdict.judgement import FORMULA
from pytest_gpufleet.verdict.verdict import settled


@dataclass(frozen=True)
class Checked:
    """A run whose files belong together. `digest`: the SHA-256 of its evidence. `missing`: the files that are not there
    to hold it against, as after a run that was killed. `ended`: with a verdict also then. `fleet`: of many nodes."""

    record: Record
    digest: str
    missing: tuple[str, ...]
    ended: Record
    fleet: Fleet | None


def check(folder: RunFolder, nodes: bool = True) -> Checked:
    """The run in a folder; of one on many nodes, with `nodes`, their own runs too. Refused on any difference."""
    record, digest = folder.record(), folder.digest()
    texts = {name: folder.content(name) for name in (SUMMARY, REPORT)}
    for number, end in record.finished.items() if nodes else ():
        if end.sha256 and check(folder.of_node(record.node(number))).digest != end.sha256:
            raise Refused(f"{folder.of_node(record.node(number))}: {EVIDENCE} is not that of which {folder} tells")
    with folder.of_anybody():
        missing = tuple(name for name, text in texts.items() if text is None)
        found = Checked(record, digest, missing, *ended(record, folder.own_runs(record) if nodes else ALONE))
        for problem in _differences(found, nodes or not record.of_cluster, texts):
            raise Refused(f"{folder}: {problem}")
    return found


def of_this_code(record: Record) -> bool:
    """Whether this code made it, so that the same must follow today; else only what it recorded is held against it."""
    return record.run.plugin == __version__ and record.run.code == code()


def _differences(found: Checked, derived: bool, texts: dict[str, bytes | None]) -> Iterator[str]:
    """Not `derived`: the nodes of a run on many are not looked at, and what follows from them neither."""
    document, page = texts[SUMMARY], texts[REPORT]
    record, digest, verdict, same_code = found.record, found.digest, found.ended.word, of_this_code(found.record)
    if same_code and derived and record.verdict:
        amounts = found.fleet.verdict if found.fleet else settled(record, record.broken).word
        if amounts != record.verdict:
            yield f"its verdict is {verdict}, but what stands before it amounts to {amounts}"
    if verdict == "ACCEPTED" and record.judging.formula == FORMULA:  # what no version accepts
        for check in record.checks.values():
            if check.outcome == "failed":
                yield f"its verdict is ACCEPTED, but {check.id} failed"
        for finding in record.findings:
            if finding.state == "missed":
                yield f"its verdict is ACCEPTED, but {finding.check} missed a limit"
    if page is not None:  # as its templates write it; no message of a check can look so: they are escaped
        if digest.encode() not in re.findall(rb'<code id="fleet-sha256">([0-9a-f]{64})</code>', page):
            yield f"{REPORT} was not made of this {EVIDENCE}"
        if re.findall(rb'<section class="fleet-banner fleet-(\w+)"', page)[:1] != [verdict.lower().encode()]:
            yield f"{REPORT} states another verdict than {verdict}"
    if document is not None:
        try:
            given = json.loads(document)
            stated = codec.typed(given, Stated)
        except (ValueError, RecursionError):
            yield f"{SUMMARY} is no summary of a run"
            return
        page_sum = "" if page is None else hashlib.sha256(page).hexdigest()
        if stated.evidence_sha256 != digest:
            yield f"{SUMMARY} was not made of this {EVIDENCE}"
        if stated.verdict != verdict:
            yield f"{SUMMARY} states another verdict than {verdict}"
        if page is not None and stated.report_sha256 != page_sum:
            yield f"{REPORT} is not the one of which {SUMMARY} has the SHA-256"
        expected = json.loads(summary.text(found.ended, digest, stated.report_sha256, found.fleet))
        if not derived:
            expected["failed_nodes"] = given.get("failed_nodes")
        # What the evidence itself has no version derives.
        names = {**expected, **given} if same_code else ("exit_status", "reasons")
        if other := [name for name in names if given.get(name) != expected.get(name)]:
            yield f"{SUMMARY} does not say what {EVIDENCE} says: {', '.join(other)}"

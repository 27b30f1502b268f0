"""Runs of real machines: what today's program makes of each, compared with what is expected.

python -m tests.recorded.test_recorded    writes the expectations again, for a change that is meant: review its diff

Beside the evidence of each run stands what is expected (README.md tells why):

    recorded.txt   verdict, faults and findings by the limits that the run itself carries, as `gpufleet verify` counts
    today.txt      the same by the limits of today, as `gpufleet judge` does, and what today's rules say of its facts
    summary.json   that of `gpufleet report`, a check, a finding or a fault a line
    page.txt       the text of that report
    terminal.txt   what a run prints at its end
"""

import json
import re
import shutil
from dataclasses import replace
from difflib import unified_diff
from html import unescape
from pathlib import Path

import pytest

from pytest_gpufleet import __version__
from pytest_gpufleet.machine.local_node import Machine
from pytest_gpufleet.model import codec
from pytest_gpufleet.report.page import page
from pytest_gpufleet.report.terminal.summary_lines import summary_lines
from pytest_gpufleet.run import summary
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.verdict import profile
from pytest_gpufleet.verdict.across_runs.rejudgement import judge_again
from pytest_gpufleet.verdict.fleet.fleet_verdict import ALONE, ended, judged
from tests.acceptance.checks import outcomes
from tests.machines import Recorded

HERE = Path(__file__).parent
RUNS = {path.parent.name: path.parent for path in sorted(HERE.glob("*/evidence.jsonl"))}
RUNS["h200x2-as-two-nodes"] = HERE / "h200x2-as-two-nodes" / "run"  # with its nodes' own: no run of one machine
MOST_LINES = 60  # of a difference
BLOCKS = "p|li|tr|h1|h2|h3|h4|div|table|caption|section|summary|pre"


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_comes_to_what_is_expected(name):
    differences = []
    for file, text in texts(RunFolder(RUNS[name])).items():
        expected = HERE / name / "expected" / file
        before = expected.read_text(encoding="utf-8") if expected.exists() else ""
        where = str(expected.relative_to(HERE.parents[1]))
        lines = list(unified_diff(before.splitlines(), text.splitlines(), where, "now", lineterm="", n=1))
        differences += lines[:MOST_LINES] + [f"... {len(lines) - MOST_LINES} lines more"] * (len(lines) > MOST_LINES)
    if differences:
        told = "if this is meant: python -m tests.recorded.test_recorded, and review the diff"
        pytest.fail("\n".join([*differences, told]), pytrace=False)


def texts(folder):
    """What is expected of a run, by the names of the files."""
    record, digest = folder.record(), folder.digest()
    runs = folder.own_runs(record)
    record, fleet = ended(record, runs)
    html = page(record, digest, fleet, folder.reports(runs.values(), folder.path))
    found = {
        "recorded.txt": told(judged(record, record.broken, runs)[0]),
        "today.txt": told(by_todays_limits(record, runs)) + (said_of_facts(record) if not record.of_cluster else ""),
        "summary.json": one_a_line(codec.plain(summary.summary(record, digest))),
        "page.txt": text_of(html),
        "terminal.txt": "".join(f"{line}\n" for line, _ in summary_lines(record)),
    }
    # All that is not of the run but of who reads it.
    changing = {digest: "SHA-256 OF THE EVIDENCE", f"by pytest-gpufleet {__version__} from": "by pytest-gpufleet from"}
    for now, always in changing.items():
        found = {name: text.replace(now, always) for name, text in found.items()}
    return found


def by_todays_limits(record, runs=ALONE):
    """Of a run on many nodes each node's own run first."""
    own = {node: replace(run, record=by_todays_limits(run.record)) for node, run in runs.items()}
    return judge_again(record, profile.choose(None, {gpu.name for gpu in record.topology.gpus}), own=own)


def told(record):
    """The verdict, its reasons, the faults, and a line for each finding."""
    lines = [f"{record.verdict}, exit status {record.exit_status}", *(f"  {reason}" for reason in record.reasons)]
    lines += ["", "faults", *map(told_fault, record.faults)]
    check = ""
    for finding in record.findings:
        lines += ["", finding.check] if finding.check != check else []
        check = finding.check
        lines.append(told_finding(finding))
    return "\n".join(lines) + "\n"


def told_fault(fault):
    where = ", ".join(map(str, fault.subjects)) or "nowhere"
    return f"  {fault.kind.number} {fault.name} ({fault.kind.category}, {fault.kind.action}) at {where}: {fault.check}"


def told_finding(finding):
    """ "  met memory_bandwidth operation=copy: gpu0 4261, gpu1 4270; >= 4130 GB/s calibrated; ...": the places that
    missed with a "!", those that are slower than their peers with by how much."""
    measurement, limit, slower = finding.measurement, finding.limit, finding.slower_than_peers

    def value(at, number):
        missed = "!" if at in finding.missed else ""
        return f"{at} {number:.4g}{missed}" + (f" ({(slower or {})[at]:.1%} worse)" if at in (slower or {}) else "")

    values = ", ".join(value(at, number) for at, number in measurement.values.items())
    conditions = "".join(f" {name}={value}" for name, value in measurement.conditions.items())
    parts = [f"{limit} {limit.grade}" if limit else "no limit"]
    parts += [str(each.text) for each in finding.tolerances]
    parts += ["no peers"] * (slower is None)
    reason = f" ({finding.reason})" if finding.state != "met" and finding.reason else ""
    return f"  {finding.state} {measurement.metric}{conditions}: {values}; {'; '.join(parts)}{reason}"


def said_of_facts(record):
    """What the checks of inventory and health say today of the facts that were read when the run began."""
    gpus = record.topology.gpus
    present = tuple(gpu.get("pci_bus_id") or "" for gpu in gpus)
    machine = Machine(gpus, record.machine.host, record.machine.taken, present=present)
    # All are machines of a cloud, which have been used.
    said = outcomes(Recorded(machine, record.topology, ""), asked=len(gpus), fleet_used=True)
    lines = ["", "checks of the facts"]
    for name, outcome in said.items():
        if outcome.what != "passed" and not name.startswith("test_as_ordered"):
            lines += [f"  {outcome.what} {name}", *(f"  {told_fault(fault)}" for fault in outcome.faults)]
    return "\n".join(lines) + "\n"


def one_a_line(document):
    """JSON with each element of a list or an object at the top on a line of its own."""
    texts = (f"{json.dumps(key)}: {_inner(value)}" for key, value in document.items())
    return "{\n" + ",\n".join(texts) + "\n}\n"


def _inner(value):
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(each)}" for key, each in value.items()) + "\n}"
    if isinstance(value, (list, tuple)) and value:
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
    return json.dumps(value)


def text_of(html):
    """A line for each row of a table and for each block, and of pictures their descriptions."""
    html = re.sub(r"<(head|style|script)\b.*?</\1>", "", html, flags=re.DOTALL)
    html = re.sub(r'<svg\b(?:[^>]*?aria-label="([^"]*)")?.*?</svg>', r"<p>[picture: \1]</p>", html, flags=re.DOTALL)
    html = re.sub(rf"</?({BLOCKS})\b[^>]*>", "\n", re.sub(r"\s+", " ", html))
    html = re.sub(r"<[^>]*>", "", re.sub(r"<br\b[^>]*>", " ", re.sub(r"<t[dh]\b[^>]*>", " | ", html)))
    tidy = (re.sub(r"\s+", " ", line).strip(" |").strip() for line in unescape(html).split("\n"))
    return "".join(f"{line}\n" for line in tidy if line)


def rewrite():
    for name, path in RUNS.items():
        folder = HERE / name / "expected"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file, text in texts(RunFolder(path)).items():
            (folder / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    rewrite()

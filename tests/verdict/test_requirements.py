"""Files of requirements, and what runs answer of them."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pytest_gpufleet.model.events import Requirement, Requirements
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import Place
from pytest_gpufleet.verdict import requirements
from pytest_gpufleet.verdict.gaps import answered
from pytest_gpufleet.verdict.judgement import read
from pytest_gpufleet.verdict.verdict import settled
from tests.conftest import EVIDENCE
from tests.verdict.test_orders import refused

FANS, COUNT = "test_2_host.py::test_fans_are_sound", "test_1_inventory.py::test_gpu_count"
BURN, RAILS = "test_9_endurance.py::test_burn_in", "test_nodes_3_rails.py::test_rail_bandwidth"


def text(*lines):
    return 'name = "Ours"\n' + "".join(
        f"[[requirement]]\nid = 'R{n}'\ntext = 'x'\n{line}\n" for n, line in enumerate(lines)
    )


# By name: the file, and what is said of it.
BAD = {
    "a misspelt check": (text("checks = ['test_2_host.py::test_fans_sound']"), [":5: requirement 1:", f'"{FANS}"?']),
    "a misspelt file": (text("checks = ['test_2_hosts.py::test_fans_are_sound']"), [":5:", f'"{FANS}"?']),
    "a case that is none": (text("checks = ['test_3_exactness.py::test_collective_is_exact[x]']"), ["did you mean"]),
    "a misspelt metric": (text("metrics = ['bus_bw']"), [":5:", '"busbw"?']),
    "an id twice": (text("metrics = ['busbw']") + text("metrics = ['gemm']")[14:], [":7: requirement 2:"]),
    "no answer": (text(""), ["requirement 1", '"out_of_scope"']),
    "an answer out of scope": (text(f"checks = ['{FANS}']\nout_of_scope = 'y'"), ["requirement 1", '"out_of_scope"']),
    "a check that is no list": (text(f"checks = '{FANS}'"), [":5:", "a list of names in quotes"]),
    "nothing": ('name = "Ours"\nrequirement = []', ["requires nothing"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_described_by_file_line_and_key(tmp_path, name):
    content, words = BAD[name]
    refused(tmp_path, requirements.load, content, words)


def test_what_is_shipped_and_checks_of_ones_own_are_known(tmp_path):
    for name in ("clustermax", "nvidia-ai-cloud"):
        assert {bool(each.out_of_scope) for each in requirements.load(Path(name)).content} == {True, False}
    file = tmp_path / "mine.toml"
    file.write_text(text("checks = ['test_of_mine.py::test_x']"))
    assert requirements.load(file).content[0].checks == ("test_of_mine.py::test_x",)


def given(**lines):
    return Requirements(
        "f.toml", "0" * 64, "Ours", tuple(Requirement(name, "x", **what) for name, what in lines.items())
    )


@pytest.fixture(scope="module")
def record():
    return read(EVIDENCE / "h200x2-g" / "evidence.jsonl")


@pytest.mark.parametrize(("what", "state"), [
    ({"checks": (COUNT,)}, "met"),
    ({"checks": (COUNT, FANS)}, "met"),  # a virtual machine has no fans
    ({"checks": (FANS,)}, "not judged"),
    ({"metrics": ("busbw",)}, "met"),
    ({"metrics": ("rail_bandwidth",)}, "not judged"),
    ({"checks": (COUNT, BURN)}, "not judged"),
    ({"checks": ("test_of_mine.py::test_x",)}, "not judged"),
    ({"out_of_scope": "it is the room's"}, "out of scope"),
])  # fmt: skip
def test_what_a_run_answers_of_a_requirement(record, what, state):
    asked = replace(record, requirements=given(R1=what))
    (answer,) = answered(asked)
    assert (answer.state, bool(answer.why)) == (state, state != "met")
    assert settled(asked, "").word == ("INCOMPLETE" if state == "not judged" else "ACCEPTED")


def test_a_requirement_is_missed_with_its_check_and_with_its_metric(record):
    failed = {COUNT: replace(record.checks[COUNT], outcome="failed")}
    busbw = [each for each in record.findings if each.measurement.metric == "busbw" and each.limit]
    findings = [replace(each, state="missed") if each is busbw[0] else each for each in record.findings]
    asked = given(R1={"checks": (COUNT,)}, R2={"metrics": ("busbw",)}, R3={"checks": (COUNT, BURN)})
    wrong = replace(record, checks={**record.checks, **failed}, findings=findings, requirements=asked)
    assert [each.state for each in answered(wrong)] == ["missed"] * 3
    other = next(each for each in busbw if each.check != busbw[0].check)  # which is open, and excuses nothing
    skipped = {other.check: replace(record.checks[other.check], outcome="skipped")}
    assert [each.state for each in answered(replace(wrong, checks={**wrong.checks, **skipped}))] == ["missed"] * 3


def test_what_failed_on_one_machine_is_not_excused_by_a_process_on_another(record):
    failed = replace(record, checks={**record.checks, COUNT: replace(record.checks[COUNT], outcome="failed")})
    disturbed = replace(failed, faults=[Fault("foreign_process", (Place(0, "gpu", 0),), "python", check=COUNT)])
    asked = given(R1={"checks": (COUNT,)})
    assert [each.state for each in answered(replace(disturbed, requirements=asked))] == ["not judged"]
    assert [each.state for each in answered(replace(disturbed, requirements=asked), [failed])] == ["missed"]


def test_page_summary_and_junit_say_what_was_asked_for_and_answered(fleet):
    """Of CPU ranks nothing is."""
    files = {"mine.toml": text("checks = ['test_inner.py::test_one']", "out_of_scope = 'the room'")}
    options = ("--fleet-basis=calibrated", "--fleet-network=400.0", "--fleet-without=disks,bmc")
    run = fleet("def test_one(): pass", "--fleet-requirements=mine.toml", *options, ranks=1, files=files)
    (folder,) = run.folders
    summary, page = json.loads((folder / "summary.json").read_text()), (folder / "report.html").read_text()
    assert [each["state"] for each in summary["requirements"]] == ["not judged", "out of scope"]
    assert (run.record.run.basis, run.record.run.network) == ("calibrated", "400")
    assert (summary["run"]["network"], summary["run"]["without"]) == ("400", ["bmc", "disks"])
    named = {each.get("name"): each.get("value") for each in ElementTree.parse(folder / "junit.xml").iter("property")}
    assert (named["requirement R0"][:10], named["requirement R1"]) == ("not judged", "out of scope: the room")
    shown = ('id="fleet-requirements"', "by --fleet-network", "by --fleet-without")
    assert [each for each in shown if each not in page] == []

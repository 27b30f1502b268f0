"""What a verdict stands on: by limits of which grades figures were judged, and that nobody makes more of it."""

import json
import re
from dataclasses import asdict, replace

import pytest

from pytest_gpufleet.cli import main
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.events import RunHeader
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import GRADES, IN_WORDS, GivenLimits, Reference
from pytest_gpufleet.model.place import gpu
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import exports
from pytest_gpufleet.report.banner import headline, reasons, why
from pytest_gpufleet.report.page import page
from pytest_gpufleet.report.terminal.summary_lines import summary_lines
from pytest_gpufleet.run.summary import summary
from pytest_gpufleet.verdict import basis, profile
from pytest_gpufleet.verdict.across_runs.rejudgement import judge_again
from pytest_gpufleet.verdict.gaps import counted, gaps, not_applied
from pytest_gpufleet.verdict.judgement import read
from pytest_gpufleet.verdict.verdict import conclude
from tests import runs
from tests.conftest import ROOT

PROJECT = "project"
OF_METRIC = {"busbw": "calibrated", "collective_latency": PROJECT, "solo_train_throughput": PROJECT}
RAN = "; machines with 4 x NVIDIA X9000 that ran this suite: 0"
TOLD = f"3 of 3 measurements within limits: 1 calibrated, 2 project{RAN}"


def limits(folder, more=""):
    """A profile that runs.FIGURES meet, by limits of these grades."""
    return runs.written(folder / "limits.toml", runs.contract(OF_METRIC) + more)


@pytest.fixture
def folder(tmp_path):
    return runs.record(tmp_path / "run", limits=limits(tmp_path))


@pytest.fixture
def record(folder):
    return read(folder / "evidence.jsonl")


def test_the_verdict_names_what_it_stands_on_by_exact_counts(record):
    assert (record.verdict, basis.lowest(record)) == ("ACCEPTED", "project")
    assert basis.by_grade(record) == {"calibrated": 1, "project": 2}
    assert record.reasons[1] == TOLD
    assert headline(record) == f"ACCEPTED; {TOLD}"
    assert TOLD not in reasons(record)  # which stand below the headline
    shown = " ".join(text for text, _ in summary_lines(record))
    assert shown.startswith(f"ACCEPTED; {TOLD}")
    assert shown.count(TOLD) == 1


@pytest.mark.parametrize("grade", GRADES)
def test_only_physical_limits_come_with_a_warning(record, grade):
    judged = [(each, replace(each.limit, grade=grade)) for each in record.findings if each.limit]
    record.findings = [replace(finding, limit=limit) for finding, limit in judged]
    warning = " (theoretical limits catch defects, not a 10 % slowdown)" if grade == "physical" else ""
    assert basis.described(record) == f"3 of 3 measurements within limits: 3 {IN_WORDS[grade]}{warning}{RAN}"


def test_the_machines_that_ran_the_suite_are_those_of_the_results():
    text = (ROOT / "docs/results/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (NVIDIA [^|]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.M)
    counts = {(name, gpus): int(n) for name, *each in rows for gpus, n in zip((1, 2, 4, 8), each, strict=True)}
    assert {machine: count for machine, count in counts.items() if count} == basis.RAN


@pytest.mark.parametrize(
    ("nccl", "driver", "told"),
    [("2.18.5", "550.54", ["NCCL", "driver"]), ("2.26.2", "", ["NCCL"]), ("2.27.7", "570.1", [])],
)
def test_limits_of_much_older_software_are_named_on_the_page(record, nccl, driver, told):
    record.topology = replace(record.topology, nccl="2.28.9", driver="580.159.04")
    of = Reference(100.0, nccl=nccl, driver=driver)
    judged = [(each, each.limit) for each in record.findings if each.limit]
    record.findings = [replace(each, limit=replace(limit, reference=of)) for each, limit in judged]
    lines = basis.outdated(record)
    assert [line.split(" come from ")[1].split()[0] for line in lines] == told
    assert [line for line in lines if f"<li>{line}</li>" not in page(record, "0" * 64)] == []


def test_measurements_for_information_and_spread_are_no_basis(record):
    finding = next(each for each in record.findings if each.limit)
    spread = replace(finding, measurement=replace(finding.measurement, metric="spread"), state="missed")
    others = [replace(finding, state=state) for state in ("not judged", "for information")]
    assert basis.by_grade(Record(findings=[spread, *others])) == {}
    assert basis.too_low([replace(finding, required=False)], "contract") == []
    assert basis.described(Record(findings=[spread])) == ""


@pytest.mark.parametrize("asked", GRADES)
def test_below_what_is_asked_for_nothing_is_accepted(record, tmp_path, asked):
    again = judge_again(record, profile.load(tmp_path / "limits.toml"), asked)
    assert again.verdict == ("ACCEPTED" if asked in ("project", "physical") else "INCOMPLETE")
    named = [finding.measurement.metric for finding, _ in basis.too_low(again.findings, asked)]
    assert named == [metric for metric, grade in OF_METRIC.items() if GRADES.index(grade) > GRADES.index(asked)]
    assert counted(gaps(again)) == ([f"{len(named)} measurements below the basis"] if named else [])
    assert len([each for each in again.reasons if f"--fleet-basis asks for a {asked} one" in each]) == len(named)
    assert again.run.basis == asked


def test_what_a_check_found_by_itself_stays_when_its_limits_are_judged_again(record):
    (check,) = (each for each in record.checks.values() if each.id.endswith(runs.ALONE))
    record.checks[check.id] = replace(check, outcome="failed", failed_by="other")
    record.faults = [Fault("implausible_value", (gpu(1),), "2,000 of at most 1,000", check=check.id)]
    assert judge_again(record, None).faults == record.faults


def test_judge_asks_for_another_basis_and_a_failure_stays_a_rejection_on_any(folder, tmp_path, capsys):
    given = ("--fleet-profile", str(tmp_path / "limits.toml"))
    assert main(["judge", str(folder), *given]) == 0
    assert main(["judge", str(folder), *given, "--fleet-basis", "published"]) == 10
    assert "2 measurements below the basis" in capsys.readouterr().out
    slow = runs.record(tmp_path / "slow", limits=tmp_path / "limits.toml", values={"busbw world": 100.0})
    assert main(["judge", str(slow), *given, "--fleet-basis", "contract"]) == 1


# ---------------------------------------------------------------- where it stands
def test_programs_read_the_lowest_grade_and_people_each(folder, record, tmp_path):
    told = json.loads((folder / "summary.json").read_text())
    counts = {"calibrated": 1, "project": 2}
    assert told["basis"] == {"wanted": "physical", "lowest": "project", "figures": counts, "told": TOLD}
    assert [each["limit"]["grade"] for each in told["findings"] if each["limit"]] == [*OF_METRIC.values()]
    exports.write_textfile(tmp_path / "x.prom", record)
    text = (tmp_path / "x.prom").read_text()
    assert 'gpufleet_basis{grade="project",host="node7"} 1.0' in text
    assert 'gpufleet_basis{grade="calibrated",host="node7"} 0.0' in text
    assert 'gpufleet_figures_judged{grade="project"} 2.0' in text
    html = page(record, "0" * 64)
    assert '<p class="fleet-basis">3 of 3 measurements within limits</p>' in html
    for grade in ("calibrated", "project"):
        assert f'<span class="fleet-note">{grade}, customer&#39;s' in html
    assert html.count("Limits: 1 calibrated, 2 project") == html.count(RAN.removeprefix("; ")) == 1


# ---------------- what is told of a profile that somebody gave
MET = runs.contract()
# NVLS was off, so nobody has measured this.
OF_NVLS = 'collective = "all_reduce", bytes = "8 GiB", dtype = "float32", nvls = true'
UNUSED = {grade: runs.limit("busbw", "min", 99999, "GB/s", OF_NVLS, grade) for grade in ("contract", "calibrated")}
# More specific than the first, so that it decides; the conditions of both were measured.
STRICTER = runs.limit("busbw", "min", 355, "GB/s", 'bytes = "8 GiB", dtype = "float32"')


def run(tmp_path, text, again=""):
    """A run with this profile, or one with another that is judged again with it."""
    (tmp_path / "c.toml").write_text(again or text)
    record = read(runs.record(tmp_path / "run", limits=tmp_path / "c.toml") / "evidence.jsonl")
    if again:
        (tmp_path / "c.toml").write_text(text)
        return judge_again(record, profile.load(tmp_path / "c.toml"))
    return record


@pytest.mark.parametrize("again", ["", MET], ids=["run", "judge"])
def test_a_limit_of_the_contract_that_nothing_was_held_against_is_a_gap(tmp_path, again):
    record = run(tmp_path, MET + UNUSED["contract"], again)
    assert record.verdict == "INCOMPLETE"
    (told,) = [reason for reason in record.reasons if "never applied" in reason]
    assert told.endswith(
        "c.toml: limit 4, bus bandwidth ≥ 99,999 GB/s with "
        "collective=all_reduce, bytes=8589934592, dtype=float32, nvls=True"
    )
    assert counted(gaps(record)) == ["1 limit not applied"]


@pytest.mark.parametrize("again", ["", MET], ids=["run", "judge"])
def test_another_limit_that_nothing_was_held_against_is_told(tmp_path, again):
    record = run(tmp_path, MET + UNUSED["calibrated"], again)
    assert record.verdict == "ACCEPTED"
    assert "1 limit of the given profile c.toml applied to no measurement." in why(record)
    assert "limit 4, bus bandwidth ≥ 99,999 GB/s" in not_applied(record)[0].subject
    (unused,) = summary(record, "").limits_not_applied
    assert (unused.number, unused.metric, unused.conditions["nvls"]) == (4, "busbw", True)


def test_a_limit_whose_conditions_were_measured_is_not_told_though_another_decides(tmp_path):
    record = run(tmp_path, MET + STRICTER)
    assert (record.verdict, not_applied(record)) == ("ACCEPTED", [])


OWN = 'name = "C"\nextends = "H200"\n[facts]\nmemory_gigabytes = {}\n'


@pytest.mark.parametrize(("text", "said"), [
    (OWN.format(60), "the given profile c.toml lowers memory_gigabytes from 141 to 60"),
    (OWN.format(180), "the given profile c.toml raises memory_gigabytes from 141 to 180"),
    (OWN.format(141), ""),
    (f'name = "C"\nmatch = ["{runs.H200}"]\n', "the given profile c.toml leaves out memory_gigabytes (141)"),
], ids=["lowers", "raises", "repeats", "stands alone"])  # fmt: skip
def test_a_fact_that_a_profile_changes_is_told(tmp_path, text, said):
    path = tmp_path / "c.toml"
    path.write_text(text)
    given = basis.as_given(profile.load(path), [runs.H200])
    assert ([str(each) for each in given.changes if "memory_gigabytes" in str(each)] or [""]) == [said]
    assert bool(given.changes) == bool(said)
    # As it comes back from the evidence.
    assert codec.typed(json.loads(json.dumps(asdict(given))), GivenLimits) == given
    record = Record(run=RunHeader(level="quick"), topology=runs.topology("node7", runs.H200), profile=given)
    _, reasons = conclude(record)
    assert (said in reasons) == bool(said)
    assert bool(runs.facts_on_the_page(record).get("Changed by the profile")) == bool(said)


def test_facts_that_the_run_was_held_against_are_told_when_its_figures_are_judged_again(tmp_path):
    """The checks that rested on them are not judged again."""
    path = tmp_path / "c.toml"
    path.write_text(OWN.format(60))
    given = basis.as_given(profile.load(path), [runs.H200])
    record = read(runs.record(tmp_path / "run", machine=runs.topology("node7", runs.H200)) / "evidence.jsonl")
    again = judge_again(replace(record, profile=given), profile.for_gpu(runs.H200))
    assert again.profile is not None
    assert ["lowers memory_gigabytes from 141 to 60" in str(each) for each in again.profile.changes] == [True]
    assert not_applied(again) == []


LOWER = f'name = "Ours"\nextends = "H200"\n{runs.limit("busbw", "min", 10, "GB/s")}'
SPREAD = '[[spread]]\nmetric = "solo_train_throughput"\nwithin = 0.9\nmachines = 9\ngpus = 99\nsource = "nobody"\n'
# A profile that asks less, one that allows a GPU to be slower than its peers, and one that knows no limits at all.
BUSBW = ({"busbw world": 200.0}, "bus bandwidth ≥ 35")
ALONE = {f"solo_train_throughput gpu{i}": 6001.0 if i == 2 else 6800.0 for i in range(4)}
PEERS = (ALONE, "training throughput, each GPU alone")
SPARING = {
    "a limit": (LOWER, *BUSBW),
    "peers": (MET + SPREAD, *PEERS),
    "no limits": (f'name = "Ours"\nmatch = ["{runs.H200}"]\n', *BUSBW),
}


@pytest.mark.parametrize("name", SPARING)
def test_what_only_a_given_profile_lets_pass_is_told_beside_the_verdict(tmp_path, name):
    text, values, what = SPARING[name]
    (tmp_path / "c.toml").write_text(text)
    machine = runs.topology("node7", runs.UNKNOWN if MET in text else runs.H200)

    def told(run, values):
        folder = runs.record(tmp_path / run, values=values, limits=tmp_path / "c.toml", machine=machine)
        record = read(folder / "evidence.jsonl")
        assert record.verdict in ("ACCEPTED", "INCOMPLETE")
        return [reason for reason in record.reasons if "would miss" in reason]

    (remark,) = told("slow", values)
    beginning = f"1 measurement would miss the limits that hold without the given profile c.toml: {what}"
    assert remark.startswith(beginning)
    assert told("healthy", {}) == []

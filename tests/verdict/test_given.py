"""What is told of a profile that somebody gave: limits that held for nothing, facts that it changes."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.events import RunHeader
from pytest_gpufleet.model.finding import GivenLimits
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report.banner import why
from pytest_gpufleet.run.summary import summary
from pytest_gpufleet.verdict import profile
from pytest_gpufleet.verdict.across_runs.rejudgement import judge_again
from pytest_gpufleet.verdict.gaps import counted, gaps, not_applied
from pytest_gpufleet.verdict.given_limits import as_given
from pytest_gpufleet.verdict.reading import read
from pytest_gpufleet.verdict.verdict import conclude
from tests import runs

MET = runs.contract()
# NVLS was off, so nobody has measured this.
OF_NVLS = 'collective = "all_reduce", bytes = "8 GiB", dtype = "float32", nvls = true'
UNUSED = {grade: runs.limit("busbw", "min", 99999, "GB/s", OF_NVLS, grade) for grade in ("contract", "calibrated")}
# More specific than the first, so that it decides; the conditions of both were measured.
STRICTER = runs.limit("busbw", "min", 355, "GB/s", 'bytes = "8 GiB", dtype = "float32"')


def run(tmp_path: Path, text: str, again: str = "") -> Record:
    """A run with this profile, or one with another that is judged again with it."""
    (tmp_path / "c.toml").write_text(again or text)
    record = read(runs.record(tmp_path / "run", limits=tmp_path / "c.toml") / "evidence.jsonl")
    if again:
        (tmp_path / "c.toml").write_text(text)
        return judge_again(record, profile.load(tmp_path / "c.toml"))
    return record


@pytest.mark.parametrize("again", ["", MET], ids=["run", "judge"])
def test_a_limit_of_the_contract_that_nothing_was_held_against_is_a_gap(tmp_path: Path, again: str) -> None:
    record = run(tmp_path, MET + UNUSED["contract"], again)
    assert record.verdict == "INCOMPLETE"
    (told,) = [reason for reason in record.reasons if "never applied" in reason]
    assert told.endswith(
        "c.toml: limit 4, bus bandwidth ≥ 99,999 GB/s with "
        "collective=all_reduce, bytes=8589934592, dtype=float32, nvls=True"
    )
    assert counted(gaps(record)) == ["1 limit not applied"]


SPREAD = '[[spread]]\nmetric = "memory_bandwidth"\nwithin = 0.9\nmachines = 9\ngpus = 99\nsource = "nobody"\n'


@pytest.mark.parametrize("again", ["", MET, MET + SPREAD], ids=["run", "judge", "judge instead of another"])
def test_what_else_a_profile_says_is_told(tmp_path: Path, again: str) -> None:
    """Another limit that nothing was held against, and by how much peers may differ where the customer says it."""
    record = run(tmp_path, MET + UNUSED["calibrated"] + SPREAD * (again in ("", MET)), again)
    assert record.verdict == "ACCEPTED"
    assert "1 limit of the customer's profile c.toml held for no figure of this run." in why(record)
    assert "limit 4, bus bandwidth ≥ 99,999 GB/s" in not_applied(record)[0].subject
    (unused,) = summary(record, "").limits_not_applied
    assert (unused.number, unused.metric, unused.conditions["nvls"]) == (4, "busbw", True)
    says = "the customer's profile c.toml says how much memory bandwidth of healthy GPUs differs: 90 % within a machine"
    assert [reason for reason in record.reasons if "differs" in reason] == [says] * (again in ("", MET))


def test_a_limit_whose_conditions_were_measured_is_not_told_though_another_decides(tmp_path: Path) -> None:
    record = run(tmp_path, MET + STRICTER)
    assert (record.verdict, not_applied(record)) == ("ACCEPTED", [])


FACTS = {
    "lowers": ("memory_gigabytes = 60", "the customer's profile c.toml lowers memory_gigabytes from 141 to 60"),
    "raises": ("memory_gigabytes = 180", "the customer's profile c.toml raises memory_gigabytes from 141 to 180"),
    "repeats": ("memory_gigabytes = 141", ""),
}


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_that_a_profile_changes_is_told(tmp_path: Path, name: str) -> None:
    fact, said = FACTS[name]
    path = tmp_path / "c.toml"
    path.write_text(f'name = "C"\nextends = "H200"\n[facts]\n{fact}\n')
    given = as_given(profile.load(path), [runs.H200])
    assert list(map(str, given.changes)) == ([said] if said else [])
    # As it comes back from the evidence.
    assert codec.typed(json.loads(json.dumps(asdict(given))), GivenLimits) == given
    record = Record(run=RunHeader(level="quick"), topology=runs.topology("node7", runs.H200), profile=given)
    _, reasons = conclude(record)
    assert (said in reasons) == bool(said)
    assert runs.facts_on_the_page(record).get("Changed by the profile", "") == said


def test_a_profile_that_stands_alone_leaves_facts_out(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'name = "C"\nmatch = ["{runs.H200}"]\n')
    changes = list(map(str, as_given(profile.load(path), [runs.H200]).changes))
    assert "the customer's profile c.toml leaves out memory_gigabytes (141)" in changes


def test_facts_that_the_run_was_held_against_are_told_when_its_figures_are_judged_again(tmp_path: Path) -> None:
    """The checks that rested on them are not judged again."""
    path = tmp_path / "c.toml"
    path.write_text('name = "C"\nextends = "H200"\n[facts]\nmemory_gigabytes = 60\n')
    given = as_given(profile.load(path), [runs.H200])
    record = read(runs.record(tmp_path / "run", machine=runs.topology("node7", runs.H200)) / "evidence.jsonl")
    again = judge_again(replace(record, profile=given), profile.for_gpu(runs.H200))
    assert again.profile is not None
    assert list(map(str, again.profile.changes)) == [FACTS["lowers"][1]]
    assert not_applied(again) == []


LOWER = """
name = "Ours"
extends = "H200"
[[limit]]
metric = "busbw"
min = 10
unit = "GB/s"
grade = "contract"
source = "we think so"
"""


# A profile that asks less, one that allows a GPU to be slower than its peers, and one that knows no limits at all.
BUSBW = ({"busbw world": 200.0}, "bus bandwidth ≥ 35")
ALONE = {f"solo_train_throughput gpu{i}": 6001.0 if i == 2 else 6800.0 for i in range(4)}
PEERS = (ALONE, "training throughput, each GPU alone")
SPARING = {
    "a limit": (LOWER, *BUSBW),
    "peers": (MET + SPREAD.replace("memory_bandwidth", "solo_train_throughput"), *PEERS),
    "no limits": (f'name = "Ours"\nmatch = ["{runs.H200}"]\n', *BUSBW),
}


@pytest.mark.parametrize("name", SPARING)
def test_what_only_a_given_profile_lets_pass_is_told_beside_the_verdict(tmp_path: Path, name: str) -> None:
    text, values, what = SPARING[name]
    (tmp_path / "c.toml").write_text(text)
    machine = runs.topology("node7", runs.UNKNOWN if MET in text else runs.H200)

    def told(run: str, values: dict[str, float]) -> list[str]:
        folder = runs.record(tmp_path / run, values=values, limits=tmp_path / "c.toml", machine=machine)
        record = read(folder / "evidence.jsonl")
        assert record.verdict in ("ACCEPTED", "INCOMPLETE")
        return [reason for reason in record.reasons if "would miss" in reason]

    (remark,) = told("slow", values)
    beginning = f"1 measurement would miss the limits that hold without the customer's profile c.toml: {what}"
    assert remark.startswith(beginning)
    assert told("healthy", {}) == []

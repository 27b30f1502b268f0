"""--fleet-keep: what is removed of earlier runs, and what stays however old it is."""

import json
import os

import pytest

from pytest_gpufleet.run.folder import RunFolder, prune, removable
from tests.conftest import FILES


@pytest.fixture
def make(tmp_path):
    """A folder as a run leaves it, of one day in November."""

    def made(day, verdict="INCOMPLETE", host="node7"):
        path = tmp_path / "reports" / f"{host}-202611{day:02}T010000Z"
        path.mkdir(parents=True)
        for name in FILES:
            (path / name).write_text("")
        told = {"schema": 2, "verdict": verdict, "evidence_sha256": "0" * 64}
        (path / "summary.json").write_text(json.dumps(told))
        return path

    return made


def days(own, keep):
    """Of which runs would be removed."""
    return [int(path.name.partition("-202611")[2][:2]) for path in removable(RunFolder(own), "node7", keep)]


def test_the_latest_runs_are_kept_and_this_one_is_among_them(make):
    paths = [make(day) for day in range(1, 6)]
    names, problems = prune(RunFolder(paths[-1]), "node7", 2)
    assert (names, problems) == ([path.name for path in reversed(paths[:3])], [])
    assert sorted(paths[0].parent.iterdir()) == paths[3:]
    assert days(paths[3], 1) == []  # it never removes itself


def test_the_last_accepted_run_stays(make):
    make(1, "ACCEPTED")
    make(2, "ACCEPTED")
    make(3, "REJECTED")
    assert days(make(4), 1) == [3, 1]


def write(name, text=""):
    return lambda path: (path / name).write_text(text)


def link(name, to=".."):
    def change(path):
        (path / name).unlink(missing_ok=True)
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).symlink_to(to)

    return change


def of_node(name):
    def change(path):
        (path / "nodes" / "0-node7").mkdir(parents=True)
        (path / "nodes" / "0-node7" / name).write_text("")

    return change


STAYS = {
    "signed": write("signed-by-ann@vendor.example.json"),
    "a note of somebody": write("remarks.txt"),
    "no report yet": lambda path: (path / "report.html").unlink(),
    "no verdict yet": lambda path: (path / "summary.json").unlink(),
    "a summary of something else": write("summary.json", "[]"),
    "a report that is a link": link("report.html", "evidence.jsonl"),
    "nodes that are a link": link("nodes"),
    "a node that is a link": link("nodes/0-node7"),
    "a node that is signed": of_node("signed-by-ann.json"),
    **({"of another user": lambda path: os.chown(path, 65534, 65534)} if os.geteuid() == 0 else {}),
}  # fmt: skip


@pytest.mark.parametrize(("change", "removed"), [
    *((change, [2]) for change in STAYS.values()), (of_node("evidence.jsonl"), [2, 1])
], ids=[*STAYS, "a run on many nodes goes with those of its nodes"])  # fmt: skip
def test_what_is_not_only_an_ended_run_of_ours_stays(make, change, removed):
    odd = make(1)
    make(2)
    change(odd)
    assert days(make(3), 1) == removed


def test_links_and_runs_of_other_hosts_stay(make, tmp_path):
    there = make(1)
    there.symlink_to(there.rename(tmp_path / there.name))
    make(2, host="node70")
    make(3, host="node7-b")
    assert days(make(4), 1) == []


def test_a_folder_that_is_gone_costs_a_sentence_and_nothing_else(tmp_path):
    _, (problem,) = prune(RunFolder(tmp_path / "gone" / "node7-20261101T010000Z"), "node7", 1)
    assert problem == f"--fleet-keep: {tmp_path / 'gone'} could not be read: No such file or directory"


def test_a_run_that_is_over_removes_what_is_too_many(run_pytest, tmp_path):
    """As an ini file asks for it; a run that never began removes nothing."""
    files = {"pytest.ini": "[pytest]\nfleet_keep = 1\n", "test_inner.py": "def test_a(): pass"}
    options = ("--rehearse", f"--fleet-dir={tmp_path}", "-q")
    assert run_pytest(*options, files=files).status == 0
    (first,) = tmp_path.iterdir()
    run = run_pytest(*options, files=files)
    (second,) = tmp_path.iterdir()
    assert (run.status, first != second, f"removed by --fleet-keep: {first.name}" in run.text) == (0, True, True)
    run_pytest("nowhere", *options, files=files)
    assert [*tmp_path.iterdir()] == [second]

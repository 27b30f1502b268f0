"""Runs on three nodes that are processes of this machine, and what becomes of them when a node goes wrong."""

import json
import os
import signal
from collections import Counter
from types import SimpleNamespace

import pytest

from pytest_gpufleet.model.record import Record
from pytest_gpufleet.plugin import on_nodes
from pytest_gpufleet.safe_files import sha256
from pytest_gpufleet.verdict.judgement import read
from pytest_gpufleet.world.engines.processes import descendants, look as alive
from tests.clusters import cluster, limits
from tests.conftest import FILES, INNER, REPORTS, ROOT, SECONDS, comes_true, lay_out
from tests.forked import is_nursery
from tests.machine import fake_perftest

ON_THREE = ("--nodes=3", f"--fleet-dir={REPORTS}")


@pytest.fixture(scope="module")
def on_each(run_pytest):
    """Of the nodes one fails, one ends its own pytest, and one is killed."""
    return run_pytest("--rehearse=1", *ON_THREE, files={"test_inner.py": INNER / "on_each_node.py"})


@pytest.fixture(scope="module")
def between(run_pytest):
    """The second of three nodes is killed in a check between them."""
    files = {"test_a_between.py": INNER / "between_nodes.py", "test_b_alone.py": "def test_of_one_machine(): pass"}
    return run_pytest("--rehearse=2", *ON_THREE, files=files)


def faults(run, check=""):
    found = [fault for fault in run.record.faults if fault.check.endswith(check)]
    return [(fault.name, [str(subject) for subject in fault.subjects]) for fault in found]


def parts(run):
    """The nodes by the parts that they played in on_each_node.py."""
    lost = next(iter(run.record.lost))
    failed = next(node for node, end in run.record.finished.items() if end.exit_status == 1)
    (ended,) = {0, 1, 2} - {lost, failed}
    return {"is lost": lost, "fails": failed, "ends": ended}


def test_the_run_over_all_has_the_tests_between_nodes_and_a_line_on_each_node(on_each):
    assert on_each.outcomes == {"test_between_those_that_are_left": "skipped"}, on_each.text
    assert (on_each.status, on_each.record.findings) == (1, [])
    node = parts(on_each)
    lines = {line.partition(":")[0]: line for line in on_each.text.splitlines() if line.startswith("node")}
    assert lines[f"node{node['fails']}"].endswith("1 failed, 1 skipped, 2 not applicable, REHEARSAL")
    assert lines[f"node{node['ends']}"].endswith("its own run ended with exit status 9")
    assert "lost: " in lines[f"node{node['is lost']}"]


def test_what_went_wrong_is_at_its_node_and_by_the_summary_all_three_failed(on_each):
    node = {part: f"node{number}" if number else "node" for part, number in parts(on_each).items()}
    assert sorted(faults(on_each)) == [("node_lost", [node["is lost"]]), ("node_unfit", [node["ends"]])]
    assert {number: bool(end.sha256) for number, end in on_each.record.finished.items()} == {
        parts(on_each)["fails"]: True, parts(on_each)["ends"]: True, parts(on_each)["is lost"]: False,
    }  # fmt: skip
    assert sum("its last words" in fault.story for fault in on_each.record.faults) == 1  # printed before it ended
    failed = json.loads((on_each.folders[0] / "summary.json").read_text())["failed_nodes"]
    assert {each["host"]: [why["name"] for why in each["reasons"]] for each in failed} == {
        f"node{number}": [{"fails": "check_failed", "ends": "node_unfit", "is lost": "node_lost"}[part]]
        for part, number in parts(on_each).items()
    }


def test_only_those_that_failed_run_again_with_good_ones(run_pytest, tmp_path):
    slow = {3: {"solo_train_throughput gpu1": 100.0}}
    earlier = cluster(tmp_path / "run", limits(tmp_path / "limits.toml"), hosts=[*"abcde"], wanted=5, other=slow)
    given = ("--nodes=all", f"--fleet-dir={REPORTS}", f"--fleet-only-failed={earlier}")
    run = run_pytest("--rehearse=1", *given, files={"test_inner.py": "def test_of_one_machine(): pass"})
    assert (run.status, [*run.record.hosts.values()], run.record.run.nodes_wanted) == (0, ["d", "a", "b"], 3), run.text


def test_a_node_that_came_to_its_end_has_the_run_that_it_would_have_had_alone(on_each):
    (folder,) = on_each.folders
    number = parts(on_each)["fails"]
    own, end = folder / "nodes" / f"{number}-node{number}", on_each.record.finished[number]
    assert {path.name for path in own.iterdir()} == FILES
    assert sha256(own / "evidence.jsonl") == end.sha256
    record = read(own / "evidence.jsonl")
    assert (record.exit_status, end.verdict, record.of_cluster) == (1, "REHEARSAL", False)
    assert {name.partition("::test_")[2]: check.outcome for name, check in record.checks.items()} == {
        "on_ranks": "passed", "does_not_apply": "not applicable", "does_not_apply_on_one": "not applicable",
        "skipped_on_one": "skipped", "cases[a b]": "passed", "cases[c[d]]": "passed", "cases[e::f]": "passed",
        "fails_on_one": "failed", "ends_on_one": "passed", "after_one_has_ended": "passed", "one_is_lost": "passed",
        "after_one_was_lost": "passed",
    }  # fmt: skip


def test_checks_between_nodes_of_which_one_is_lost_there(between):
    assert between.outcomes == {
        "test_ranks": "passed",
        **{f"test_no_machine_of_its_own[{name}]": "failed" for name in ("gpus", "host", "now", "before")},
        "test_no_topology": "failed",
        "test_one_is_lost": "failed",
        "test_the_rest": "passed",
        "test_as_many_as_there_were": "skipped",
        "test_more_than_there_were": "not applicable",
    }, between.text
    assert between.text.count("1 passed, REHEARSAL") == 3
    assert ("node_lost", ["node1"]) in faults(between, "::test_one_is_lost")
    assert [*between.record.lost] == [1]
    assert [world.ranks for world in between.record.worlds] == [6, 4]
    ended = {node: bool(end.sha256) for node, end in between.record.finished.items()}
    assert (between.status, ended) == (1, dict.fromkeys(range(3), True))  # its own run had ended before


def test_rdma_is_tried_by_the_agents(run_pytest, tmp_path, monkeypatch):
    module = """
        import pytest
        from pytest_gpufleet.machine.rdma import LATENCY, Written

        @pytest.mark.needs(nodes=2)
        def test_rdma(cut_off, rdma_write, machine):
            assert [node.name for node in machine.nodes] == ["node0", "node1"]
            assert rdma_write(LATENCY, [(1, 0)], ["mlx5_0/1"]) == {(1, 0): [Written(1.53)]}
            assert cut_off(rdma=["mlx5_0/1"]) == ()
            (fault,) = cut_off(rdma=["mlx5_0/1", "mlx5_1/1"])
            assert fault.what.startswith("node0 to node1, mlx5_1/1: ib_write_bw failed: Failed to modify QP 122273")
            assert len([node for node in machine.nodes if node.machine]) == 1
    """
    end = "127.0.0.1 mlx5_1"
    fake_perftest.install(tmp_path, monkeypatch, met={f"{end} {end}": fake_perftest.NO_GID})
    given = ("--rehearse=1", "--nodes=2", f"--fleet-dir={REPORTS}")
    run = run_pytest(*given, files={"test_inner.py": module}, PATH=os.environ["PATH"])
    assert run.outcomes == {"test_rdma": "passed"}, run.text


ENDLESS = """
import os, time
def test_quick(): pass
def test_endless(world):
    world.run(tell)
    world.run(lambda rank: time.sleep(3600))
def tell(rank):
    with open(f"pid{os.getpid()}", "w"): pass
def test_never(): pass
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_controller_ends(in_a_session, tmp_path, number):
    lay_out(tmp_path, {"test_inner.py": ENDLESS})
    run = in_a_session("--rehearse=1", *ON_THREE)
    assert comes_true(lambda: len([*tmp_path.glob("pid*")]) == 3), (tmp_path / "log").read_text()
    started = {pid for pid in descendants(run.pid) if not is_nursery(pid)}
    assert len(started) >= 9  # agents, their pytest, ranks
    run.send_signal(number)
    assert run.wait(SECONDS) == (2 if number == signal.SIGINT else -number), (tmp_path / "log").read_text()
    assert comes_true(lambda: not any(map(alive, started)))
    (folder,) = (tmp_path / REPORTS).iterdir()
    left = {path.name for path in folder.iterdir()}
    assert left == {"evidence.jsonl", "nodes", "report.txt"} if number == signal.SIGKILL else {*FILES, "nodes"}


STUCK_ON_ONE = """
import os, time
from pathlib import Path

def test_quick():
    Path(f"ran.{os.getpid()}").touch()

def test_last():
    try:
        os.mkdir("one is stuck")
    except FileExistsError:
        return
    time.sleep(3600)
"""
ENDING = """
import os
from pathlib import Path

def pytest_unconfigure():
    Path(f"ended.{os.getpid()}").touch()
"""


def test_nodes_that_came_to_their_end_are_not_run_again(in_a_session, tmp_path):
    lay_out(tmp_path, {"test_inner.py": STUCK_ON_ONE, "conftest.py": ENDING})
    run = in_a_session("--rehearse=1", *ON_THREE)
    assert comes_true(lambda: len([*tmp_path.glob("ended.*")]) == 2), (tmp_path / "log").read_text()
    ended = [int(path.suffix[1:]) for path in tmp_path.glob("ended.*")]
    assert comes_true(lambda: not any(map(alive, ended)))
    (first,) = (tmp_path / REPORTS).iterdir()
    assert comes_true(lambda: (first / "evidence.jsonl").read_text().count('"event": "node_finished"') == 2)
    run.send_signal(signal.SIGTERM)
    assert run.wait(SECONDS) == -signal.SIGTERM, (tmp_path / "log").read_text()
    whole = {node: end.sha256 for node, end in read(first / "evidence.jsonl").finished.items() if end.sha256}
    ran = {*tmp_path.glob("ran.*")}
    resumed = in_a_session("--rehearse=1", *ON_THREE, f"--fleet-resume={first}")
    assert resumed.wait(SECONDS) == 0, (tmp_path / "log").read_text()
    assert len({*tmp_path.glob("ran.*")} - ran) == 1
    record = read(next(path for path in (tmp_path / REPORTS).iterdir() if path != first) / "evidence.jsonl")
    assert whole.items() <= {node: end.sha256 for node, end in record.finished.items()}.items()


def test_checks_of_an_installed_package_have_the_same_names_on_the_nodes(run_fresh, tmp_path):
    """They are outside of pytest's own folder, so that their names count from what it was given. By fresh Pythons: that
    of the run, the agent, and the run of the node alone."""
    lay_out(tmp_path, {"elsewhere/__init__.py": "", "elsewhere/inner/test_a.py": "def test_a(): pass"})
    run = run_fresh(
        "--rehearse=1", "--nodes=1", f"--fleet-dir={REPORTS}", "--pyargs", "elsewhere",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path)]),
    )  # fmt: skip
    assert "node0: 1 passed, REHEARSAL" in run.text


@pytest.mark.parametrize(("given", "left"), [
    (["acceptance/", "--nodes", "16", "--gpus", "8"], ["acceptance/"]),
    (["--nodes=16", "--gpus=8", "--rehearse", "--rehearse=2", "--fleet-insecure"], []),
    (["--fleet-level", "quick", "--fleet-network=none"], ["--fleet-level", "quick", "--fleet-network=none"]),
    (["-x", "-v", "--maxfail", "3", "--mine", "yes"], ["-x", "-v", "--maxfail", "3", "--mine", "yes"]),
    (["-k", "links", "-m", "not slow", "--deselect", "a::b"], ["-k", "links", "-m", "not slow", "--deselect", "a::b"]),
    (["-p", "ours", "-W", "error", "-o", "a=b"], ["-p", "ours", "-W", "error", "-o", "a=b"]),
    (["-c", "site.ini", "--html=a.html", "--junitxml", "b.xml", "--lf", "--pdb"], ["-c", "site.ini"]),
    (["--fleet-resume", "reports/a", "--fleet-deadline=1h", "--fleet-dir", "b", "--fleet-keep=2"], []),
])  # fmt: skip
def test_what_is_about_all_nodes_or_about_files_of_this_machine_is_left_out(given, left):
    assert [*on_nodes.kept(given)] == left


@pytest.mark.parametrize(("at_work", "started", "shown"), [
    ({1, 2}, [], "each node by itself, 3 of 5 checks, waiting for gf1, gf2"),
    ({0, 1, 2}, [], "each node by itself, 3 of 5 checks"),
    (None, ["a", "b"], "b"),
    (None, ["a"], "no check is on"),
])  # fmt: skip
def test_a_line_says_how_far_nodes_are_and_who_is_waited_for(at_work, started, shown):
    runs = {
        node: SimpleNamespace(host=f"gf{node}", at_work=node in (at_work or ()), outcomes=Counter(passed=2 + node))
        for node in range(3)
    }
    evidence = SimpleNamespace(record=Record(started=started, checks={"a": None}))
    of_all, alone = SimpleNamespace(all=runs), at_work is not None
    run = SimpleNamespace(written=evidence, node_runs=of_all, alone=alone, of_nodes="12345")
    assert on_nodes.now(run) == shown

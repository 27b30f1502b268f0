"""What a run on many nodes takes over from one that was interrupted."""

from contextlib import nullcontext

import pytest

from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.events import CheckFinished, NodeFinished, NodeLeftOut, NodeLost, RunHeader, TopologyFound
from pytest_gpufleet.run import resume
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.verdict.judgement import read
from tests import clusters
from tests.clusters import NODES_CHECK, Ends, cluster


@pytest.fixture
def interrupted(tmp_path):
    """A run on three nodes that was cut short before its verdict."""

    def made(ends=None):
        folder = cluster(tmp_path / "first", clusters.limits(tmp_path / "contract.toml"), ends)
        evidence = folder / "evidence.jsonl"
        evidence.write_text("\n".join(evidence.read_text().splitlines()[:-1]) + "\n")
        (folder / "summary.json").unlink()
        return RunFolder(folder), read(evidence)

    return made


def carried(folder, then):
    return [event.check.id for event in resume.carried(folder, then) if isinstance(event, CheckFinished)]


def test_the_checks_between_nodes_and_the_runs_of_nodes_that_are_whole_are_taken_over(interrupted):
    folder, then = interrupted()
    assert carried(folder, then) == [f"acceptance/{NODES_CHECK}"]
    names = [own.name for _, own in resume.whole_nodes(folder, then).values()]
    assert names == ["0-gf1", "1-gf2", "2-gf10"]
    told = {type(event) for event in resume.carried(folder, then)}
    assert not told & {NodeFinished, NodeLost, NodeLeftOut, TopologyFound, RunHeader}


@pytest.mark.parametrize(("ends", "whole"), [
    (Ends(failed={1: ("acceptance/test_2_health.py::test_no_memory_error_is_recorded",)}), [0, 1, 2]),
    (Ends(died=(1,)), [0, 2]),
    (Ends(without={1: "test_2_health"}), [0, 2]),
    (Ends(not_here=(1,)), [0, 2]),
    (Ends(lost={1: "silent"}), [0, 2]),
])  # fmt: skip
def test_a_node_whose_run_gave_no_answer_runs_again(ends, whole, interrupted):
    folder, then = interrupted(ends)
    assert [*resume.whole_nodes(folder, then)] == whole


@pytest.mark.parametrize("ends", [Ends(lost={1: "silent"}), Ends(left_out={1: "another driver"})])
def test_what_not_all_nodes_did_together_is_done_again(ends, interrupted):
    assert carried(*interrupted(ends)) == []


def test_evidence_of_a_node_that_was_changed_is_refused(interrupted):
    folder, then = interrupted()
    with (folder / "nodes" / "1-gf2" / "evidence.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(Refused, match="1-gf2"):
        resume.whole_nodes(folder, then)


@pytest.mark.parametrize(("hosts", "wanted", "machines", "words"), [
    ("gf1 gf2 gf10", 3, "gf1 gf2 gf10", ""),
    ("gf1 gf2 gf10", 4, "gf1 gf2 gf10", "what --nodes asks for was 3, is 4"),
    ("gf1 gf2 gf11", 3, "gf1 gf2 gf11", "nodes was gf1, gf2, gf10, is gf1, gf2, gf11"),
    ("gf1 gf2 gf10", 3, "gf1 gf2 other", "gf10 GPU 0: serial was gf10-S0, is other-S0"),
])  # fmt: skip
def test_other_nodes_or_gpus_are_refused(hosts, wanted, machines, words, interrupted):
    folder, then = interrupted()
    now = clusters.begun(tuple(hosts.split()), wanted, then.run.profile, machines=tuple(machines.split()))
    with pytest.raises(Refused, match=words) if words else nullcontext():
        resume.check_same(folder, then, now)

"""The arguments of pytest on a node, and what a check of one machine comes to over all nodes."""

from contextlib import suppress
from types import SimpleNamespace

import pytest

from pytest_gpufleet.model.events import Check
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import Place
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.nodes.cluster import Lost
from pytest_gpufleet.plugin import mirrored
from pytest_gpufleet.plugin.check_outcome import FailedOnNodes
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.run.node_runs import NodeRun

CHECK = "test_a.py::test_a"


@pytest.fixture
def see():
    """see(runs): the faults that the check has in a run with these runs of nodes, when all have done it or are lost."""

    def see(*runs):
        accused = []

        def lost_nodes(check, nodes):
            return [Fault("node_lost", (Place(node, "node"),), "silent", "", check, True) for node in nodes]

        hosts = {run.node: run.host for run in runs}
        run = SimpleNamespace(
            node_runs=SimpleNamespace(all={run.node: run for run in runs}), recorded_lost=set(), accuse=accused.append,
            target=SimpleNamespace(hosts=hosts, topology=SimpleNamespace(identity=str)), lost_nodes=lost_nodes,
            wait_alone=lambda check: None,
        )  # fmt: skip
        item = SimpleNamespace(nodeid=CHECK, stash=pytest.Stash())
        with suppress(FailedOnNodes):
            mirrored.Mirrors(run)._see(item)
        return [(fault.name, str(fault.subjects[0])) for fault in accused]

    return see


@pytest.fixture
def node(tmp_path):
    def node(number, *, done=True, lost=False):
        checks = {CHECK: Check(CHECK, "passed", 1.0)} if done else {}
        gone = Lost(f"gf{number}", "silent") if lost else None
        return NodeRun(number, f"gf{number}", RunFolder(tmp_path), Record(checks=checks), lost=gone)

    return node


def test_a_node_is_lost_at_the_check_at_which_it_was_whether_it_had_done_it_or_did_so_later(see, node):
    assert see(node(0), node(1, done=False, lost=True)) == [("node_lost", "node1")]
    assert see(node(0), node(1, lost=True)) == [("node_lost", "node1")]


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["acceptance/", "--nodes", "16", "--gpus", "8"], []),
        (["--nodes=16", "--gpus=8", "--rehearse", "--rehearse=2", "--fleet-insecure"], []),
        (["--fleet-level", "quick", "--fleet-network=none"], ["--fleet-level", "quick", "--fleet-network=none"]),
        (["-x", "-v", "--maxfail", "3", "--mine", "yes"], ["-v", "--mine", "yes"]),
        (["-k", "links", "-kslow", "-m", "not slow", "--deselect", "a.py::b"], []),
        (["-p", "ours", "-W", "error", "-o", "a=b"], ["-p", "ours", "-W", "error", "-o", "a=b"]),
        (["-c", "site.ini", "--rootdir", "/x", "--html=a.html", "--lf", "--pdb"], []),
    ],
)
def test_what_is_about_all_nodes_or_about_what_to_run_is_left_out(given, left):
    assert [*mirrored.kept(given, {"acceptance/"})] == left

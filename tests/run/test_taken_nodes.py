"""Nodes whose GPUs somebody else has got between their own run and the checks between nodes."""

from types import SimpleNamespace

import pytest

from pytest_gpufleet.run.cluster_run import ClusterRun
from pytest_gpufleet.run.settings import Options


@pytest.fixture
def run(monkeypatch):
    """A run on three nodes, of which somebody has the second. `said`: what it has put on record."""
    alive, said = [0, 1, 2], []
    made = ClusterRun(Options(nodes=3))
    held = {0: "", 1: "GPU 3 is in use by another run: process 4711", 2: ""}
    cluster = SimpleNamespace(
        alive=alive,
        ask=lambda question, nodes, timeout: {node: held[node] for node in nodes},
        leave_out=lambda node, why: alive.remove(node),
    )
    monkeypatch.setattr(ClusterRun, "cluster", cluster)
    monkeypatch.setattr(made, "record_event", lambda name, **content: said.append((name, content)))
    return SimpleNamespace(lock=made.lock, alive=alive, said=said)


def test_a_node_that_somebody_else_has_is_named_and_left_out(run):
    run.lock()
    assert run.alive == [0, 2]
    (told, content), (left_out, of) = run.said
    assert (told, content["fault"]["name"], content["fault"]["subjects"]) == ("fault", "node_unfit", ["node1"])
    assert (left_out, of["node"]) == ("node_left_out", 1)


def test_nodes_that_the_run_has_are_not_asked_again(run):
    run.lock()
    run.said.clear()
    run.lock()
    assert (run.alive, run.said) == ([0, 2], [])

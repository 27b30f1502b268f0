"""On which nodes of a cluster of Ray a run starts its agents, by what Ray tells of them: without Ray."""

from types import SimpleNamespace

import pytest

from pytest_gpufleet.nodes import ray_transport
from pytest_gpufleet.nodes.agent_process import AgentSettings
from pytest_gpufleet.nodes.ray_transport import HEAD, RayTransport


def node(host, number=0, *, alive=True, gpus=8, head=False):
    """As ray.nodes() of Ray 2.60 has it, as far as it is looked at."""
    resources = {"CPU": 4.0, **({"GPU": float(gpus)} if gpus else {}), **({HEAD: 1.0} if head else {})}
    return {
        "NodeID": f"{host}.{number}",
        "Alive": alive,
        "NodeManagerHostname": host,
        "NodeManagerAddress": f"10.0.0.{len(host)}",
        "Resources": resources,
    }


@pytest.fixture
def found(monkeypatch):
    """What is found when Ray tells these lists one after the other, the last one for ever."""
    monkeypatch.setattr(ray_transport, "JOIN_TURN_SECONDS", 0.0)

    def found(*told, wanted=None, own="gf0.0", wait=60.0):
        monkeypatch.setattr(ray_transport, "JOIN_SECONDS", wait)
        lists = [*told]
        transport = RayTransport(AgentSettings("/suite"), wanted)
        transport._ray = SimpleNamespace(nodes=lambda: lists.pop(0) if len(lists) > 1 else lists[0])
        return [each["NodeID"] for each in transport._nodes(own)]

    return found


def test_this_machine_is_the_first_and_the_others_follow_by_name(found):
    assert found([node("gf10"), node("gf2"), node("gf0"), node("gf1", alive=False)]) == ["gf0.0", "gf2.0", "gf10.0"]


def test_nodes_that_join_late_are_waited_for(found):
    assert found([node("gf0")], [node("gf0"), node("gf1")], wanted=2) == ["gf0.0", "gf1.0"]


def test_a_node_that_was_killed_and_started_again_is_one_node(found):
    """Ray takes the first for alive until it has asked it some times in vain."""
    then, now = (node("gf1", 0, alive=alive) for alive in (True, False))
    assert found([node("gf0"), then, node("gf1", 1)], [node("gf0"), now, node("gf1", 1)], wanted=2) == [
        "gf0.0",
        "gf1.1",
    ]


def test_fewer_or_more_than_were_asked_for_are_taken_as_they_are(found):
    three = [node("gf0"), node("gf1"), node("gf2")]
    assert len(found(three, wanted=2, wait=0.0)) == len(found(three, wanted=4, wait=0.0)) == 3


def test_a_node_whose_driver_is_dead_counts_and_a_head_without_gpus_does_not(found):
    dead, head = node("gf1", gpus=0), node("gf9", gpus=0, head=True)
    assert found([head, node("gf0"), dead], wanted=2, wait=0.0, own="gf9.0") == ["gf0.0", "gf1.0"]
    assert found([head, node("gf0"), dead], own="gf9.0") == ["gf0.0"]

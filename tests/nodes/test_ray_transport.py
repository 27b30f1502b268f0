"""Who is let into a cluster of Ray, and on which nodes a run starts its agents: without Ray."""

import sys
from types import SimpleNamespace

import pytest

from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.nodes import ray_transport
from pytest_gpufleet.nodes.agent_process import AgentSettings
from pytest_gpufleet.nodes.ray_transport import HEAD, Access, Knock, RayTransport, names_of
from tests.conftest import ROOT


def node(host, number=0, *, address="", alive=True, gpus=8, head=False):
    """As ray.nodes() of Ray 2.60 has it, as far as it is looked at."""
    resources = {"CPU": 4.0, **({"GPU": float(gpus)} if gpus else {}), **({HEAD: 1.0} if head else {})}
    return {
        "NodeID": f"{host}.{number}",
        "Alive": alive,
        "NodeManagerHostname": host,
        "NodeManagerAddress": address or f"10.0.0.{len(host)}",
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


GF0, GF1, GF2, DEAD = node("gf0"), node("gf1"), node("gf2"), node("gf1", gpus=0)
HEAD_ALONE = node("gf9", gpus=0, head=True)


@pytest.mark.parametrize(
    ("told", "options", "nodes"),
    [
        ([[node("gf10"), GF2, GF0, node("gf1", alive=False)]], {}, ["gf0.0", "gf2.0", "gf10.0"]),
        ([[GF0], [GF0, GF1]], {"wanted": 2}, ["gf0.0", "gf1.0"]),  # one joins late
        # Ray takes one that was killed for alive until it has asked it some times in vain.
        (
            [[GF0, GF1, node("gf1", 1)], [GF0, node("gf1", alive=False), node("gf1", 1)]],
            {"wanted": 2},
            ["gf0.0", "gf1.1"],
        ),
        ([[GF0, GF1, GF2]], {"wanted": 2, "wait": 0.0}, ["gf0.0", "gf1.0", "gf2.0"]),  # more than were asked for
        ([[GF0, GF1, GF2]], {"wanted": 4, "wait": 0.0}, ["gf0.0", "gf1.0", "gf2.0"]),
        # One whose driver is dead counts, and a head without GPUs does not.
        ([[HEAD_ALONE, GF0, DEAD]], {"wanted": 2, "wait": 0.0, "own": "gf9.0"}, ["gf0.0", "gf1.0"]),
        ([[HEAD_ALONE, GF0, DEAD]], {"own": "gf9.0"}, ["gf0.0"]),
    ],
)
def test_this_machine_is_the_first_node_and_the_others_follow_by_name(found, told, options, nodes):
    assert found(*told, **options) == nodes


OPEN, CLOSED = Access("10.0.0.1:6379", asks=False), Access("10.0.0.1:6379", asks=True)


@pytest.fixture
def knocks(monkeypatch):
    """What a process hears that knocks without a token, and one that has what this one has."""

    def answers(without: Knock, own: Knock) -> None:
        monkeypatch.setattr(ray_transport, "version", lambda name: "2.60.0")
        monkeypatch.setattr(ray_transport, "_knocked", lambda address, mode: without if mode == "disabled" else own)

    return answers


IN, KEPT_OUT = Knock("10.0.0.1:6379"), Knock("10.0.0.1:6379", refused=True, why="no token")


@pytest.mark.parametrize(("without", "own", "found"), [(IN, IN, OPEN), (KEPT_OUT, IN, CLOSED), (IN, KEPT_OUT, OPEN)])
def test_a_cluster_is_secured_if_it_keeps_a_process_without_token_out(knocks, without, own, found):
    knocks(without, own)
    assert ray_transport.find(None) == found


@pytest.mark.parametrize(
    ("without", "own", "told"),
    [
        (KEPT_OUT, KEPT_OUT, "asks for a token"),
        (KEPT_OUT, Knock(why="the process that asked ended with -6"), "asks for a token"),
        (Knock(why="Connection refused"), Knock(why="Connection refused"), "Connection refused"),
    ],
)
def test_why_this_process_is_not_let_in_is_one_sentence(knocks, without, own, told):
    knocks(without, own)
    with pytest.raises(Refused, match=told) as refused:
        ray_transport.find("10.0.0.1:6379")
    assert "\n" not in str(refused.value)


def test_where_ray_is_missing_it_is_said_how_to_get_it(monkeypatch, tmp_path):
    """Also where a folder is called ray, as in whoever's checkout."""
    (tmp_path / "ray").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(Refused, match=r"pip install 'pytest-gpufleet\[ray\]'"):
        ray_transport.find(None)


@pytest.mark.parametrize(("here", "old"), [("2.9.3", True), ("2.51.1", True), ("2.52.0", False), ("3.0.0.dev0", False)])
def test_a_ray_that_knows_of_no_tokens_is_named(knocks, monkeypatch, here, old):
    knocks(IN, IN)
    monkeypatch.setattr(ray_transport, "version", lambda name: here)
    if old:
        with pytest.raises(Refused, match=rf"needs Ray 2\.52 or later.*{here}"):
            ray_transport.find(None)
    else:
        assert ray_transport.find(None) == OPEN


def test_the_least_ray_is_the_one_that_is_installed_with_this():
    assert f'ray = ["ray>={ray_transport.LEAST}"]' in (ROOT / "pyproject.toml").read_text()


def test_rays_client_is_no_way_into_a_cluster(knocks):
    knocks(IN, IN)
    with pytest.raises(Refused, match="HOST:PORT"):
        ray_transport.find("ray://10.0.0.1:10001")


@pytest.mark.parametrize(
    ("access", "addresses", "others", "insecure", "kept"),
    [
        (CLOSED, ["10.0.0.1"], ["eth0"], False, "token"),
        (CLOSED, ["10.0.0.1"], ["eth0"], True, "token"),
        (OPEN, ["127.0.0.1"], [], False, "loopback"),
        (OPEN, ["10.0.0.1"], ["eth0"], True, "insecure"),
        (OPEN, ["127.0.0.1"], ["eth0"], True, "insecure"),
    ],
)
def test_what_keeps_strangers_out(monkeypatch, access, addresses, others, insecure, kept):
    monkeypatch.setattr(ray_transport, "_other_interfaces", lambda: others)
    assert ray_transport.secured(access, addresses, insecure) == kept


@pytest.mark.parametrize(
    ("addresses", "others"),
    [(["10.0.0.1"], ["eth0"]), (["127.0.0.1"], ["eth0"]), (["127.0.0.1", "10.0.0.2"], []), (["localhost"], [])],
)
def test_a_cluster_that_lets_in_everybody_is_refused(monkeypatch, addresses, others):
    monkeypatch.setattr(ray_transport, "_other_interfaces", lambda: others)
    with pytest.raises(Refused, match="--fleet-insecure"):
        ray_transport.secured(OPEN, addresses, insecure=False)


def test_nodes_are_called_by_their_hosts_and_where_these_are_not_enough_by_more():
    hosts = {"10.0.0.1": "gf0", "10.0.0.2": "vm"}
    found = [node(hosts.get(address, "vm"), address=address) for address in (*hosts, "10.0.0.3", "10.0.0.3")]
    assert names_of(found) == ["gf0", "vm (10.0.0.2)", "vm (2)", "vm (3)"]

"""What nodes write to each other by RDMA: agents that are asked, of which each has an address of its own and starts
programs that stand for perftest, and who is named for it."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from pytest_gpufleet.machine import network_ports, rdma
from pytest_gpufleet.machine.network_ports import Port
from pytest_gpufleet.machine.rdma import BANDWIDTH, Written
from pytest_gpufleet.model.place import Gpu, Pair, Place
from pytest_gpufleet.nodes import network
from pytest_gpufleet.plugin.on_nodes import who_cannot_write
from pytest_gpufleet.probes.between_nodes import RdmaRails
from pytest_gpufleet.probes.search.nodes import slow_rails
from tests.machine import fake_perftest
from tests.machine.fake_perftest import DOWN, LEFT, NO_DEVICE, NO_GID, NO_MEMORY, NO_PD, OLD, RETRIES
from tests.nodes.fake_transport import running
from tests.nodes.test_cluster_engine import AnsweringTransport

PORTS = ("mlx5_0/1", "mlx5_1/1")
GF1, GF2 = Place(1, "node"), Place(2, "node")


@contextmanager
def nodes(count, **answers):
    usual = {
        "Serve": lambda node, question: network.serve(question, f"127.0.0.{node}"),
        "Write": lambda node, question: network.write(question, f"127.0.0.{node}"),
    }
    with running(AnsweringTransport(count + 1, **(usual | answers))) as cluster:
        cluster.leave_out(0, "127.0.0.0 is no address")
        yield SimpleNamespace(cluster=cluster, target=SimpleNamespace(hosts=cluster.names), leave_out=cluster.leave_out)


@pytest.fixture
def perftest(tmp_path, monkeypatch):
    return lambda **different: fake_perftest.install(tmp_path, monkeypatch, **different)


def of_second(why, count=3):
    """The second port of gf2 with every other node."""
    return {f"127.0.0.{min(2, node)} mlx5_1 127.0.0.{max(2, node)} mlx5_1": why for node in range(1, count + 1)}


def test_healthy_nodes_write_to_each_other(perftest):
    perftest()
    with nodes(3) as run:
        assert who_cannot_write(run, PORTS[1:]) == ()
        assert run.cluster.alive == (1, 2, 3)
        found = network.written(run.cluster, BANDWIDTH, [(1, 2), (3, 1)], PORTS)
    assert found == {(1, 2): [Written(389.61)] * 2, (3, 1): [Written(389.61)] * 2}


def of_one_end(kind, why):
    return {kind: {"127.0.0.2 mlx5_1": why}}


ALONE, BOTH = ("node_cut_off", (GF2,)), ("nodes_cut_off", (Pair(GF1, GF2),))
NOTHING_BACK = "nothing comes back: look at the cable's switch, VLAN or partition (PKey), routes"


@pytest.mark.parametrize(("different", "count", "fault", "what"), [
    (of_one_end("alone", DOWN), 2, ALONE, "Port number 1 state is Down (look"),
    (of_one_end("alone", DOWN), 3, ALONE, "look at its cable and switch port"),
    (of_one_end("alone", NO_DEVICE), 2, ALONE, "look at `ibv_devices`"),
    (of_one_end("memory", NO_MEMORY), 2, ALONE, "allocate MR with error=12 (raise"),
    (of_one_end("memory", NO_PD), 2, ALONE, "raise locked memory"),
    ({"met": of_second(RETRIES[0])}, 3, ALONE, NOTHING_BACK),  # it connects to no other
    *(({"met": of_second(each, 2)}, 2, BOTH, NOTHING_BACK) for each in RETRIES),
    ({"met": of_second(NO_GID, 2)}, 2, BOTH, "compare GIDs and subnets of both ends"),
    ({"met": of_second(OLD, 2)}, 2, BOTH, "the versions of perftest"),
    ({"met": of_second(LEFT, 2)}, 2, BOTH, "the other end gave up"),
])  # fmt: skip
def test_who_cannot_write_is_named_with_the_port_and_what_to_do(perftest, different, count, fault, what):
    perftest(**different)
    with nodes(count) as run:
        (found,) = who_cannot_write(run, PORTS[count == 2 :])
        assert run.cluster.alive == (1, 3)[: count - 1]
    assert (found.name, found.subjects, what in found.what) == (*fault, True), found.what
    assert found.what.startswith("gf1 to gf2, mlx5_1/1: ib_write_bw failed: " if "met" in different else "mlx5_1/1: ")


def test_a_wrong_index_of_the_address_is_that_of_nccl_on_ethernet_alone(perftest, tmp_path, monkeypatch):
    perftest()
    monkeypatch.setattr(network_ports, "ADAPTERS", tmp_path)
    monkeypatch.setenv("NCCL_IB_GID_INDEX", "1")
    for layer, names in (("InfiniBand", []), ("Ethernet", ["nodes_cut_off"])):
        port = tmp_path / "mlx5_1/ports/1"
        port.mkdir(parents=True, exist_ok=True)
        (port / "link_layer").write_text(f"{layer}\n")
        with nodes(2) as run:
            assert [fault.name for fault in who_cannot_write(run, PORTS[1:])] == names


def test_a_client_that_hangs_is_ended(perftest, monkeypatch):
    monkeypatch.setattr(rdma, "SECONDS", 1)
    perftest(met=of_second("hangs", count=2))
    with nodes(2) as run:
        (fault,) = who_cannot_write(run, PORTS)
    assert "mlx5_1/1: ib_write_bw did not answer within 1 s" in fault.what


def test_a_node_that_does_not_answer_is_named(perftest):
    perftest()
    with nodes(2, Serve=lambda node, question: "trouble" if node == 2 else network.serve(question, "127.0.0.1")) as run:
        (fault,) = who_cannot_write(run, PORTS[1:])
    assert (fault.subjects, fault.what) == ((GF2,), "mlx5_1/1: trouble")


@pytest.mark.parametrize(("different", "figure", "why"), [
    ({"slow": {"127.0.0.2 mlx5_1": 200.0}}, 25.0, ""), ({"met": of_second(RETRIES[0])}, 0.0, "_bw failed"),
], ids=["half", "none"])  # fmt: skip
def test_bandwidth_and_latency_of_a_rail(perftest, different, figure, why):
    perftest(**different)
    with nodes(3) as run:
        hosts = {node: run.cluster.names[node] for node in run.cluster.alive}
        rails = RdmaRails(partial(network.written, run.cluster), hosts, {1: PORTS[1]}, 0)
        found, latency = rails.bandwidth(400), rails.latency()
        (fault,) = slow_rails(found, hosts, rails.reached)
    measurement = found.measurement
    assert measurement.conditions == {"bytes": 8 << 20, "port_rate": 400}
    assert measurement.details["node3/rail1"] == PORTS[1]
    values = {str(place): value for place, value in measurement.values.items()}
    assert values == {"node1/rail1": 389.61 / 8, "node2/rail1": figure, "node3/rail1": 389.61 / 8}
    assert (fault.name, fault.subjects) == ("rail_slow", (Place(2, "rail", 1),))
    assert bool(rails.failed) == bool(why)
    assert all("mlx5_1/1: ib_write" in each for each in rails.failed)
    assert {*latency.values.values()} == {1.53}
    assert len(latency.values) == (2 if why else 3)


def test_rails_are_the_fastest_ports_of_most_by_the_gpu_next_to_each():
    def ports(*rates):
        return [Port(f"mlx5_{number}/1", "4: ACTIVE" if rate else "1: DOWN", f"{rate} Gb/sec", "InfiniBand")
                for number, rate in enumerate(rates)]  # fmt: skip

    gpus = [Gpu(0, {"network_adapters": ["mlx5_2"]}), Gpu(1, {"network_adapters": ["mlx5_0"]})]
    usual, down = ports(400, 100, 400, 400), ports(400, 100, 0, 400)
    assert rdma.rails([usual, down], gpus) == {1: "mlx5_0/1", 0: "mlx5_2/1"}  # the last one is for storage
    assert rdma.rails([usual, down], [Gpu(0, {})]) == {1: "mlx5_0/1", 2: "mlx5_2/1", 3: "mlx5_3/1"}
    assert rdma.rails([usual, usual[:2]], []) == {0: "mlx5_0/1"}

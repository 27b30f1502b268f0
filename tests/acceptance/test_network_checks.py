"""The checks of network adapters, called with a recorded machine that has some."""

import inspect
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from pytest_gpufleet.machine.local_node import Machine
from pytest_gpufleet.machine.rdma import Written
from pytest_gpufleet.model.events import Order
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import Missing, Place, joined
from pytest_gpufleet.plugin.assertions import Node
from pytest_gpufleet.probes import adapter_loopback
from pytest_gpufleet.verdict.judgement import judge
from tests.acceptance.checks import _outcome, outcomes, ranks_answer
from tests.acceptance.test_faulty_machines import port
from tests.machines import recorded, set_host, set_port, then

# Of the folder that tests.acceptance.checks found.
BETWEEN = [*map(__import__, ("test_nodes_2_ports", "test_nodes_2_reach", "test_nodes_3_rails"))]
PORTS = set_host(network_ports=[port(number) for number in range(4)])


@pytest.mark.parametrize(("flaps", "what"), [
    ({"mlx5_0/1": 1, "mlx5_1/1": 0}, "passed"),
    ({"mlx5_0/1": 0, "mlx5_1/1": 3}, "failed"),
    ({"mlx5_0/1": 0, "mlx5_1/1": None}, "skipped"),
    ({"mlx5_0/1": None, "mlx5_1/1": 3}, "failed"),
    (Missing("no InfiniBand port is active", absent=True), "not applicable"),
])  # fmt: skip
def test_infiniband_links_that_went_down_within_a_day(flaps, what):
    outcome = outcomes(recorded(set_host(link_flaps=flaps)))["test_infiniband_links_stayed_up_for_a_day"]
    named = ["mlx5_1/1: its link went down 3 times" in fault.what for fault in outcome.faults]
    assert (outcome.what, named) == (what, [True] * (what == "failed"))


def wrote(usual=389.6, **third):
    """What each port wrote to itself; of the third something else."""
    every = [{"port": f"mlx5_{number}/1", "gigabits": usual} for number in range(4)]
    every[2].update(third)
    return then(PORTS, set_host(rdma_writes=every))


NEAT, OF_DELL = "MT_0000000838", "DEL0000000041"  # a ConnectX-7 of 400 Gbit/s, and one of which nobody knows
NOT_INSTALLED = Missing("mlxlink is not installed", remedy="apt install mstflint")


def able(gigabits):
    return [{"port": f"mlx5_{number}/1", "able": gigabits} for number in range(4)]


SLOW_ORDER = [{"adapter": "MT4129", "count": 4, "gigabits_per_second": 200}]


@pytest.mark.parametrize(("rate", "board", "optics", "order", "what"), [
    (400, NEAT, NOT_INSTALLED, None, "passed"),
    (200, NEAT, NOT_INSTALLED, None, "failed"),
    (200, NEAT, NOT_INSTALLED, SLOW_ORDER, "passed"),
    (200, OF_DELL, NOT_INSTALLED, None, "skipped"),
    (200, OF_DELL, NOT_INSTALLED, SLOW_ORDER, "passed"),
    (200, OF_DELL, able(400), None, "failed"),
    (200, OF_DELL, able(200), None, "passed"),
    (200, None, NOT_INSTALLED, None, "not applicable"),  # ports of EFA have no board that is known
])  # fmt: skip
def test_ports_at_half_the_rate_of_their_board(rate, board, optics, order, what):
    given = order and Order("order.toml", "", {"ports": order})
    layer = "InfiniBand" if board else "Unspecified"
    here = recorded(PORTS, set_port(rate=f"{rate} Gb/sec", board=board, link_layer=layer), set_host(optics=optics))
    outcome = outcomes(here, fleet_order=given)["test_ports_run_at_the_rate_of_their_board"]
    assert outcome.what == what
    assert [fault.name for fault in outcome.faults] == ["nic_rate_low"] * (4 if what == "failed" else 0)


def written(change):
    judged = []
    found = outcomes(recorded(change), judge=lambda measured, on_miss: judged.append((measured(), on_miss)))
    return found["test_adapters_write_to_themselves"], judged


def test_adapters_that_write_to_themselves_and_one_through_which_nothing_goes():
    outcome, [(measurement, _)] = written(wrote())
    assert outcome.what == "passed"
    assert set(measurement.values.values()) == {389.6 / 8}
    assert measurement.conditions == {"method": "ib_write_bw", "bytes": 8 << 20, "port_rate": 400}
    outcome, [(measurement, _)] = written(wrote(gigabits=0.0, why="no reply"))
    assert [fault.name for fault in outcome.faults] == ["network_adapter_fails"]
    assert len(measurement.values) == 3


def test_an_adapter_that_fails_once_only_is_no_fault():
    every = [{"port": "mlx5_0/1", "gigabits": 389.6}, {"port": "mlx5_1/1", "gigabits": 0.0, "why": "no reply"}]

    def judge(measured, on_miss):
        measured()
        every[1].update(gigabits=389.6, why="")
        assert len(measured().values) == 2

    here = outcomes(recorded(PORTS), now={"rdma_writes": every}, judge=judge)
    assert here["test_adapters_write_to_themselves"].what == "passed"


@pytest.mark.parametrize(("change", "state", "peers", "limits", "named"), [
    (wrote(gigabits=340.0), "missed", ["nic2"], 0, [("network_adapter_slow", "nic2", "mlx5_2/1")]),
    (wrote(200.0), "missed", [], 4, None),  # half, as where all traffic goes through the memory of the host
    (wrote(360.0), "met", [], 0, None),  # Azure's gate for H200
    (wrote(384.0), "met", [], 0, None),  # that of oci-hpc
])  # fmt: skip
def test_slow_adapters_miss_their_peers_or_what_their_ports_can(change, state, peers, limits, named):
    _, [(measurement, on_miss)] = written(change)
    finding = judge(measurement, None, recorded().topology, "x.py::y", rehearsal=False)
    assert (finding.state, [*map(str, finding.slower_than_peers or ())]) == (state, peers)
    assert (finding.limit.grade, len(finding.missed)) == ("physical", limits)
    faults = [(fault.name, *map(str, fault.subjects), fault.what.partition(" ")[0]) for fault in on_miss()]
    assert named is None or faults == named


def through_adapters(monkeypatch, **found):
    monkeypatch.setattr(adapter_loopback, "adapters_in_loopback", lambda *_: adapter_loopback.Loopback(**found))
    world = ranks_answer([None] * 4, to="nothing")
    world.gpus = ["GPU"] * 4
    more = {"world": world, "judge": lambda measurement, on_miss: None}
    return outcomes(recorded(PORTS), **more)["test_gpus_reach_each_other_through_each_adapter"]


def test_adapters_that_carry_what_gpus_send_and_figures_that_nothing_proves(monkeypatch):
    assert through_adapters(monkeypatch, alone={"mlx5_0/1": (46.0,), "mlx5_1/1": (46.5,)}).what == "passed"
    outcome = through_adapters(monkeypatch, alone={"mlx5_0/1": (46.0,)}, failed={"mlx5_1/1": "rank 3 died"})
    assert [fault.name for fault in outcome.faults] == ["network_adapter_fails"]
    outcome = through_adapters(monkeypatch, unseen=["mlx5_0/1", "mlx5_1/1"])
    assert (outcome.what, "mlx5_1/1" in outcome.message) == ("skipped", True)
    (fault,) = through_adapters(monkeypatch, alone={"mlx5_0/1": (46.0,)}, unseen=["mlx5_1/1"]).faults
    assert (fault.name, fault.what.partition(":")[0]) == ("network_adapter_fails", "mlx5_1/1")


def between(check, *now, before=None, **more):
    """How a check between nodes ends whose hosts have these facts now, and began with others."""
    facts = [{"network_ports": [], **each} for each in now]

    def answers(fact):
        return {node: each.get(fact) for node, each in enumerate(facts)}

    machines = (Machine((), {**each, **(before or {})}, node=node) for node, each in enumerate(facts))
    nodes = [Node(each.node, each, None, None, answers, f"gf{each.node}") for each in machines]
    machine = SimpleNamespace(nodes=nodes)
    given = {"machine": machine, "ports": inspect.unwrap(BETWEEN[0].ports)(machine), "fleet_network": "", **more}
    (wanted,) = (getattr(module, check) for module in BETWEEN if hasattr(module, check))
    return _outcome(wanted, {name: given[name] for name in inspect.signature(wanted).parameters}, recorded().topology)


@pytest.mark.parametrize(
    ("ahead", "what"), [((0.0, 0.001), "passed"), ((0.0, 0.2), "failed"), ((0.0, None), "skipped")]
)
def test_clocks_of_nodes_agree_only_where_they_are_known(ahead, what):
    machine = SimpleNamespace(nodes=[SimpleNamespace(number=i, clock_ahead=each) for i, each in enumerate(ahead)])
    check = __import__("test_nodes_1_alike").test_clocks_agree
    assert _outcome(check, {"machine": machine}, recorded().topology).what == what


def named(outcome):
    return outcome.what, [(fault.name, fault.subjects[0].node) for fault in outcome.faults]


def tcp(sent, resent, received, out_of_order):
    return {"tcp": {"sent": sent, "resent": resent, "received": received, "out_of_order": out_of_order}}


def test_lost_packets_are_those_since_the_run_began():
    """Two hosts between which a relay lost 1 % and 0.01 % of the packets to the second, and none."""
    lost = (tcp(43_453, 447, 9_784, 0), tcp(9_784, 0, 43_453, 36_725))
    few, none, began = tcp(43_453, 7, 5_797, 0), tcp(5, 0, 5, 0), tcp(0, 0, 0, 0)
    both, check = [("packets_lost", 0), ("packets_lost", 1)], "test_few_packets_are_lost"
    assert named(between(check, *lost, before=began)) == ("failed", both)
    assert between(check, few, tcp(5_797, 0, 43_454, 2_174), before=began).what == "passed"
    assert between(check, *lost, before=lost[0]).what == "not applicable"  # before the run
    assert between(check, none, none, before=began).what == "not applicable"


def test_cables_in_the_switch_of_another_rail():
    def wired(order):
        named = (f"leaf-{leaf}" if leaf is not None else "" for leaf in order)
        return {"switch_ports": {f"mlx5_{number}/1": switch for number, switch in enumerate(named)}}

    check = "test_cables_are_in_the_switches_of_their_peers"
    usual, swapped = wired(range(8)), wired((0, 1, 5, 3, 4, 2, 6, 7))
    silent, absent = ({"switch_ports": Missing("why", absent=absent)} for absent in (False, True))
    assert between(check, usual, usual, usual).what == "passed"
    assert named(between(check, usual, swapped, usual)) == ("failed", [("cable_swapped", 1)] * 2)
    assert between(check, usual, silent, usual).what == "skipped"
    assert between(check, usual, wired((0, 1, None, 3, 4, 5, 6, 7)), usual).what == "skipped"  # one switch is silent
    assert between(check, usual, swapped, silent).what == "failed"
    assert between(check, absent, absent).what == "not applicable"


INSTALLED, MISSING = ["mlx5_0/1", "mlx5_1/1"], Missing("ib_write_bw is not installed", absent=True)
HIDDEN = Missing("mlx5_0/1 have no device file here")


def by_rdma(check, *installed, **more):
    """Of nodes of which each answers so whether perftest can write there."""
    return between(check, *({"network_ports": [port(0), port(1)], "rdma_ports": each} for each in installed), **more)


def test_rails_that_do_not_connect_by_rdma(monkeypatch):
    check = "test_nodes_write_to_each_other_by_rdma"
    cut_off = Mock(return_value=[Fault("node_cut_off", (Place(1, "node"),), "mlx5_1/1: why")])
    outcome = by_rdma(check, INSTALLED, INSTALLED, cut_off=cut_off)
    assert [fault.name for fault in outcome.faults] == ["node_cut_off"]
    cut_off.assert_called_once_with(rdma=INSTALLED)
    assert by_rdma(check, INSTALLED, INSTALLED, cut_off=lambda rdma: ()).what == "passed"
    assert by_rdma(check, MISSING, MISSING, cut_off=cut_off).what == "not applicable"
    assert by_rdma(check, HIDDEN, HIDDEN, cut_off=cut_off).what == "skipped"
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert by_rdma(check, INSTALLED, INSTALLED, cut_off=cut_off).what == "not applicable"
    monkeypatch.delenv("NCCL_IB_DISABLE")
    outcome = by_rdma(check, INSTALLED, MISSING, cut_off=cut_off)
    assert (outcome.what, "node 1: ib_write_bw is not installed" in outcome.message) == ("skipped", True)


@pytest.mark.parametrize(("second", "network", "state", "places"), [
    (389.6, "", "met", []),
    (350.0, "", "met", []),  # 87 % of the rate
    (200.0, "", "missed", ["rail1-node1/rail1"]),
    (200.0, "200", "met", []),
    (200.0, "none", "for information", []),
    ("Failed status 12", "", "missed", ["rail1-node1/rail1"]),
    ("late", "", "met", []),
])  # fmt: skip
def test_rdma_bandwidth_and_latency(second, network, state, places):
    findings, asked = [], []

    def write(test, ways, ports):
        (name,) = ports
        latency = test.program == "ib_write_lat"
        figure = second if name == "mlx5_1/1" and (second != "late" or latency) else 389.6
        if latency and second != "late":
            figure = 1.5
        failed = Written(why=f"{name}: {figure}")
        return {way: [failed if isinstance(figure, str) else Written(figure)] for way in ways}

    def judged(measured, required=True, on_miss=None):
        measurement = measured() if callable(measured) else measured
        two = joined({node: recorded().topology for node in (0, 1)}, {0: "gf0", 1: "gf1"})
        asked.append(required)
        findings.append(judge(measurement, None, two, "x.py::y", rehearsal=False, required=required))
        if findings[-1].state == "missed":
            assert [fault.name for fault in on_miss()] == ["network_between_nodes_slow"]

    check = "test_rdma_bandwidth_and_latency_between_nodes"
    outcome = by_rdma(check, INSTALLED, INSTALLED, rdma_write=write, judge=judged, fleet_network=network)
    bandwidth, *latency = findings
    assert len(latency) == (second != "Failed status 12")
    assert (bandwidth.state, [*map(str, bandwidth.missed)]) == (state, places)
    if isinstance(second, str):
        named = [(fault.name, f"mlx5_1/1: {second}" in fault.what) for fault in outcome.faults]
        assert named == [("network_adapter_fails", True)] * (1 if latency else 2)
    else:
        assert (outcome.what, {*latency[0].measurement.values.values()}) == ("passed", {1.5})
        assert asked == [network != "none", False]

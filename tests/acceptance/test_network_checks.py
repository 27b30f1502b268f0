"""The checks of network adapters, called with a recorded machine that has some."""

import pytest

from pytest_gpufleet.model.events import Order
from pytest_gpufleet.probes import adapter_loopback
from pytest_gpufleet.verdict.judgement import judge
from tests.acceptance.checks import outcomes, ranks_answer
from tests.machines import recorded

PORTS = """
def port(i):
    return dict(port=f'mlx5_{i}/1', state='4: ACTIVE', rate='400 Gb/sec (4X NDR)', link_layer='InfiniBand')
host['network_ports'] = [port(i) for i in range(4)]
wrote = host['rdma_writes'] = [dict(port=f'mlx5_{i}/1', bytes=8 << 20, gigabits=389.6) for i in range(4)]
"""


@pytest.mark.parametrize(
    ("change", "order", "what"),
    [
        ("", None, "passed"),
        ("slow()", None, "failed"),
        ("slow()", [{"adapter": "MT4129", "count": 4, "gigabits_per_second": 200}], "passed"),
        ("slow('DEL0000000041')", None, "skipped"),  # nobody knows, and mlxlink is not installed
        (
            "slow('DEL0000000041'); host['optics'] = [dict(port=f'mlx5_{i}/1', able=400) for i in range(4)]",
            None,
            "failed",
        ),
        (
            "slow('DEL0000000041'); host['optics'] = [dict(port=f'mlx5_{i}/1', able=200) for i in range(4)]",
            None,
            "passed",
        ),
    ],
)
def test_ports_at_half_the_rate_of_their_board(change, order, what):
    given = order and Order("order.toml", "", {"ports": order})
    there = f"""{PORTS}
host['optics'] = Missing('mlxlink is not installed', remedy='apt install mstflint')
for port in host['network_ports']: port['board'] = 'MT_0000000838'
def slow(board='MT_0000000838'):
    for port in host['network_ports']: port.update(rate='200 Gb/sec (4X HDR)', board=board)
{change}"""
    outcome = outcomes(recorded(there), fleet_order=given)["test_ports_run_at_the_rate_of_their_board"]
    assert outcome.what == what
    assert [fault.name for fault in outcome.faults] == ["nic_rate_low"] * (4 if what == "failed" else 0)


def test_a_port_with_another_mtu():
    mtus = f"{PORTS}for port in host['network_ports']: port['mtu'] = 4200\n"
    odd = f"{mtus}host['network_ports'][2]['mtu'] = 1500"
    found = [outcomes(recorded(each))["test_ports_have_one_mtu"] for each in (PORTS, mtus, odd)]
    assert [each.what for each in found] == ["not applicable", "passed", "failed"]
    assert [fault.name for fault in found[-1].faults] == ["mtu_mismatch"]


def written(change):
    """How the check of writes ends on this machine, and what it gave to judge."""
    judged = []

    def judge(measurement, on_miss):
        judged.append((measurement, on_miss))

    return outcomes(recorded(change), judge=judge)["test_adapters_write_to_themselves"], judged


def test_adapters_that_write_to_themselves():
    outcome, [(measurement, _)] = written(PORTS)
    assert outcome.what == "passed"
    assert set(measurement.values.values()) == {389.6 / 8}
    assert measurement.conditions == {"method": "ib_write_bw", "bytes": 8 << 20, "port_rate": 400}


@pytest.mark.parametrize(
    ("slow", "gigabits", "state", "peers", "limits", "named"),
    [
        ("wrote[2:3]", 340.0, "missed", ["nic2"], 0, ["mlx5_2/1"]),
        ("wrote", 200.0, "missed", [], 4, None),  # half, as where all traffic goes through the memory of the host
        ("wrote", 360.0, "met", [], 0, None),  # Azure's gate for H200
        ("wrote", 384.0, "met", [], 0, None),  # that of oci-hpc
    ],
)
def test_slow_adapters_miss_their_peers_or_what_their_ports_can(slow, gigabits, state, peers, limits, named):
    _, [(measurement, on_miss)] = written(PORTS + f"for one in {slow}: one['gigabits'] = {gigabits}")
    finding = judge(measurement, None, recorded().topology, "x.py::y", rehearsal=False)
    assert (finding.state, [*map(str, finding.slower_than_peers or ())]) == (state, peers)
    assert (finding.limit.grade, len(finding.missed)) == ("physical", limits)
    assert named is None or [fault.what.partition(" ")[0] for fault in on_miss()] == named


def test_an_adapter_through_which_nothing_goes():
    outcome, [(measurement, _)] = written(PORTS + "wrote[2] = dict(port='mlx5_2/1', why='no reply')")
    assert [fault.name for fault in outcome.faults] == ["network_adapter_fails"]
    assert len(measurement.values) == 3


def through_adapters(monkeypatch, **found):
    """How the check ends whose ranks found this."""
    monkeypatch.setattr(adapter_loopback, "adapters_in_loopback", lambda *_: adapter_loopback.Loopback(**found))
    world = ranks_answer([None] * 4, to="nothing")
    world.gpus = ["GPU"] * 4
    more = {"world": world, "judge": lambda measurement, on_miss: None}
    return outcomes(recorded(PORTS), **more)["test_gpus_reach_each_other_through_each_adapter"]


def test_figures_that_nothing_proves_are_not_judged(monkeypatch):
    outcome = through_adapters(monkeypatch, unseen=["mlx5_0/1", "mlx5_1/1"])
    assert (outcome.what, "mlx5_1/1" in outcome.message) == ("not applicable", True)
    (fault,) = through_adapters(monkeypatch, alone={"mlx5_0/1": (46.0,)}, unseen=["mlx5_1/1"]).faults
    assert (fault.name, fault.what.partition(":")[0]) == ("network_adapter_fails", "mlx5_1/1")


def test_adapters_that_carry_what_gpus_send(monkeypatch):
    assert through_adapters(monkeypatch, alone={"mlx5_0/1": (46.0,), "mlx5_1/1": (46.5,)}).what == "passed"
    outcome = through_adapters(monkeypatch, alone={"mlx5_0/1": (46.0,)}, failed={"mlx5_1/1": "rank 3 died"})
    assert [fault.name for fault in outcome.faults] == ["network_adapter_fails"]

"""What adapters write to themselves, by a program that stands for ib_write_bw."""

import pytest

from pytest_gpufleet.machine import network_ports, rdma
from pytest_gpufleet.machine.network_ports import Port
from pytest_gpufleet.machine.rdma import Write
from pytest_gpufleet.machine.tools import Absent, Unreadable
from tests.machine import fake_perftest
from tests.machine.fake_perftest import DOWN


def ports(*names, rate="400 Gb/sec (4X NDR)", state="4: ACTIVE", layer="InfiniBand"):
    return [Port(name, state, rate, layer) for name in names]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """installed(adapters of this host, what is different about perftest)"""
    return lambda adapters, **different: (
        monkeypatch.setattr(network_ports, "read", lambda: adapters),
        fake_perftest.install(tmp_path, monkeypatch, **different),
    )


def test_each_port_at_the_highest_rate_writes_to_itself(installed):
    """Ports for storage, those without a cable, and those that are no InfiniBand and no RoCE are not asked."""
    others = [*ports("mlx5_8/1", rate="200 Gb/sec (4X HDR)"), *ports("mlx5_9/1", state="1: DOWN")]
    others += ports("rdmap79s0/1", layer="Unspecified")
    installed([*ports("mlx5_0/1", "mlx5_1/1"), *others], help_status=1)
    assert rdma.read() == [Write(name, 389.61) for name in ("mlx5_0/1", "mlx5_1/1")]


def test_a_pod_with_a_part_of_the_adapters_is_not_judged(installed, tmp_path, monkeypatch):
    installed(ports("mlx5_0/1", "mlx5_1/1"), alone={"127.0.0.1 mlx5_1": DOWN})
    for number in (0, 1):
        (tmp_path / f"mlx5_{number}/device/infiniband_verbs/uverbs{number}").mkdir(parents=True)
    (tmp_path / "uverbs0").touch()
    monkeypatch.setattr(network_ports, "ADAPTERS", tmp_path)
    monkeypatch.setattr(rdma, "DEVICE_FILES", tmp_path)
    with pytest.raises(Unreadable, match="mlx5_1/1 have no device file"):
        rdma.read()


def test_a_port_that_cannot_leaves_the_others(installed):
    installed(ports("mlx5_0/1", "mlx5_1/1"), alone={"127.0.0.1 mlx5_1": DOWN})
    whole, broken = rdma.read()
    assert (whole.gigabits, broken.port, "state is Down" in broken.why) == (389.61, "mlx5_1/1", True)


@pytest.mark.parametrize(("adapters", "different", "state", "why"), [
    ([], {}, Absent, "no InfiniBand or RoCE port is active"),
    (ports("mlx5_0/1"), {"bind": "--source_ip"}, Unreadable, "no --bind_source_ip: install perftest 23.07"),
    (ports("mlx5_0/1"), {"alone": {"127.0.0.1 mlx5_0": DOWN}}, Unreadable, "reaches no adapter"),
    (ports("mlx5_0/1"), {"report": "{%s"}, Unreadable, "wrote no report"),
], ids=["no port", "an old program", "no port that works", "no report"])  # fmt: skip
def test_nothing_can_be_measured(installed, adapters, different, state, why):
    installed(adapters, **different)
    with pytest.raises(state, match=why):
        rdma.read()


def test_it_is_not_installed(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(network_ports, "read", lambda: ports("mlx5_0/1"))
    with pytest.raises(Unreadable, match="ib_write_bw is not installed"):
        rdma.read()

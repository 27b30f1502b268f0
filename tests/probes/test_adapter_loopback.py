"""Adapters that send to themselves: which ranks take which, what is proven, and how it is named. Ranks are CPU
ranks, and the adapter of the last test is the loopback interface, whose counters grow as those of a port do."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pytest_gpufleet.machine import network_ports
from pytest_gpufleet.machine.network_ports import PcieLink, Port
from pytest_gpufleet.model.metric import Reading
from pytest_gpufleet.model.place import Place
from pytest_gpufleet.probes import adapter_loopback as loopback
from pytest_gpufleet.probes.adapter_loopback import LOOPBACK_INTERFACE, adapter_bandwidth
from pytest_gpufleet.world.world import World
from tests.machine.test_network_ports import ports
from tests.machine.trees import written


@pytest.mark.parametrize(("near", "count", "expected"), [
    (
        [[f"mlx5_{number}"] for number in (7, 6, 5, 4, 3, 2, 1, 0)],
        8,
        [
            {0: "mlx5_6/1", 1: "mlx5_4/1", 2: "mlx5_2/1", 3: "mlx5_0/1"},
            {0: "mlx5_7/1", 1: "mlx5_5/1", 2: "mlx5_3/1", 3: "mlx5_1/1"},
        ],
    ),
    # Where it is not known what is near, they go to pairs in their order.
    ([[]] * 4, 2, [{0: "mlx5_0/1", 1: "mlx5_1/1"}]),
    ([[]] * 2, 2, [{0: "mlx5_0/1"}, {0: "mlx5_1/1"}]),
    ([[]] * 5, 1, [{0: "mlx5_0/1"}]),
    ([[], [], ["mlx5_0"]], 1, [{0: "mlx5_0/1"}]),  # its GPU has no partner
])  # fmt: skip
def test_each_adapter_goes_to_the_pair_of_the_gpu_next_to_it(near, count, expected):
    gpus = [SimpleNamespace(get={"network_adapters": adapters}.get) for adapters in near]
    assert loopback.turns(SimpleNamespace(size=len(near), gpus=gpus), ports(count)) == expected


def test_a_rank_finds_one_adapter_and_no_other_way():
    found = loopback.environments(5, {1: "mlx5_3/1"})
    assert [bool(each) for each in found] == [False, False, True, True, False]
    assert {each["NCCL_IB_HCA"] for each in found[2:4]} == {"=mlx5_3:1"}
    assert found[2]["NCCL_HOSTID"] != found[3]["NCCL_HOSTID"]
    assert {found[2][name] for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")} == {"1"}


def test_counters_are_words_of_four_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(network_ports, "ADAPTERS", tmp_path)
    written(tmp_path, {"mlx5_0/ports/1/counters/port_xmit_data": "1000\n"})
    assert network_ports.carried("mlx5_0/1") is None
    written(tmp_path, {"mlx5_0/ports/1/counters/port_rcv_data": "500\n"})
    assert network_ports.carried("mlx5_0/1") == (4000, 2000)


def test_a_port_that_did_not_count_what_was_sent_proves_nothing():
    reading = Reading("busbw", 1.0, {}, (1.0, 1.0), details={"iterations": 4, "runs": 1})
    for before, now in (((0, 0), (800, 900)), ((100, 100), (900, 900))):
        assert loopback.carried(before, now, reading, 50)
    for before, now in (((0, 0), (800, 799)), ((0, 0), (0, 0)), (None, (800, 800)), ((0, 0), None)):
        assert not loopback.carried(before, now, reading, 50)


def test_figures_have_places_and_names_and_are_held_against_what_ports_or_all_slots_carry():
    every = [Port("mlx5_9/1", rate="200 Gb/sec"), *ports(2)]
    found = adapter_bandwidth({"mlx5_0/1": (46.0, 48.0, 47.0), "mlx5_1/1": (30.0,)}, every, "nccl", 1024)
    assert found.values == {Place(0, "nic", 1): 47.0, Place(0, "nic", 2): 30.0}
    assert found.details == {"nic1": "mlx5_0/1", "nic2": "mlx5_1/1"}
    assert found.conditions == {"method": "nccl", "bytes": 1024, "port_rate": 400}
    # 16 lanes of generation 4; one that has lost lanes is asked for as much as the others.
    built = [*ports(1, pcie=PcieLink(lanes=16, speed=16.0)), Port("mlx5_1/1", pcie=PcieLink(lanes=8, speed=16.0))]
    figures = {port.port: (20.0,) for port in built}
    assert adapter_bandwidth(figures, built, "nccl", 1024).conditions["port_rate"] == 252


OTHER = Port("no0")  # an interface that nobody has


def process(rank):
    return os.getpid(), {name: value for name, value in os.environ.items() if name.startswith("NCCL_P2P")}


def summed(rank):
    number = torch.ones(1)
    dist.all_reduce(number, group=rank.group)
    return int(number)


def dies_in_the_second_pair(rank, folder, nbytes):
    if os.environ["RANK"] in "23":
        os._exit(3)
    return loopback.exchange(rank, folder, nbytes)


def test_ranks_send_through_the_loopback_interface_and_are_as_before(four_ranks):
    """It is measured and proven, and what is not counted is not reported."""
    world_of_four = World(four_ranks._pool, with_group=False)
    assert four_ranks.run(summed) == [4] * 4
    found = loopback.adapters_in_loopback(world_of_four, [LOOPBACK_INTERFACE, OTHER])
    assert (list(found.alone), found.at_once, found.failed, found.unseen) == (["lo"], {}, {}, ["no0"])
    assert adapter_bandwidth(found.alone, [LOOPBACK_INTERFACE], "nccl", 1024).details == {"nic0": "lo"}
    assert min(found.alone["lo"]) > 0
    ours, variables = zip(*world_of_four.run(process), strict=True)
    with world_of_four.restarted(loopback.environments(4, {1: "mlx5_0/1"})):
        others, theirs = zip(*world_of_four.run(process), strict=True)
    assert set(ours).isdisjoint(others)
    assert variables == ({},) * 4
    assert [bool(each) for each in theirs] == [False, False, True, True]
    assert [bool(each) for _, each in world_of_four.run(process)] == [False] * 4
    assert four_ranks.run(summed) == [4] * 4


def test_an_adapter_that_fails_leaves_the_ranks(four_ranks, monkeypatch):
    """The ranks of one die when they are asked; the other one still answers, and both are there again afterwards."""
    monkeypatch.setattr(loopback, "exchange", dies_in_the_second_pair)
    found = loopback.adapters_in_loopback(World(four_ranks._pool, with_group=False), [LOOPBACK_INTERFACE, OTHER])
    assert (list(found.alone), list(found.failed)) == (["lo"], ["no0"])
    assert four_ranks.run(summed) == [4] * 4

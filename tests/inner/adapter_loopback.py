"""Ranks that send through the loopback interface, in the order in which these stand."""

import os

from pytest_gpufleet.machine import network_ports
from pytest_gpufleet.machine.network_ports import Port
from pytest_gpufleet.probes.adapter_loopback import (
    LOOPBACK_INTERFACE,
    adapter_bandwidth,
    adapters_in_loopback,
    environments,
)

OTHER = Port("no0")  # an interface that nobody has


def process(rank):
    return os.getpid(), {name: value for name, value in os.environ.items() if name.startswith("NCCL_P2P")}


def summed(rank):
    import torch
    import torch.distributed as dist

    number = torch.ones(1)
    dist.all_reduce(number, group=rank.group)
    return int(number)


def test_ranks_of_before(nccl_group):
    assert nccl_group.run(summed) == [4] * 4


def test_it_is_measured_and_proven_and_what_is_not_counted_is_not_reported(world):
    found = adapters_in_loopback(world, [LOOPBACK_INTERFACE, OTHER])
    assert (list(found.alone), found.at_once, found.failed, found.unseen) == (["lo"], {}, {}, ["no0"])
    assert adapter_bandwidth(found.alone, [LOOPBACK_INTERFACE], "nccl", 1024).details == {"nic0": "lo"}
    assert min(found.alone["lo"]) > 0


def test_an_adapter_that_fails_leaves_the_ranks(world, monkeypatch):
    """The ranks of one die when they are asked; the other one still answers, and both are there again afterwards."""
    from pytest_gpufleet.probes import adapter_loopback as module

    monkeypatch.setattr(module, "exchange", dies_in_the_second_pair)
    found = adapters_in_loopback(world, [LOOPBACK_INTERFACE, OTHER])
    assert list(found.alone) == ["lo"]
    assert list(found.failed) == ["no0"]


def test_ranks_of_afterwards(nccl_group, world):
    ours, variables = zip(*world.run(process), strict=True)
    with world.restarted(environments(4, {1: "mlx5_0/1"})):
        others, theirs = zip(*world.run(process), strict=True)
    assert set(ours).isdisjoint(others)
    assert variables == ({},) * 4
    assert [bool(each) for each in theirs] == [False, False, True, True]
    assert [bool(each) for _, each in world.run(process)] == [False] * 4
    assert nccl_group.run(summed) == [4] * 4
    assert network_ports.carried("lo") is not None


def dies_in_the_second_pair(rank, folder, nbytes):
    from pytest_gpufleet.probes.adapter_loopback import exchange

    if os.environ["RANK"] in "23":
        os._exit(3)
    return exchange(rank, folder, nbytes)

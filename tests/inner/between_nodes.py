"""Checks between three nodes, of which one is lost on the way."""

import os
import signal
import time

import pytest

from pytest_gpufleet.plugin.compat import RUN

pytestmark = pytest.mark.needs(nodes=2)


def test_ranks(world, machine):
    assert world.size == 2 * len(world.nodes) == 2 * len(machine.nodes) == 6
    assert [place.node for place in world.places] == [0, 0, 1, 1, 2, 2]
    assert [node.machine.node for node in machine.nodes] == [0, 1, 2]
    own = {node.number: (node.run.host, node.run.record.verdict) for node in machine.nodes}
    assert own == {node: (f"node{node}", "REHEARSAL") for node in range(3)}
    assert world.run(lambda rank: (rank.node, rank.index)) == [(index // 2, index) for index in range(6)]


@pytest.mark.parametrize("ask", ["gpus", "host", "now", "before"])
def test_no_machine_of_its_own(machine, ask):
    getattr(machine, ask)("bmc")


def test_no_topology(gpu_topology):
    pass


def test_one_is_lost(pytestconfig, nccl_group):
    agents = {node: hello.pid for node, hello in pytestconfig.stash[RUN].cluster.hellos.items()}

    def lose(rank):
        if rank.index == 2:
            os.kill(agents[1], signal.SIGKILL)
        time.sleep(3600)

    nccl_group.run(lose)


def test_the_rest(nccl_group):
    assert [place.node for place in nccl_group.places] == [0, 0, 2, 2]
    assert nccl_group.run(lambda rank: (rank.node, rank.index)) == [(0, 0), (0, 1), (2, 2), (2, 3)]


@pytest.mark.needs(nodes=3)
def test_as_many_as_there_were():
    pass


@pytest.mark.needs(nodes=4)
def test_more_than_there_were():
    pass

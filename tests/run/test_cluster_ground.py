"""What a run on many nodes stands on."""

import time

import pytest

from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.run.cluster_run import ClusterGround
from tests.nodes.fake_transport import hello

BUSES = ("00000000:0A:00.0", "")  # the second does not answer


@pytest.mark.parametrize(("kernels", "there"), [(("a", "a"), 2), (("a", "b"), 4), ((None, None), 4)])
def test_the_gpus_of_a_host_that_is_two_nodes_are_there_once(kernels, there):
    hellos = {
        node: hello(node, present=BUSES, machine={"boot_id": kernel} if kernel else {})
        for node, kernel in enumerate(kernels)
    }
    assert ClusterGround({0: "gf0", 1: "gf1"}, hellos, rehearsed=0).gpus_present == there


def test_a_machine_of_a_node_knows_how_long_ago_it_was_read_by_whatever_clock_its_node_has(monkeypatch):
    ground = ClusterGround({0: "gf0"}, {0: hello(clock=4e9)}, rehearsed=0)
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 600)
    assert ground.machines[0].seconds_ago >= 600


def test_why_there_are_no_gpus_is_what_nodes_say_that_were_heard():
    absent = GpuTopology(absent="--rehearse was given")
    ground = ClusterGround({0: "gf0", 1: "gf1"}, {0: hello(topology=absent)}, rehearsed=2)
    assert (ground.why, ground.topologies[1].absent) == ("--rehearse was given", "its agent was never heard")

"""What a run on many nodes stands on."""

import pytest

from pytest_gpufleet.run.cluster_ground import ClusterGround
from tests.nodes.fake_transport import hello

BUSES = ("00000000:0A:00.0", "")  # the second does not answer


@pytest.mark.parametrize(("kernels", "there"), [(("a", "a"), 2), (("a", "b"), 4), ((None, None), 4)])
def test_the_gpus_of_a_host_that_is_two_nodes_are_there_once(kernels, there):
    hellos = {
        node: hello(node, present=BUSES, machine={"boot_id": kernel} if kernel else {})
        for node, kernel in enumerate(kernels)
    }
    assert ClusterGround({0: "gf0", 1: "gf1"}, hellos, rehearsed=0).gpus_present == there

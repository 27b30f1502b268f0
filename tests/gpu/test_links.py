"""The links of real GPUs, sound ones and ones made faulty. Skipped without them."""

import re

import pytest

from tests.conftest import ACCEPTANCE
from tests.gpu.present import COPIES, GPUS, intruder, needs_gpus

LINKS = ACCEPTANCE / "test_5_links.py"

pytestmark = needs_gpus(2)
over_nvlink = pytest.mark.skipif(not all(gpu.nvlinks_active for gpu in GPUS), reason="the GPUs have no NVLinks")

MODULE = """
from itertools import combinations

import torch

from pytest_gpufleet import MiB
from pytest_gpufleet.probes.links.copies import pair_bandwidth, wrong_data

def figures(world, topology, direction):
    copied = pair_bandwidth(world, topology, direction, 512 * MiB)
    assert copied.faults == []
    (measurement,) = copied.measurements
    return measurement
"""

ALONE = """
def test_alone(world, gpu_topology):
    for direction in ("read", "write", "both"):
        crowded = figures(world, gpu_topology, direction).values
        for pair in combinations(range(world.size), 2):
            for place, alone in figures(world.subset(pair), gpu_topology, direction).values.items():
                assert abs(crowded[place] / alone - 1) < 0.02, (direction, place, crowded[place], alone)
"""

# nvbandwidth on 8x H200: 391.6 to 392.0 of 396.3 to 396.5 GB/s.
BOTH_WAYS = """
def test_both_ways(world, gpu_topology):
    one_way, both_ways = (figures(world, gpu_topology, direction).values for direction in ("write", "both"))
    assert one_way.keys() == both_ways.keys()  # each direction has its own
    for place, value in one_way.items():
        assert 0.975 < both_ways[place] / value < 1.01, (place, both_ways[place], value)
"""

THROUGH_HOST_MEMORY = """
def cut_off(rank):
    torch.cuda.genuine, torch.cuda.can_device_access_peer = torch.cuda.can_device_access_peer, lambda *pair: False

def connect(rank):
    torch.cuda.can_device_access_peer = torch.cuda.genuine

def test_through_host_memory(world, gpu_topology):
    world.run(cut_off)  # first: peer access that was enabled once may stay enabled
    assert wrong_data(world, gpu_topology, 16 * MiB) == []
    staged, *_ = (figures(world, gpu_topology, direction) for direction in ("read", "both"))
    world.run(connect)
    direct = figures(world, gpu_topology, "read")
    assert all(staged.values[place] < value for place, value in direct.values.items())
    assert staged.conditions["link"] == ("NVLink" if gpu_topology.fabric in ("nvlink", "nvswitch") else "host")
"""

# On rank 1 a bit of what it has read changes, before anybody looks.
FLIP = """
from pytest_gpufleet.probes.links import copies, copying

def plant(rank, fault):
    from pytest_gpufleet.probes.links.copying import CudaCopier

    genuine = CudaCopier.seconds

    def seconds(self, *args):
        taken = genuine(self, *args)
        if rank.index == 1:
            rank.kept[copying.ENDS].ways[copies.PAIR][1][-1] ^= 4
        return taken

    CudaCopier.seconds = seconds
"""


@pytest.mark.parametrize(("gpus", "module"), [
    pytest.param("all", ALONE, marks=needs_gpus(4), id="as fast alone as while others copy"),
    pytest.param("2", BOTH_WAYS, marks=over_nvlink, id="nearly as fast while the other direction is busy"),
    pytest.param("2", THROUGH_HOST_MEMORY, id="through host memory if they cannot reach each other"),
])  # fmt: skip
def test_pairs_copy(run_pytest, gpus, module):
    run = run_pytest(f"--gpus={gpus}", "--fleet-dir=runs", files={"test_inner.py": MODULE + module})
    assert set(run.outcomes.values()) == {"passed"}, run.text


def test_a_flipped_bit_is_found_and_its_pair_named(planted):
    run = planted(FLIP, "flip", f"{LINKS}::test_data_crosses_every_pair_unharmed", "--gpus=2")
    message = run.check("test_data_crosses_every_pair_unharmed").message
    assert re.search(r"GPU 1 .* and GPU 0 .*: 1 of 2,097,152 words of 8 bytes are wrong: word 2,097,151 is 0x", message)
    assert not re.search("GPU 0 .* and GPU 1 ", message)


@needs_gpus(3, "of two nobody can tell which one it is")
def test_a_host_link_that_somebody_else_uses_is_named(run_pytest):
    with intruder(COPIES, 1):
        check = f"{LINKS}::test_host_bandwidth_of_each_gpu"
        run = run_pytest(check, "--gpus=all", "--fleet-dir=runs", "-k", "not both")
    for way in ("host to device", "device to host"):
        message = run.check(f"test_host_bandwidth_of_each_gpu[{way}]").message
        assert set(re.findall(r"^  GPU (\d+) ", message, re.MULTILINE)) == {"1"}, run.text

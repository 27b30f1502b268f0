"""Links carry data unharmed and as fast as on a healthy machine: between host and GPU, and between every two GPUs."""

import pytest

from pytest_gpufleet import MiB, not_applicable
from pytest_gpufleet.probes.links.host_copies import ONE_WAY, host_bandwidth
from pytest_gpufleet.probes.links.pairs import pair_bandwidth, pair_latency, wrong_data
from pytest_gpufleet.probes.search.slow_pairs import culprit

BUFFER = 512 * MiB
SMALL_BUFFER = 16 * MiB
REHEARSAL_BUFFER = MiB


@pytest.fixture
def figures(gpu_topology):
    """figures(copied): its measurements; but first its data, since nobody asks how fast a link is that corrupts it."""

    def figures(copied):
        assert_unharmed(copied.wrong, gpu_topology)
        return copied.measurements

    return figures


def assert_unharmed(wrong, topology):
    assert not wrong, "\n".join(f"{topology.identity(place)}: {text}" for place, text in wrong.items())


def buffer(world):
    return BUFFER if world.gpus else REHEARSAL_BUFFER


def needs_two(world):
    if world.size == 1:
        not_applicable("one GPU has no links to others")


def test_data_crosses_every_pair_unharmed(world, gpu_topology):
    """Every GPU reads from every other one exactly what is there

    Each pair copies while all others do. A word that arrives wrong means that a link, a switch or a GPU corrupts data,
    and programs on this machine go wrong silently. Look at the NVLink errors of the two GPUs that are named
    (`nvidia-smi nvlink -e`) and for XIDs in the kernel log; over PCIe suspect IOMMU and ACS settings first.
    """
    needs_two(world)
    assert_unharmed(wrong_data(world, gpu_topology, SMALL_BUFFER if world.gpus else REHEARSAL_BUFFER), gpu_topology)


@pytest.mark.level("standard")
@pytest.mark.figures("host_bandwidth")
@pytest.mark.parametrize("direction", [*ONE_WAY, "both"])
def test_host_bandwidth_of_each_gpu(world, judge, figures, direction):
    """Bandwidth between host memory and each GPU, while the others rest

    Data loading and checkpoints go this way. Low for one GPU: its PCIe link runs at a lower generation or with fewer
    lanes (`nvidia-smi -q -d PCIE` under load), its slot or riser is bad, or somebody else uses the link. Low for half
    of them: their processor socket or its memory. Low for all: BIOS settings, or the IOMMU of a virtual machine.
    """
    judge(*figures(host_bandwidth(world, direction, "one", buffer(world))), required=direction in ONE_WAY)


@pytest.mark.level("standard")
@pytest.mark.figures("host_bandwidth")
@pytest.mark.parametrize("direction", [*ONE_WAY, "both"])
def test_host_bandwidth_of_all_gpus(world, judge, figures, direction):
    """Bandwidth between host memory and each GPU, all at the same time

    GPUs that share a PCIe switch, a socket or the memory of the host get less than alone: how much less belongs to the
    machine and not to the GPU model, and a virtual machine can fall far below. Compare machines of one kind with each
    other: `gpufleet compare`.
    """
    needs_two(world)
    judge(*figures(host_bandwidth(world, direction, "all", buffer(world))), required=False)


@pytest.mark.level("standard")
@pytest.mark.figures("pair_bandwidth")
@pytest.mark.parametrize("direction", ["read", "write", "both"])
def test_pair_bandwidth(world, judge, figures, gpu_topology, direction):
    """Bandwidth between the GPUs of every pair

    Every collective runs at the pace of the slowest link on its way. If the slow pairs have one GPU in common, that GPU
    has lost NVLinks or runs them slowly (`nvidia-smi nvlink -s`): reseat or replace it. All pairs slow: traffic does
    not go over NVLink; look at `nvidia-smi topo -m` and `nvidia-smi topo -p2p r`, and at the fabric manager on machines
    with an NVSwitch.
    """
    needs_two(world)
    measurements = figures(pair_bandwidth(world, gpu_topology, direction, buffer(world)))
    judge(
        *measurements,
        required=direction == "read",  # the one direction for which figures are published
        on_miss=lambda: culprit([each.values for each in measurements], gpu_topology),
    )


@pytest.mark.level("standard")
@pytest.mark.figures("pair_latency")
def test_pair_latency(world, judge, figures, gpu_topology):
    """Time of a small copy between the GPUs of every pair

    Shown, not judged: it tells which pairs are near each other. A pair that takes many times as long as others with the
    same kind of link goes a way that it should not.
    """
    needs_two(world)
    judge(*figures(pair_latency(world, gpu_topology)), required=False)

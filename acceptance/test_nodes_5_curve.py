"""How collectives grow with the number of nodes."""

from __future__ import annotations

import pytest

from pytest_gpufleet import GiB, Judge, KiB, Measurement, MiB, Size, World, bus_bandwidth, measure_all
from pytest_gpufleet.probes import between_nodes
from pytest_gpufleet.probes.collectives.speed import fitting, sweep
from pytest_gpufleet.probes.search.nodes import who_slows_nodes

pytestmark = [
    pytest.mark.chapter("Between nodes: scaling", "Do all nodes together exchange data as fast as they should?"),
    pytest.mark.level("standard"),
    pytest.mark.needs(nodes=2),
]

SIZES = [Size(nbytes, rehearsal=nbytes // (64 * KiB)) for nbytes in (1 * MiB, 16 * MiB, 256 * MiB, 1 * GiB, 8 * GiB)]


@pytest.mark.figures("busbw", required=("busbw",), of="for the largest all_reduce of all nodes")
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_collectives_over_nodes(nccl_group: World, judge: Judge, collective: str) -> None:
    """Bus bandwidth of collectives by number of nodes

    Measured on 1, 2, 4 ... nodes and on all, by size; from some number of nodes on the curves hardly fall. Measurements
    are judged by limits published for such nodes and networks, and the largest all_reduce of all nodes by 70 % of the
    rails of a node. If all nodes are too slow, the first line has the result of the search among pairs and halves. Else
    check routing, congestion control and the algorithm of NCCL (NCCL_DEBUG=INFO).
    """
    sizes = between_nodes.affordable(nccl_group, fitting(nccl_group, collective, SIZES))
    nodes = [some for some in between_nodes.doubling(nccl_group) if some.size > 1]

    def measured() -> list[Measurement]:
        curves = [measure_all(some, sweep, bus_bandwidth, collective, sizes) for some in nodes]
        return [each for curve in curves for each in curve]

    # What the verdict needs of them it asks for by itself (verdict/physical_limits.py, is_required).
    judge(measured, required=False, on_miss=lambda: who_slows_nodes(nccl_group, [], sizes[-1]))

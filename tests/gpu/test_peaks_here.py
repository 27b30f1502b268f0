"""What the driver of this machine tells is enough for physical limits, and is what its data sheet says."""

import pytest

from pytest_gpufleet.machine import local_node
from pytest_gpufleet.verdict import peaks
from tests.boards import BOARDS
from tests.gpu.present import needs_gpus

pytestmark = needs_gpus(1)


def test_peaks_of_this_machine() -> None:
    with local_node.opened() as node:
        gpus = node.topology.gpus
    for gpu in gpus:
        made = [peak(gpu) for peak in (peaks.memory_bandwidth, peaks.host_link, peaks.product_rate, peaks.power_bound)]
        assert all(peak.value > 0 for peak in made)
        if board := BOARDS.get(gpu.name):
            facts = ("cuda_cores", "memory_bus_bits", "memory_clock_max_mhz", "sm_clock_max_mhz")
            assert {name: gpu.get(name) for name in facts} == {name: board.gpu().get(name) for name in facts}
            assert made[0].value == pytest.approx(board.memory, rel=0.03)

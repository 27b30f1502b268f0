"""What the driver of real GPUs tells of their health, and for physical limits. Skipped without them."""

import pytest

from pytest_gpufleet.machine import local_node
from pytest_gpufleet.machine.gpu_facts import COUNTERS, SLOW_COUNTERS
from pytest_gpufleet.model.gpu import Missing
from pytest_gpufleet.verdict import peaks
from tests.boards import BOARDS
from tests.gpu.present import GPUS, needs_gpus

pytestmark = needs_gpus(1)

CLOCKS = """
from pytest_gpufleet.probes.memory import clocks_under_load
from pytest_gpufleet.machine.health import held_clocks

def test_clocks(world, machine):
    for gpu, seen in zip(machine.gpus, world.run(clocks_under_load), strict=True):
        print("CLOCKS", seen, gpu["sm_clock_max_mhz"], gpu["memory_clock_max_mhz"])
        assert held_clocks(gpu, seen) == []
        locked = seen._replace(sm=int(0.7 * gpu["sm_clock_max_mhz"]), reasons=0)
        assert [fault.name for fault in held_clocks(gpu, locked)] == ["clocks_pinned"]
"""

# Rank 0 meets an assertion in a kernel, by which the driver ends its process: XID 43.
ENDED = """
def assertion(rank):
    import torch

    if rank.index == 0:
        numbers = torch.ones(8, device=rank.device)
        numbers[torch.full((1,), 1 << 20, device=rank.device)].sum().item()

def test_is_ended(world):
    world.run(assertion)

def test_that_follows(world):
    world.run(lambda rank: rank.index)
"""


def test_every_counter_can_be_read_or_is_not_there():
    with local_node.opened(environment={}) as node:
        told = node.facts((*COUNTERS, *SLOW_COUNTERS))
    for gpu in told:
        silent = {name: gpu[name] for name in (*COUNTERS, *SLOW_COUNTERS) if isinstance(gpu[name], Missing)}
        print(gpu.index, {name: gpu[name] for name in (*COUNTERS, "spare_rows", "ecc_corrected")}, silent)
        assert not any(not value.absent for value in silent.values()), silent
        assert all(nanoseconds >= 0 for nanoseconds in gpu["slowdown_ns"].values())


def test_lanes_by_the_system_are_those_of_nvml():
    for gpu in GPUS:
        able = gpu.get("pcie_width_able")
        assert able is None or able["gpu"] >= gpu["pcie_width_max"], gpu.identity


def test_clocks_reach_their_maximum_and_locked_ones_would_show(run_pytest):
    run = run_pytest("--gpus=all", "--fleet-dir=runs", "-s", files={"test_inner.py": CLOCKS})
    assert run.check("test_clocks").outcome == "passed", run.text


def test_what_an_ended_process_leaves_behind_speaks_against_no_gpu(run_pytest):
    run = run_pytest("--gpus=all", "--fleet-dir=runs", files={"test_inner.py": ENDED})
    assert run.check("test_is_ended").outcome == "failed", run.text
    assert run.check("test_that_follows").outcome == "passed", run.text
    codes = {fault.name for fault in run.record.faults}
    assert "rank_raised" in codes or "rank_died" in codes
    assert not any(code.startswith("xid_") and code != "xid_of_process" for code in codes), codes


def test_peaks_of_this_machine():
    for gpu in GPUS:
        made = [peak(gpu) for peak in (peaks.memory_bandwidth, peaks.host_link, peaks.product_rate, peaks.power_bound)]
        assert all(peak.value > 0 for peak in made)
        if board := BOARDS.get(gpu.name):
            facts = ("cuda_cores", "memory_bus_bits", "memory_clock_max_mhz", "sm_clock_max_mhz")
            assert {name: gpu.get(name) for name in facts} == {name: board.gpu().get(name) for name in facts}
            assert made[0].value == pytest.approx(board.memory, rel=0.03)

"""Load that lasts, and what it and the whole run have left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from pytest_gpufleet import Fault, Gpu, Judge, LiveMachine, Measurement, World, expect_none, not_applicable
from pytest_gpufleet.machine import health, memory, network_ports
from pytest_gpufleet.plugin import assertions

Rule = Callable[[Gpu, Gpu, float], Iterable[Fault]]

pytestmark = pytest.mark.chapter("Endurance", "Did the machine stay sound and fast under load?")


@pytest.mark.level("burnin")
@pytest.mark.figures(
    "burn_retention", "burn_power", "gemm", "corruption_bound", required=("burn_power", "burn_retention")
)
def test_burn_in(nccl_group: World, burn_in: Callable[[World], list[Measurement]], judge: Judge) -> None:
    """Burn-in: full load without errors or slowdown

    Matmuls, reductions, memory patterns and ResNet-50 training take turns for as long as was asked for. Every result is
    compared bit for bit, and the first fault ends the check and names its GPU. A wrong bit: replace that GPU. Slower or
    too hot: check cooling and power supply. Power far below the limit: the load proved nothing; check for a lowered
    power limit or a busy host.
    """
    matmuls, bound, *rest = burn_in(nccl_group)
    judge(*rest, shown=[matmuls, bound])


@pytest.mark.level("burnin")
@pytest.mark.figures(
    "step_power", "power_swing", "step_skew", "step_retention", required=("step_power", "step_skew", "step_retention")
)
def test_power_steps(world: World, power_steps: Callable[[World], list[Measurement]], judge: Judge) -> None:
    """Power steps: idle to full load and back, 0.1 to 10 Hz

    Training loads a machine this way: all GPUs compute, then all wait. Such steps trip power supplies and regulators
    that carry a steady load for days. A power brake, or GPUs that fall off the bus: check power supplies, cables and
    the power of the rack (`ipmitool sel elist`). Power far below the limit, or GPUs that do not step together: check
    for a lowered power limit or a busy host.
    """
    figures = {figure.metric: figure for figure in power_steps(world)}
    swing = figures.pop("power_swing", None)
    judge(*figures.values(), shown=[swing] if swing else [])


@pytest.mark.at_the_end
@pytest.mark.needs(gpus=True)
def test_nvlinks_stayed_clean(machine: LiveMachine) -> None:
    """NVLink errors during the run

    Replays, recoveries and flit errors must not grow, and CRC errors by less than 100 a second: links correct single
    errors in data themselves. A link that retrains loses speed now and fails later. `nvidia-smi nvlink -e` shows the
    counters. Reset the named GPU; if errors come back, the GPU or the switch board is bad.
    """
    expect_clean(machine, "nvlink_errors", health.link_errors)


@pytest.mark.at_the_end
@pytest.mark.needs(gpus=True)
def test_pcie_links_stayed_clean(machine: LiveMachine) -> None:
    """PCIe replays during the run

    How many replays a minute are healthy depends on generation and lanes. Around every check the rate is judged too; a
    few in each of many short checks show only in the sum of the run. `nvidia-smi -q` shows the counter ("Replays Since
    Reset"). Reseat the named GPU, its riser or cable, then try another slot: replays stay with what is bad.
    """
    expect_clean(machine, "pcie_replays", health.pcie_errors)


@pytest.mark.at_the_end
@pytest.mark.needs(gpus=True)
def test_memory_errors_stayed_rare(machine: LiveMachine) -> None:
    """Corrected GPU memory errors during the run

    A corrected error harms no result, and a few are normal. Very many, or several remapped rows within one run, come
    before errors that cannot be corrected. `nvidia-smi -q -d ECC,ROW_REMAPPER` shows the counters. Reset the named GPU
    and run again; if they come back, replace it.
    """
    expect_clean(machine, "ecc_corrected", health.corrected_errors)
    expect_clean(machine, "remapped_rows", health.corrected_rows)


@pytest.mark.at_the_end
@pytest.mark.needs(gpus=True)
def test_network_ports_stayed_clean(machine: LiveMachine) -> None:
    """Network port errors during the run

    No port in use may go down or count more errors than a healthy one. A link with errors while it is hardly used fails
    under load. Check cable, transceiver and switch port of the named one: `ibstat`, `perfquery`, `mlxlink`.
    """
    before = assertions.ports_in_use(machine)
    if not any(port.errors for port in network_ports.active(before)):
        not_applicable("no active network port counts errors, as where a virtual machine hides them")
    now = assertions.of_host(machine.now, network_ports.NETWORK_PORTS, read_before=True)
    expect_none(network_ports.port_errors(before, now, machine.seconds_ago))


@pytest.mark.at_the_end
@pytest.mark.needs(gpus=True)
def test_host_memory_errors_stayed_rare(machine: LiveMachine) -> None:
    """Host memory errors during the run

    No uncorrected error may appear, and no module may have many that were corrected. A module with errors under load
    has none when the run begins. Reseat the named one, and replace it if they come back: `edac-util -v`, `ras-mc-ctl
    --error-count`.
    """
    before = assertions.of_host(machine.host.get, memory.MEMORY_ERRORS)
    now = assertions.of_host(machine.now, memory.MEMORY_ERRORS, read_before=True)
    expect_none(memory.errors_grown(before, now, machine.seconds_ago))


def expect_clean(machine: LiveMachine, counter: str, rule: Rule) -> None:
    """No GPU's counter has grown by more than the rule allows since the beginning of the run."""
    assertions.require_any(machine.gpus, counter)
    readings = zip(machine.gpus, machine.now(counter), strict=True)
    then_and_now = [(gpu, replace(gpu, facts={**gpu.facts, counter: value})) for gpu, value in readings]
    expect_none(
        fault
        for before, now in then_and_now
        for fault in health.unreadable(now, [counter], also_absent=True)
        or health.unreadable(before, [counter], also_absent=True)
        or rule(before, now, machine.seconds_ago)
    )

"""Load that lasts, and what it and the whole run have left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from pytest_gpufleet import Fault, Gpu, Judge, LiveMachine, Measurement, World, expect_none, not_applicable
from pytest_gpufleet.machine import memory
from pytest_gpufleet.plugin import assertions
from pytest_gpufleet.verdict import health_rules, link_rules, port_rules
from pytest_gpufleet.verdict.host_rules import part_rules

Rule = Callable[[Gpu, Any, float], Iterable[Fault]]

pytestmark = pytest.mark.chapter("Endurance", "Did the machine stay sound and fast under load?")


@pytest.mark.level("burnin")
@pytest.mark.figures("burn_retention", "burn_power", "gemm", required=("burn_power", "burn_retention"))
def test_burn_in(nccl_group: World, burn_in: Callable[[World], list[Measurement]], judge: Judge) -> None:
    """All GPUs work at full load for as long as was asked for, without a wrong bit, a fault or a slowdown

    Matrix products on the tensor cores, reductions over all GPUs, patterns in all free memory and ResNet-50 training
    take turns. Every result is compared with the first, bit for bit, and the health of all GPUs is read after every
    turn; the first fault ends the test and names its GPU. A wrong bit: replace that GPU. A GPU that becomes slower or
    too hot: look at its cooling (fans, cold plate, thermal paste, blocked air) and at its power supply. Power that
    never comes near the limit: the load was too light to prove anything; look for a lowered power limit or a busy host.
    """
    products, *rest = burn_in(nccl_group)
    judge(*rest, shown=[products])


@pytest.mark.level("burnin")
@pytest.mark.figures(
    "step_power", "power_swing", "step_skew", "step_retention", required=("step_power", "step_skew", "step_retention")
)
def test_power_steps(world: World, power_steps: Callable[[World], list[Measurement]], judge: Judge) -> None:
    """All GPUs go from idle to full load and back together, at 0.1 to 10 Hz for a minute, and none falls or slows down

    Training loads a machine so: all GPUs compute, then all wait for each other. Such steps trip power supplies and
    regulators that carry a steady load for days. Every product is compared with the first, bit for bit, and health is
    read all the time; the first fault ends it. A power brake, a GPU that falls off the bus or several at once: look at
    power supplies, their cables and the rack's power (`ipmitool sel elist`). Power that never comes near the limit, or
    GPUs that do not step together, have tested nothing: look for a lowered power limit, or for a busy host.
    """
    figures = {figure.metric: figure for figure in power_steps(world)}
    swing = figures.pop("power_swing", None)
    judge(*figures.values(), shown=[swing] if swing else [])


@pytest.mark.at_the_end
@pytest.mark.needs(gpus=True)
def test_nvlinks_stayed_clean(machine: LiveMachine) -> None:
    """No NVLink had replays, recoveries, flit errors or a flood of CRC errors while this run used it

    Links correct single errors in data themselves, and only 100 a second are a flood. A link that has to send flits
    again or to retrain loses speed now and goes down later: of replays, recoveries and flit errors one is too many.
    `nvidia-smi nvlink -e` shows the counters. Reset the GPU that is named; if it comes back, the GPU or the switch
    board is bad.
    """
    expect_clean(machine, "nvlink_errors", link_rules.link_errors)


@pytest.mark.at_the_end
@pytest.mark.needs(gpus=True)
def test_pcie_links_stayed_clean(machine: LiveMachine) -> None:
    """No PCIe link of a GPU had more replays than a healthy one while this run used it

    What arrives damaged is sent again: that is a replay. How many a minute are healthy depends on generation and number
    of lanes. Around every check this rate is judged too, but a few in each of many short checks only show in the sum of
    the whole run. `nvidia-smi -q` shows the counter ("Replays Since Reset"). Reseat the GPU that is named, and its
    riser or cable; if replays come back, try it in another slot: they stay with the GPU or with the slot that is bad.
    """
    expect_clean(machine, "pcie_replays", link_rules.pcie_errors)


@pytest.mark.at_the_end
@pytest.mark.needs(gpus=True)
def test_memory_errors_stayed_rare(machine: LiveMachine) -> None:
    """Memory errors that were corrected stayed rare while this run used all memory

    A corrected error harms no result, and a few are normal. Very many of them, or several rows that had to be remapped
    for them within one run, come before errors that nobody can correct. `nvidia-smi -q -d ECC,ROW_REMAPPER` shows the
    counters. Reset the GPU that is named and run again; if they come back, replace it.
    """
    expect_clean(machine, "ecc_corrected", health_rules.corrected_errors)
    expect_clean(machine, "remapped_rows", health_rules.corrected_rows)


@pytest.mark.at_the_end
@pytest.mark.needs(gpus=True)
def test_network_ports_stayed_clean(machine: LiveMachine) -> None:
    """No network port in use went down or counted more errors than a healthy one while this run lasted

    A link that goes down or has errors although it is hardly used fails under load. Look at cable, transceiver and
    switch port of the one that is named: `ibstat`, `perfquery`, `mlxlink`.
    """
    before = assertions.ports_in_use(machine)
    in_use = [port for port in before if "ACTIVE" in port["state"]]
    if not any(port.get("errors") for port in in_use):
        not_applicable("no active network port counts errors, as where a virtual machine hides them")
    expect_none(port_rules.port_errors(before, machine.now("network_ports") or (), machine.seconds_ago))


@pytest.mark.at_the_end
@pytest.mark.needs(gpus=True)
def test_host_memory_errors_stayed_rare(machine: LiveMachine) -> None:
    """The host's memory had no uncorrected errors while this run used it, and no module many that were corrected

    A module that has errors under load only has none when the run begins. Reseat the one that is named, and replace it
    if they come back: `edac-util -v`, `ras-mc-ctl --error-count`.
    """
    before = assertions.of_host(machine.host.get, memory.MEMORY_ERRORS)
    now = assertions.of_host(machine.now, memory.MEMORY_ERRORS, read_before=True)
    expect_none(part_rules.memory_errors_grown(before, now, machine.seconds_ago))


def expect_clean(machine: LiveMachine, counter: str, rule: Rule) -> None:
    """No GPU's counter has grown by more than the rule allows since the beginning of the run."""
    assertions.require_any(machine.gpus, counter)
    readings = zip(machine.gpus, machine.now(counter), strict=True)
    expect_none(fault for before, now in readings for fault in rule(before, now, machine.seconds_ago))

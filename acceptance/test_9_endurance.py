"""Load that lasts, and what it and the whole run have left behind."""

import pytest

from pytest_gpufleet import Faults, not_applicable
from pytest_gpufleet.model.facts import Unavailable
from pytest_gpufleet.verdict.blind import require_told
from pytest_gpufleet.verdict.health_rules import link_errors, pcie_errors


@pytest.mark.level("burnin")
@pytest.mark.figures("burn_retention", "burn_peak_power", "gemm")
def test_burn_in(nccl_group, burn_in, judge):
    """All GPUs work at full load for as long as was asked for, without a wrong bit, a fault or a slowdown

    Matrix products on the tensor cores, reductions over all GPUs, patterns in all free memory and ResNet-50 training
    take turns. Every result is compared with the first, bit for bit, and the health of all GPUs is read after every
    turn; the first fault ends the test and names its GPU. A wrong bit: replace that GPU. A GPU that becomes slower or
    too hot: look at its cooling (fans, cold plate, thermal paste, blocked air) and at its power supply. Power that
    never comes near the limit: the load was too light to prove anything; look for a lowered power limit or a busy host.
    """
    products, *rest = burn_in(nccl_group)
    judge(*rest, shown=[products])


@pytest.mark.at_the_end
def test_nvlinks_stayed_clean(machine, machine_now):
    """No NVLink had replays, recoveries, flit errors or a flood of CRC errors while this run used it

    Links correct single errors in data themselves, and only 100 a second are a flood. A link that has to send flits
    again or to retrain loses speed now and goes down later: of replays, recoveries and flit errors one is too many.
    `nvidia-smi nvlink -e` shows the counters. Reset the GPU that is named; if it comes back, the GPU or the switch
    board is bad.
    """
    require_told(machine.gpus, "nvlink_errors")
    begun = [gpu["nvlink_errors"] for gpu in machine.gpus]
    if all(isinstance(counts, Unavailable) and not counts.applicable for counts in begun):
        not_applicable("NVML counts no NVLink errors here")
    problems = [
        problem
        for before, now in zip(machine.gpus, machine_now("nvlink_errors"), strict=True)
        for problem in link_errors(before, now, machine.seconds_ago)
    ]
    if problems:
        raise Faults(problems)


@pytest.mark.at_the_end
def test_pcie_links_stayed_clean(machine, machine_now):
    """No PCIe link of a GPU had more replays than a healthy one while this run used it

    What arrives damaged is sent again: that is a replay. How many a minute are healthy depends on generation and number
    of lanes. Around every check this rate is judged too, but a few in each of many short checks only show in the sum of
    the whole run. `nvidia-smi -q` shows the counter ("Replays Since Reset"). Reseat the GPU that is named, and its
    riser or cable; if replays come back, try it in another slot: they stay with the GPU or with the slot that is bad.
    """
    require_told(machine.gpus, "pcie_replays")
    begun = [gpu["pcie_replays"] for gpu in machine.gpus]
    if all(isinstance(count, Unavailable) and not count.applicable for count in begun):
        not_applicable("NVML counts no PCIe replays here")
    problems = [
        problem
        for before, now in zip(machine.gpus, machine_now("pcie_replays"), strict=True)
        for problem in pcie_errors(before, now, machine.seconds_ago)
    ]
    if problems:
        raise Faults(problems)

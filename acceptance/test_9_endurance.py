"""Load that lasts, and what it and the whole run have left behind."""

import pytest

from pytest_gpufleet import not_applicable
from pytest_gpufleet.hardware.facts import Unavailable
from pytest_gpufleet.verdict.health import link_errors


@pytest.mark.level("burnin")
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
    """No NVLink had replays, recoveries or a flood of CRC errors while this run used it

    Links correct single errors themselves; a link that has to repeat or retrain loses speed now and goes down later.
    `nvidia-smi nvlink -e` shows the counters. Reset the GPU that is named; if it comes back, the GPU or the switch
    board is bad.
    """
    begun = [gpu["nvlink_errors"] for gpu in machine.gpus]
    if all(isinstance(counts, Unavailable) and not counts.applicable for counts in begun):
        not_applicable("NVML counts no NVLink errors here")
    problems = [
        problem
        for before, now in zip(machine.gpus, machine_now("nvlink_errors"), strict=True)
        for problem in link_errors(before, now, machine.seconds_ago)
    ]
    assert not problems, "\n".join(problems)

"""What the load of this run has left behind."""

from pytest_gpufleet import not_applicable
from pytest_gpufleet.verdict.health import link_errors


def test_nvlinks_stayed_clean(machine, machine_now):
    """No NVLink had replays, recoveries or a flood of CRC errors while this run used it

    Links correct single errors themselves; a link that has to repeat or retrain loses speed now and goes down later.
    `nvidia-smi nvlink -e` shows the counters. Reset the GPU that is named; if it comes back, the GPU or the switch
    board is bad.
    """
    pairs = [
        (before, now)
        for before, now in zip(machine.gpus, machine_now("nvlink_errors"), strict=True)
        if isinstance(before["nvlink_errors"], dict) and isinstance(now, dict)
    ]
    if not pairs:
        not_applicable("NVML counts no NVLink errors here")
    problems = [problem for before, now in pairs for problem in link_errors(before, now, machine.seconds_ago)]
    assert not problems, "\n".join(problems)

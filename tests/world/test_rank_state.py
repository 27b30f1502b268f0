"""What a test changes on a rank is gone when the next one comes; the suite gets ranks that no other test has used."""

import os
import random
import signal
import sys

import pytest
import torch

from tests import edited_evidence
from tests.conftest import ACCEPTANCE


def flags():
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    half = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    return cudnn.enabled, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32, half


def change_flags():
    torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark = False, True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = False, True


def change_environment():
    os.environ["LEFT"] = "1"
    del os.environ["RANK"]


def change_output():
    with open("kept", "w") as kept:
        os.dup2(kept.fileno(), 1)
    os.unlink("kept")
    os.close(2)


def change_streams():
    sys.stdout.close()
    sys.stderr = None


# How each is read, and changed.
STATE = {
    "environment": (lambda: sorted(os.environ.items()), change_environment),
    "output": (lambda: [os.path.realpath(f"/proc/self/fd/{number}") for number in (1, 2)], change_output),
    "streams": (lambda: [each is None or each.closed for each in (sys.stdout, sys.stderr)], change_streams),
    "modules": (lambda: list(sys.path), lambda: setattr(sys, "path", ["left"])),
    "threads": (torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
    "anomaly": (torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True)),
    "affinity": (lambda: os.sched_getaffinity(0), lambda: os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})),
    "signals": (
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
    ),
    "grad": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "deterministic": (torch.are_deterministic_algorithms_enabled, lambda: torch.use_deterministic_algorithms(True)),
    "flags": (flags, change_flags),
    "precision": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("medium")),
    "random": (random.getstate, lambda: random.seed(4711)),
    "torch's random": (torch.random.initial_seed, lambda: torch.manual_seed(7)),
    "dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "device": (torch.get_default_device, lambda: torch.set_default_device("meta")),
    "folder": (lambda: os.readlink("/proc/self/cwd"), lambda: None),
}


def snapshot(rank):
    return {**{name: read() for name, (read, _) in STATE.items()}, "kept": sorted(rank.kept)}


def change(rank, folders):
    rank.kept["left"] = torch.zeros(1)
    os.chdir(folders[rank.index])
    for _, change in STATE.values():
        change()
    os.rmdir(folders[rank.index])


def numbers(rank):
    return torch.rand(3).tolist(), random.random()


def test_cheap_state_is_put_back_between_tests_and_kept_within_one(two_ranks, tmp_path_factory):
    before = two_ranks.run(snapshot)
    two_ranks.run(change, [str(tmp_path_factory.mktemp("gone")) for _ in before])
    for then, now in zip(before, two_ranks.run(snapshot), strict=True):
        assert [name for name in then if then[name] == now[name]] == []
    two_ranks._pool.begin_test()
    for then, now in zip(before, two_ranks.run(snapshot), strict=True):
        assert [name for name in then if then[name] != now[name]] == []
    two_ranks._pool.begin_test()
    drawn = two_ranks.run(numbers)
    assert two_ranks.run(numbers) != drawn
    two_ranks._pool.begin_test()
    assert two_ranks.run(numbers) == drawn


def change_precision(rank):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="came with torch 2.9")
def test_precision_by_operation_is_put_back(two_ranks):
    """Torch's other interface: what was changed by it cannot be read by the one above."""
    (before, _), _ = two_ranks.run(snapshot), two_ranks.run(change_precision)
    two_ranks._pool.begin_test()
    assert two_ranks.run(snapshot)[0]["flags"] == before["flags"]


OWN = """
import os

{changed}

def test_own(request):
    world = request.getfixturevalue("world")
    assert world.run(lambda rank: os.environ.get("NCCL_ALGO")) == [{seen!r}] * 2
"""


def test_the_suite_gets_ranks_that_no_other_test_has_used(run_pytest):
    first = OWN.format(changed="os.environ['NCCL_ALGO'] = 'Ring'", seen="Ring")
    last = OWN.format(changed="", seen=None)  # on the ranks of the suite
    check = f"{ACCEPTANCE / 'test_4_each_gpu.py'}::test_matrix_product_is_exact"
    given = ("first.py", f"{check}[fp32]", f"{check}[bf16]", "last.py", "--rehearse=2", "--fleet-dir=runs")
    run = run_pytest(*given, files={"first.py": first, "last.py": last})
    assert run.status == 0, run.text
    events = edited_evidence.events(run.folders[0] / "evidence.jsonl")
    happened = [
        event["check"]["id"].rpartition("::")[2] if event["event"] == "check_finished" else "started"
        for event in events
        if event["event"] in ("world_started", "check_finished")
    ]
    exact = "test_matrix_product_is_exact"
    assert happened == ["started", "test_own", "started", f"{exact}[fp32]", f"{exact}[bf16]", "test_own"]

"""The checks of training on real GPUs, with and without faults. Skipped without them."""

import os
import re

import pytest

from tests.acceptance.test_training_faults import CASES, TRAINING, run_with_faults, words_of
from tests.gpu.present import COUNT, needs_gpus

# What this process was told of its GPUs holds for the runs too.
GIVEN = {name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "NCCL_"))}

pytestmark = needs_gpus(1)


def test_healthy_gpus_pass(run_pytest):
    run = run_pytest(TRAINING, "--gpus=all", "--fleet-dir=runs", **GIVEN)
    assert set(run.outcomes.values()) <= {"passed", "not applicable"}, run.text
    assert run.outcomes["test_ddp_and_fsdp_train_as_one_gpu[torch.float32]"] == "passed"


@pytest.fixture(scope="module")
def broken(run_pytest):
    if COUNT < 2:
        pytest.skip("needs 2 GPUs")
    return run_with_faults(run_pytest, "--gpus=all", **GIVEN)


@pytest.mark.parametrize(("check", "fault", "named", "words"), CASES)
def test_every_check_fails_for_its_fault(broken, check, fault, named, words):
    message = broken.check(f"{check}[{fault}]").message
    assert words_of(words, COUNT) in message
    if named == {1} and COUNT > 2:  # of two nobody can tell which one it is
        assert set(re.findall(r"rank \d of \d, (GPU \d).*: raised", message)) == {"GPU 1"}


def test_a_loss_that_is_no_number_is_no_throughput(broken):
    message = broken.check("test_each_gpu_alone[NaN]").message
    assert re.search(r"rank 1 of \d, GPU 1 .*: raised FloatingPointError: the loss became nan", message)

"""The checks of training on real GPUs, with faults: apart from tests whose process has the GPUs."""

import os
import re

import pytest

from tests.acceptance.test_training_faults import CASES, run_with_faults, words_of
from tests.gpu.present import COUNT, needs_gpus

pytestmark = needs_gpus(2)

# What this process was told of its GPUs holds for the runs too.
GIVEN = {name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "NCCL_"))}


@pytest.fixture(scope="module")
def broken(run_pytest):
    return run_with_faults(run_pytest, "--gpus=all", **GIVEN)


@pytest.mark.parametrize(("check", "fault", "named", "words"), CASES)
def test_every_check_fails_for_its_fault(broken, check, fault, named, words):
    message = broken.check(f"{check}[{fault}]").message
    assert words_of(words, COUNT) in message
    if named == {1} and COUNT > 2:  # of two nobody can tell which one it is
        assert set(re.findall(r"rank \d of \d, (GPU \d).*: raised", message)) == {"GPU 1"}

"""The checks of each GPU on real GPUs, sound ones and ones made faulty. Skipped without them."""

import re
from pathlib import Path

import pytest

from tests.gpu.intruder import MULTIPLIES, intruder
from tests.gpu.present import COUNT, needs_gpus
from tests.probes import test_compute, test_memory

EACH_GPU = Path(__file__).parents[2] / "acceptance" / "test_4_each_gpu.py"
REPEAT = test_compute.REPEAT
HOLDS = test_memory.HOLDS

pytestmark = needs_gpus(2)


@pytest.fixture
def on_gpus(run_pytest):
    def run(*checks, fault=None, **environment):
        nodes = [f"{EACH_GPU}::{check}" for check in checks] or [EACH_GPU]
        options = ["--gpus=all", "--fleet-dir=runs", *(["-p", "faulty"] if fault else [])]
        return run_pytest(*nodes, *options, files={"faulty.py": fault or ""}, PYTHONPATH=".", **environment)

    return run


def test_healthy_gpus_pass(on_gpus):
    run = on_gpus()
    assert set(run.outcomes.values()) <= {"passed", "not applicable"}, run.text
    assert run.outcomes["test_matrix_product_is_fast[fp16]"] == "passed"  # every GPU has fp16


@pytest.mark.parametrize(
    ("fault", "precision", "words"),
    [
        ("one bit", "bf16", "product 7, row 5, column 9 is 0x"),
        ("one bit", "fp32", "wrong elements: 1, in 1 of "),
        ("one NaN", "fp16", "product 7, row 5, column 9 is 0x7e00, expected 0x"),
        ("always NaN", "bf16", "NaN or infinite elements in the first product: 1"),
        ("always bit", "fp16", "1 row (the first is 5) and 1 column (the first is 9) differ"),
    ],
)
def test_a_wrong_element_is_found_and_the_gpu_named(on_gpus, fault, precision, words):
    check = f"{REPEAT}[{precision}]"
    message = on_gpus(check, fault=test_compute.FAULT, FAULT=fault).check(check).message
    assert re.search(rf"^.*rank 1 of {COUNT}, GPU 1 .*, serial .*{re.escape(words)}", message, re.MULTILINE), message
    assert f"rank 0 of {COUNT}" not in message


def test_a_flipped_bit_in_memory_is_found_and_the_gpu_named(on_gpus):
    run = on_gpus(HOLDS, fault=test_memory.FAULT, COMPARISON="1000", BIT="37")
    message = run.check(HOLDS).message
    assert re.search(rf"rank 1 of {COUNT}, GPU 1 .*wrong words in memory: 1; .*wrong bits 0x0000002000000000", message)
    assert f"rank 0 of {COUNT}" not in message


@needs_gpus(4, "peers are compared from three on")
def test_a_gpu_that_somebody_else_uses_is_named(on_gpus):
    check = "test_matrix_product_is_fast[bf16]"
    with intruder(MULTIPLIES, 2):
        message = on_gpus(check).check(check).message
    assert re.search(r"GPU 2 .*worse than its peers", message), message
    assert not re.search(r"GPU [013] .*worse than the median", message), message

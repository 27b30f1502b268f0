"""The checks of each GPU on real GPUs, sound ones and ones made faulty. Skipped without them."""

import re
from collections import defaultdict

import pytest

from pytest_gpufleet.model.place import gpu
from pytest_gpufleet.probes.compute import rate
from tests.conftest import ACCEPTANCE
from tests.gpu.present import COUNT, MULTIPLIES, intruder, needs_gpus
from tests.probes import test_compute, test_memory

EACH_GPU = ACCEPTANCE / "test_4_each_gpu.py"

pytestmark = needs_gpus(2)


def test_healthy_gpus_pass_in_a_minute_of_soak(run_pytest):
    """Each turn is done once. Products have their parts and the state of their GPU, and GPUs are nearly alike."""
    healthy = run_pytest(EACH_GPU, "--gpus=all", "--fleet-dir=runs")
    assert set(healthy.outcomes.values()) <= {"passed", "not applicable"}, healthy.text
    assert healthy.outcomes["test_matrix_product_is_fast[fp16]"] == "passed"  # every GPU has fp16
    seconds = {name: healthy.check(name).seconds for name in healthy.outcomes}
    assert 60 <= seconds.pop("test_soak") < 75
    products = {name: each for name, each in seconds.items() if "products_repeat" in name or "is_fast" in name}
    assert max(products.values()) < 2, products
    figures = defaultdict(list)
    for finding in healthy.record.findings:
        figures[finding.measurement.metric].append(finding.measurement)
    for each in figures["gemm"] + figures["memory_bandwidth"]:
        for state in each.gpu_states.values():
            assert 30 < state.temperature_c < 95
            assert 300 < state.sm_clock_mhz < 4000
            assert state.power_watts > 30
        assert len(each.gpu_states) == COUNT
    for product in figures["gemm"]:
        assert {len(samples) for samples in product.samples.values()} == {rate.PARTS}
        assert max(product.spread.values()) < 0.05
    soak = [each for name in ("power", "temperature", "clock") for each in figures[f"soak_{name}"]]
    assert [len(each.values) for each in soak] == [COUNT] * 3
    (relative,) = figures["gemm_relative"]
    assert min(relative.values.values()) > 0.92
    assert max(relative.values.values()) <= 1


@pytest.mark.parametrize(("fault", "precision", "words"), [
    ("one bit", "bf16", "round 0, matmul 3, row 5, column 9 is 0x"),
    ("one bit", "fp32", "wrong elements: 1, in "),
    ("one NaN", "fp16", "round 0, matmul 3, row 5, column 9 is 0x7e00, expected 0x"),
    ("always NaN", "bf16", "NaN or infinite elements: 1"),
    ("always bit", "fp16", "so it is again, in 1 row and 1 column: row 5, column 9 is 0x"),
])  # fmt: skip
def test_a_wrong_element_is_found_and_the_gpu_named(planted, fault, precision, words):
    check = f"{EACH_GPU}::{test_compute.REPEAT}[{precision}]"
    faults = planted(test_compute.FAULT, fault, check, "--gpus=all").record.faults
    both = COUNT == 2 and fault.startswith("always")  # of two that differ nobody can say which one is right
    assert {each.subjects for each in faults} == ({(gpu(0),), (gpu(1),)} if both else {(gpu(1),)}), faults
    assert any(words in each.what for each in faults), faults


def test_a_flipped_bit_in_memory_is_found_and_the_gpu_named(planted):
    (fault,) = planted(test_memory.FAULT, "1000 37", f"{EACH_GPU}::{test_memory.HOLDS}", "--gpus=all").record.faults
    assert (fault.name, fault.subjects) == ("memory_data_error", (gpu(1),))
    assert re.search(r"wrong words in memory: 1; .*wrong bits 0x0000002000000000", fault.what), fault


@needs_gpus(4, "so that three are not the intruder's")
def test_a_gpu_that_somebody_else_uses_is_named(run_pytest):
    with intruder(MULTIPLIES, 2):
        run = run_pytest(f"{EACH_GPU}::test_matrix_product_is_fast[bf16]", "--gpus=all", "--fleet-dir=runs")
    slower = [place for finding in run.record.findings for place in finding.slower_than_peers or ()]
    assert set(slower) == {gpu(2)}, run.text

"""Collectives on real GPUs, sound ones and ones made slow or wrong on purpose. Skipped without them."""

import os
import re
from pathlib import Path

import pytest

from tests.acceptance.test_acceptance import FAULT
from tests.gpu.intruder import MULTIPLIES, intruder
from tests.gpu.present import COUNT, GPUS, needs_gpus

ACCEPTANCE = Path(__file__).parents[2] / "acceptance"
EXACT, SPEED = ACCEPTANCE / "test_3_exactness.py", ACCEPTANCE / "test_6_collectives.py"
ALL_REDUCE = "test_bus_bandwidth[all_reduce-64MiB]"

pytestmark = needs_gpus(2)
of_three = needs_gpus(3, "of two nobody can tell which one it is")

# A limit that H200s meet, and those slowed down here do not.
PROFILE = f"""
name = "test"
match = {sorted({gpu.name for gpu in GPUS})}

[[limit]]
metric = "busbw"
min = 150
unit = "GB/s"
grade = "project"
source = "a test"
when = {{ collective = "all_reduce", bytes = "64 MiB" }}
"""

# One rank sleeps before each launch.
LATE = """
import pytest

def plant(rank):
    import time
    import torch.distributed as dist

    genuine = dist.all_reduce

    def all_reduce(*args, **kwargs):
        time.sleep(0.001)
        return genuine(*args, **kwargs)

    if rank.index == 1:
        dist.all_reduce = all_reduce

@pytest.fixture(autouse=True, scope="session")
def late(nccl_group):
    nccl_group.run(plant)
"""

SEARCH = """
from pytest_gpufleet import MiB
from pytest_gpufleet.probes.search import slow_collective

def test_search(nccl_group, gpu_topology):
    print("FOUND", slow_collective.who_is_slow(nccl_group, gpu_topology, "all_reduce", 64 * MiB))
"""


@pytest.fixture
def on_gpus(run_pytest):
    """Run checks on all GPUs, with the NCCL variables of this machine: some of them need NCCL_NVLS_ENABLE=0."""
    own = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}

    def run(*arguments, files=None, **environment):
        files = {"profile.toml": PROFILE, **(files or {})}
        return run_pytest(
            *arguments, "--gpus=all", "--fleet-dir=runs", files=files, PYTHONPATH=".", **own, **environment
        )

    return run


def test_healthy_gpus_deliver_exactly(on_gpus):
    run = on_gpus(EXACT)
    assert set(run.outcomes.values()) <= {"passed", "not applicable"}, run.text
    exact = {name: outcome for name, outcome in run.outcomes.items() if name.startswith("test_collective_is_exact")}
    assert set(exact.values()) == {"passed"}  # NCCL has every operation


def test_healthy_gpus_are_fast_and_steady(on_gpus):
    run = on_gpus(SPEED, "--fleet-profile=profile.toml")
    assert set(run.outcomes.values()) <= {"passed", "not applicable"}, run.text
    spreads = {
        f"{one.measurement.metric} {one.measurement.conditions}": spread
        for one in run.record.findings
        for spread in one.measurement.spread.values()
        if one.measurement.conditions["bytes"] >= 64 << 20
    }
    assert {what: spread for what, spread in spreads.items() if spread > 0.05} == {}


@of_three
@pytest.mark.parametrize("fault", ["flip", "flip in the input"])
def test_a_flipped_bit_is_found_and_the_gpu_named(on_gpus, fault):
    check = "test_collective_is_exact[all_reduce-sum]"
    run = on_gpus(f"{EXACT}::{check}", "-p", "faulty", files={"faulty.py": FAULT}, FAULT=fault)
    message = run.check(check).message
    assert re.match(rf"(Failed: )?rank 1 of {COUNT}, GPU 1 .*, serial .* corrupts data", message), message


def test_a_rank_that_comes_late_is_named(on_gpus):
    run = on_gpus(
        f"{SPEED}::{ALL_REDUCE}", "--fleet-profile=profile.toml", "-p", "late", files={"late.py": LATE}
    )  # fmt: skip
    message = run.check(ALL_REDUCE).message
    assert re.match(rf"rank 1 of {COUNT}, GPU 1 .*, serial .* comes 1(\.\d)? ms late to every all_reduce", message)


@pytest.mark.parametrize("variable", ["NCCL_P2P_DISABLE", "NCCL_MAX_NCHANNELS"])
def test_a_variable_that_slows_all_gpus_blames_none(on_gpus, variable):
    run = on_gpus(f"{SPEED}::{ALL_REDUCE}", "--fleet-profile=profile.toml", **{variable: "1"})
    message = run.check(ALL_REDUCE).message
    nobody = "no single GPU: " if COUNT > 2 else "with two ranks nobody can tell"
    assert message.startswith(nobody), message
    assert f"{variable}=1" in message
    assert "limit ≥ 150 GB/s" in message


@of_three
def test_a_gpu_that_somebody_else_uses_is_named(on_gpus):
    with intruder(MULTIPLIES, 1):
        run = on_gpus("-rP", files={"test_inner.py": SEARCH})
    assert re.search(rf"^FOUND rank 1 of {COUNT}, GPU 1 ", run.text, re.MULTILINE), run.text

"""Collectives on real GPUs, sound ones and ones made slow or wrong on purpose. Skipped without them."""

import os
import re

import pytest

from pytest_gpufleet.model.metric import row_of
from tests.acceptance.test_acceptance import FAULT
from tests.conftest import ACCEPTANCE
from tests.gpu.present import COUNT, GPUS, MULTIPLIES, intruder, needs_gpus

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
def plant(rank, fault):
    import time
    import torch.distributed as dist

    genuine = dist.all_reduce

    def all_reduce(*args, **kwargs):
        time.sleep(0.001)
        return genuine(*args, **kwargs)

    if rank.index == 1:
        dist.all_reduce = all_reduce
"""

SEARCH = """
from pytest_gpufleet import MiB
from pytest_gpufleet.probes.search import collective

def test_search(nccl_group, gpu_topology):
    (found,) = collective.who_is_slow(nccl_group, gpu_topology, "all_reduce", 64 * MiB)
    assert [place.index for place in found.subjects] == [1], found
"""


SMALL = """
from statistics import median

import pytest
import torch
import torch.distributed as dist

from pytest_gpufleet import MiB, WORLD, bus_bandwidth, measure, measure_all
from pytest_gpufleet.probes import timing
from pytest_gpufleet.probes.collectives.speed import collective_latency, launch_time, sweep
from pytest_gpufleet.probes.collectives.table import COLLECTIVES

def cannot_capture(rank):
    genuine = timing.captured

    def captured(do):
        def spoiled():
            do()
            torch.cuda.synchronize()  # which no capture survives

        return genuine(spoiled)

    if rank.index == 1:
        timing.captured = captured

def is_on_the_usual_stream(rank):
    return torch.cuda.current_stream() == torch.cuda.default_stream()

def latency(rank, group):
    data = torch.zeros(2, device=rank.device)
    return median(timing.replayed(rank, lambda: dist.all_reduce(data, group=group), 3).seconds)

def group_with_graphs_ends(rank):
    group = dist.new_group(list(range(rank.size)))
    took = latency(rank, group)
    dist.destroy_process_group(group)
    return took

def on_its_own_stream_and_on_the_default_one(rank):
    genuine, own = timing.seconds, latency(rank, rank.group)

    def seconds(*how):
        with torch.cuda.stream(torch.cuda.default_stream()):
            return genuine(*how)

    timing.seconds = seconds
    try:
        return own, latency(rank, rank.group)
    finally:
        timing.seconds = genuine

@pytest.mark.parametrize("name", COLLECTIVES)
def test_graph(nccl_group, name):
    figures = measure_all(nccl_group, sweep, collective_latency, name, [8, 32768, MiB])
    assert [figure.conditions["method"] for figure in figures] == 3 * ["replayed"]
    assert max(figure.values[WORLD] for figure in figures) < 100
    assert measure(nccl_group, bus_bandwidth, name, MiB).conditions["method"] == "replayed"
    assert "method" not in measure(nccl_group, bus_bandwidth, name, 2 * MiB).conditions

def test_group_ends(nccl_group):
    assert max(nccl_group.run(group_with_graphs_ends, timeout=60)) < 1e-4

def test_stream(nccl_group):
    for own, default in nccl_group.run(on_its_own_stream_and_on_the_default_one, timeout=60):
        assert own < 0.7 * default, (own, default)  # two H200: 5.6 and 15.8 us

def test_launch_time(nccl_group):
    figure = measure(nccl_group, launch_time)
    assert [*figure.values] == [gpu.place for gpu in nccl_group.gpus]
    assert max(figure.values.values()) < 1.9 * min(figure.values.values()), figure.values

@pytest.mark.fresh_world
def test_one_gpu_cannot_capture(nccl_group):
    nccl_group.run(cannot_capture)
    assert measure(nccl_group, collective_latency, "all_reduce", 8).conditions["method"] == "eager"
    assert measure(nccl_group, bus_bandwidth, "all_reduce", MiB).conditions["method"] == "eager"
    assert all(nccl_group.run(is_on_the_usual_stream))
"""

# A thread that computes in the process of rank 1 takes its host from it.
BUSY = """
def plant(rank, fault):
    import threading

    def compute():
        number = 1
        while True:
            number = number * 3 % 1000003

    if rank.index == 1:
        threading.Thread(target=compute, daemon=True).start()
"""

# The NCCL variables of this machine: some of them need NCCL_NVLS_ENABLE=0.
OWN = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}


@pytest.fixture
def on_gpus(run_pytest):

    def run(*arguments, files=None, **environment):
        files = {"profile.toml": PROFILE, **(files or {})}
        return run_pytest(*arguments, "--gpus=all", "--fleet-dir=runs", files=files, **OWN, **environment)

    return run


def test_healthy_gpus_are_fast_and_steady(on_gpus):
    run = on_gpus(SPEED, "--fleet-profile=profile.toml")
    assert set(run.outcomes.values()) <= {"passed", "not applicable"}, run.text
    large = [one.measurement for one in run.record.findings if one.measurement.conditions["bytes"] >= 64 << 20]
    allowed = [row_of(each.definition).spread(each.conditions) for each in large]
    assert [each for each, most in zip(large, allowed, strict=True) if max(each.spread.values()) > most] == []
    states = [state for one in run.record.findings for state in one.measurement.gpu_states.values()]
    assert all(20 < state.temperature_c < 95 and state.power_watts > 20 for state in states if state.energy_joules)
    assert any(state.energy_joules for state in states)


def test_small_collectives_come_from_graphs_where_every_gpu_can_capture_them(on_gpus):
    run = on_gpus("-rP", files={"test_inner.py": SMALL})
    assert set(run.outcomes.values()) == {"passed"}, run.text


def test_small_collectives_are_timed_where_torch_waits_for_each(on_gpus):
    run = on_gpus(f"{SPEED}::test_latency[all_reduce]", TORCH_NCCL_BLOCKING_WAIT="1")
    assert run.outcomes == {"test_latency[all_reduce]": "passed"}, run.text


@of_three
def test_a_host_that_launches_slowly_is_found_by_its_peers(planted):
    run = planted(BUSY, "busy", f"{SPEED}::test_launch_time", "--gpus=all", **OWN)
    assert run.outcomes == {"test_launch_time": "failed"}, run.text
    (finding,) = run.record.findings
    assert [*(finding.slower_than_peers or ())] == [GPUS[1].place]


@of_three
@pytest.mark.parametrize("fault", ["flip", "flip in the input"])
def test_a_flipped_bit_is_found_and_the_gpu_named(planted, fault):
    check = "test_collective_is_exact[all_reduce-sum]"
    message = planted(FAULT, fault, f"{EXACT}::{check}", "--gpus=all", **OWN).check(check).message
    assert re.match(r"GPU 1 .*, serial .*: corrupts data", message), message


def test_a_rank_that_comes_late_is_named(planted):
    profile = {"profile.toml": PROFILE}
    of_rank = (LATE, "late", f"{SPEED}::{ALL_REDUCE}", "--gpus=all", "--fleet-profile=profile.toml")
    message = planted(*of_rank, files=profile, **OWN).check(ALL_REDUCE).message
    assert re.match(r"GPU 1 .*, serial .*: it comes 1(\.\d)? ms late to every all_reduce", message), message


@pytest.mark.parametrize("variable", ["NCCL_P2P_DISABLE", "NCCL_MAX_NCHANNELS"])
def test_a_variable_that_slows_all_gpus_blames_none(on_gpus, variable):
    run = on_gpus(f"{SPEED}::{ALL_REDUCE}", "--fleet-profile=profile.toml", **{variable: "1"})
    message = run.check(ALL_REDUCE).message
    nobody = "no single GPU: " if COUNT > 2 else "with two ranks it can be either"
    assert message.startswith(nobody), message
    assert f"{variable}=1" in message
    assert "limit ≥ 150 GB/s" in message


@of_three
def test_a_gpu_that_somebody_else_uses_is_named(on_gpus):
    with intruder(MULTIPLIES, 1):
        run = on_gpus("test_inner.py", files={"test_inner.py": SEARCH})
    assert run.outcomes == {"test_search": "passed"}, run.text

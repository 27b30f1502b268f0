"""A figure that missed while its GPU held itself back, or of which the samples differ, is measured once more."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.gpu import Gpu, GpuTopology
from pytest_gpufleet.model.measurement import GpuState, Measurement
from pytest_gpufleet.model.place import gpu
from pytest_gpufleet.plugin import assertions
from pytest_gpufleet.plugin.assertions import Judge
from pytest_gpufleet.plugin.keys import FINDINGS, MISSED, RUN
from pytest_gpufleet.verdict.judgement import ALONG, judge, unsteady, why_again
from pytest_gpufleet.verdict.profile import for_gpu

H200 = "NVIDIA H200"
FACTS = {"name": H200, "power_limit_watts": 700.0, "temperature_limits_c": {"slowdown": 89}}
MACHINE = GpuTopology(tuple(Gpu(i, FACTS) for i in range(2)), (("X", "NV18"), ("NV18", "X")), "nvswitch")
COPY = {"operation": "copy", "at_once": "all"}
COOL, WARM = GpuState(45.0, 1980.0, 300.0), GpuState(67.0, 1980.0, 480.0)
HOT, FULL = GpuState(80.0, 1400.0, 480.0), GpuState(67.0, 1400.0, 690.0)


def measured(first, state, metric="memory_bandwidth", conditions=COPY):
    return Measurement(metric, {gpu(0): first, gpu(1): 4280.0}, conditions, gpu_states={gpu(0): state, gpu(1): COOL})


def judged(measurement):
    return judge(measurement, for_gpu(H200), MACHINE, "test_4.py::test_memory", rehearsal=False)


@pytest.mark.parametrize(
    ("value", "state", "held"),
    [
        (4000.0, HOT, True),
        (4000.0, FULL, True),
        (4000.0, WARM, False),  # as healthy ones are after full load
        (4000.0, COOL, False),
        (4280.0, HOT, False),  # it did not miss
        (4000.0, GpuState(), False),  # nobody knows
    ],
)
def test_only_a_gpu_that_is_hot_or_at_its_power_limit_is_held_back(value, state, held):
    finding = judged(measured(value, state))
    assert (finding.state == "missed") == (value < 4130)
    assert bool(why_again(finding, MACHINE)) == held


def test_another_gpu_that_is_hot_excuses_nobody():
    slow = Measurement("memory_bandwidth", {gpu(0): 4280.0, gpu(1): 4000.0}, COPY, gpu_states={gpu(0): HOT})
    assert why_again(judged(slow), MACHINE) == ""


def test_a_product_is_its_own_heavy_load():
    slow = measured(100.0, FULL, "gemm", {"precision": "bf16", "at_once": "all"})
    assert judged(slow).state == "missed"
    assert why_again(judged(slow), MACHINE) == ""


@pytest.fixture
def run(monkeypatch):
    pauses = []
    monkeypatch.setattr(assertions, "time", SimpleNamespace(sleep=pauses.append))  # not for threads of other tests
    found = SimpleNamespace(recorded=[], pauses=pauses, stash={})
    ground = SimpleNamespace(topology=MACHINE)
    run = SimpleNamespace(
        ground=ground,
        judged=lambda check, figures, required: [
            finding for each in map(judged, figures) for finding in (each, unsteady(each)) if finding
        ],
        record_event=lambda name, **event: found.recorded.append(event),
    )
    hook = SimpleNamespace(pytest_gpufleet_finding=SimpleNamespace(get_hookimpls=list))
    config = SimpleNamespace(stash={RUN: run}, hook=hook)
    found.judge = Judge(SimpleNamespace(config=config, nodeid="check", stash=found.stash, user_properties=[]))
    return found


@pytest.mark.parametrize(("second", "missed"), [(4280.0, 0), (4000.0, 1)])
def test_both_are_on_record_and_the_second_counts(run, second, missed):
    run.judge(measured(4000.0, HOT), again=lambda: [measured(second, HOT)])
    first, last = (codec.typed(event["finding"], Finding) for event in run.recorded)
    assert run.pauses == [assertions.PAUSE_SECONDS]
    assert (first.state, first.missed) == ("for information", (gpu(0),))
    assert "gpu0 had 80 C, and slows down at 89" in first.reason
    assert last.state == ("missed" if missed else "met")
    assert len(run.stash.get(MISSED, ([], []))[0]) == missed
    assert len(run.stash[FINDINGS]) == 2


@pytest.mark.parametrize("state", [WARM, COOL])
def test_what_misses_for_no_such_reason_is_not_measured_again(run, state):
    run.judge(measured(4000.0, state), again=lambda: pytest.fail("it was measured again"))
    assert len(run.stash[MISSED][0]) == 1
    assert run.pauses == []


STEADY, DISTURBED = (55.4, 55.4, 55.5), (54.0, 50.8, 53.9)  # GB/s; the second was seen on a healthy machine
LOW = (29.0, 25.0, 29.2)


def host_link(samples):
    """Bandwidth from the host to GPU 0 with these samples, and to GPU 1 as it should be."""
    conditions = {"direction": "host to device", "at_once": "one"}
    values, states = {gpu(0): sorted(samples)[1], gpu(1): 55.4}, {gpu(0): COOL}
    return Measurement("host_bandwidth", values, conditions, {gpu(0): samples, gpu(1): STEADY}, gpu_states=states)


@pytest.mark.parametrize(("second", "missed"), [(STEADY, []), (DISTURBED, ["spread"]), (LOW, ["host_bandwidth"])])
def test_samples_that_differ_are_measured_again_without_a_pause(run, second, missed):
    run.judge(host_link(DISTURBED), again=lambda: [host_link(second)])
    first, *_ = (codec.typed(event["finding"], Finding) for event in run.recorded)
    assert run.pauses == []
    assert (first.state, first.again) == ("for information", "the samples of gpu0 differed by 5.9%")
    now = run.stash.get(MISSED, ([], []))[0]
    assert [each.measurement.metric for each in now][:1] == missed


def test_samples_that_differ_excuse_no_figure_that_misses(run):
    run.judge(host_link(LOW), again=lambda: pytest.fail("it was measured again"))
    assert run.stash[MISSED][0][0].measurement.metric == "host_bandwidth"


def from_host(samples):
    return replace(host_link(samples), conditions={"direction": "device to host", "at_once": "one"})


@pytest.mark.parametrize(("second", "missed"), [(STEADY, False), (LOW, True)])
def test_what_had_met_its_limit_and_was_measured_along_counts_once_by_the_second(run, second, missed):
    run.judge(host_link(DISTURBED), from_host(STEADY), again=lambda: [host_link(STEADY), from_host(second)])
    recorded = [codec.typed(json.loads(json.dumps(event["finding"])), Finding) for event in run.recorded]
    figures = [each for each in recorded if each.measurement.metric == "host_bandwidth"]
    assert [each.state for each in figures] == ["for information"] * 2 + ["met", "missed" if missed else "met"]
    assert [each.again for each in figures] == ["the samples of gpu0 differed by 5.9%", ALONG, "", ""]
    assert bool(run.stash.get(MISSED)) == missed


def test_what_was_not_measured_again_counts_as_it_was(run):
    run.judge(host_link(DISTURBED), from_host(STEADY), again=lambda: [host_link(STEADY)])
    recorded = [codec.typed(event["finding"], Finding) for event in run.recorded]
    assert [(each.state, bool(each.again)) for each in recorded] == [
        ("for information", True), ("met", False), ("met", False),
    ]  # fmt: skip


def test_a_miss_that_was_not_measured_again_counts_though_there_was_a_reason(run):
    run.judge(measured(4000.0, HOT), host_link(DISTURBED), again=lambda: [host_link(STEADY)])
    recorded = [codec.typed(event["finding"], Finding) for event in run.recorded]
    assert [(each.measurement.metric, each.state, bool(each.again)) for each in recorded] == [
        ("memory_bandwidth", "missed", False),
        ("host_bandwidth", "for information", True),
        ("host_bandwidth", "met", False),
    ]
    assert run.stash[MISSED]

"""A figure that missed, or of which the samples differ, is measured once more; and what samples that differ mean."""

from dataclasses import replace
from functools import partial
from statistics import median
from types import SimpleNamespace

import pytest

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.metric import METRICS, GpuState, Measurement
from pytest_gpufleet.model.place import Gpu, GpuTopology, gpu
from pytest_gpufleet.plugin import assertions
from pytest_gpufleet.plugin.assertions import Judge
from pytest_gpufleet.plugin.compat import MISSED, RUN
from pytest_gpufleet.verdict.judgement import ALONG, judge, unsteady
from pytest_gpufleet.verdict.outliers import figure_of
from pytest_gpufleet.verdict.profile import for_gpu
from tests import dry_suite
from tests.boards import BOARDS

H200 = "NVIDIA H200"
MACHINE = GpuTopology(tuple(Gpu(i, {"name": H200}) for i in range(2)), (("X", "NV18"), ("NV18", "X")), "nvswitch")
COPY = {"operation": "copy", "at_once": "all"}
COOL, HOT = GpuState(45.0, 1980.0, 300.0), GpuState(80.0, 1400.0, 480.0)


def measured(first, state, metric="memory_bandwidth", conditions=COPY):
    return Measurement(metric, {gpu(0): first, gpu(1): 4280.0}, conditions, gpu_states={gpu(0): state, gpu(1): COOL})


def judged(measurement, required=True):
    return judge(measurement, for_gpu(H200), MACHINE, "test_4.py::test_memory", rehearsal=False, required=required)


@pytest.fixture
def run(monkeypatch):
    pauses = []
    monkeypatch.setattr(assertions, "time", SimpleNamespace(sleep=pauses.append))  # not for threads of other tests
    found = SimpleNamespace(recorded=[], pauses=pauses, stash={})
    target = SimpleNamespace(topology=MACHINE)
    run = SimpleNamespace(
        target=target,
        judged=lambda check, figures, required: [
            finding
            for found in (judged(each, required) for each in figures)
            for finding in (found, unsteady(found, MACHINE))
            if finding
        ],
        record=lambda event: found.recorded.append(event.finding),
    )
    monkeypatch.setattr(assertions.listeners, "announce", lambda *given, **event: None)
    found.run, config = run, SimpleNamespace(stash={RUN: run})
    found.judge = Judge(SimpleNamespace(config=config, nodeid="check", stash=found.stash, user_properties=[]))
    return found


MISSED_FIRST = "1 place is slower than the peers"


@pytest.mark.parametrize(("second", "missed"), [(4280.0, 0), (4000.0, 1)])
def test_both_are_on_record_and_the_second_counts(run, second, missed):
    run.judge(measured(4000.0, HOT), again=lambda: [measured(second, HOT)])
    first, last = run.recorded
    assert run.pauses == [assertions.PAUSE_SECONDS]
    assert (first.state, set(first.slower_than_peers), first.again) == ("for information", {gpu(0)}, MISSED_FIRST)
    assert last.state == ("missed" if missed else "met")
    assert len(run.stash.get(MISSED, ([], []))[0]) == missed


def test_what_is_shown_beside_is_measured_again_too_and_needs_no_limit(run):
    share = Measurement("train_utilization", {gpu(0): 0.5}, {"recipe": "amp"})
    run.judge(measured(4000.0, HOT), shown=[share], again=lambda: [measured(4280.0, COOL), share])
    recorded = run.recorded
    assert [(each.measurement.metric, bool(each.again), each.required) for each in recorded] == [
        ("memory_bandwidth", True, True), ("train_utilization", True, False),
        ("memory_bandwidth", False, True), ("train_utilization", False, False),
    ]  # fmt: skip


STEADY, DISTURBED = (55.4, 55.4, 55.5), (54.0, 50.8, 53.9)  # GB/s; the second was seen on a healthy machine
LOW = (29.0, 25.0, 29.2)
SHARED = (40.3, 54.6, 54.8)  # of a healthy H100 in a virtual machine
HALF = (55.0, 55.1, 55.0, 54.9, 55.2, 27.0, 27.5, 26.9, 27.1)  # a little less than half of the samples


def host_link(samples, direction="host to device"):
    """Bandwidth between the host and GPU 0 with these samples, and GPU 1 as it should be."""
    conditions = {"direction": direction, "at_once": "one"}
    values, states = {gpu(0): median(samples), gpu(1): 55.4}, {gpu(0): COOL}
    return Measurement("host_bandwidth", values, conditions, {gpu(0): samples, gpu(1): STEADY}, gpu_states=states)


STALLS = (55.0, 55.2, 20.1)  # more than a third of the time is lost


@pytest.mark.parametrize(("second", "missed"), [
    *((samples, []) for samples in (STEADY, DISTURBED, SHARED)),  # others use the host too
    (LOW, ["host_bandwidth"]),
    *((samples, ["spread"]) for samples in (STALLS, HALF)),
])  # fmt: skip
def test_a_shared_way_that_stalls_is_measured_again_and_is_no_fault_while_it_only_differs(run, second, missed):
    run.judge(host_link(STALLS), again=lambda: [host_link(second)])
    first, *_ = run.recorded
    assert run.pauses == [assertions.PAUSE_SECONDS]
    assert (first.state, first.again) == ("for information", "the samples of gpu0 differed by 63.8%")
    assert [each.measurement.metric for each in run.stash.get(MISSED, ([], []))[0]][:1] == missed


def test_samples_of_a_shared_way_that_differ_but_do_not_stall_are_measured_once(run):
    run.judge(host_link(SHARED), again=lambda: pytest.fail("measured again"))
    assert [each.state for each in run.recorded] == ["met"]


@pytest.mark.parametrize("second", [(4300.0, 4280.0, 4000.0), (4300.0, 4280.0, 4290.0)])
def test_samples_of_a_gpus_own_work_that_differ_twice_speak_against_it(run, second):
    def memory(samples):
        return replace(measured(4280.0, COOL), samples={gpu(0): samples})

    run.judge(memory((4300.0, 4280.0, 4000.0)), again=lambda: [memory(second)])
    assert bool(run.stash.get(MISSED)) == (min(second) < 4200)


COLLECTIVE = {"collective": "all_reduce", "bytes": 1 << 30, "ranks": 2}


@pytest.mark.parametrize(("metric", "under", "fabric", "shared"), [
    ("host_bandwidth", {"direction": "host to device", "at_once": "one"}, "nvswitch", True),
    ("pair_bandwidth", {"direction": "read", "link": "NVLink"}, "nvlink", False),
    ("pair_bandwidth", {"direction": "read", "link": "PHB"}, "pcie", True),
    ("busbw", COLLECTIVE, "nvswitch", False),
    ("busbw", COLLECTIVE, "pcie", True),
    ("busbw", {**COLLECTIVE, "nodes": 2}, "nvswitch", True),
    ("rail_bandwidth", {"at_once": "all"}, "nvswitch", True),
    ("train_throughput", {"ranks": 2}, "pcie", True),
    ("memory_bandwidth", COPY, "pcie", False),
])  # fmt: skip
def test_what_others_use_too_may_scatter_and_what_is_the_machines_own_may_not(metric, under, fabric, shared):
    topology = replace(MACHINE, fabric=fabric)
    found = Measurement(metric, {gpu(0): 54.6}, under, {gpu(0): (40.3, 54.6, 54.8)})
    finding = Finding("check", found, "met")
    assert (unsteady(finding, topology) is None) == shared
    assert unsteady(replace(finding, measurement=replace(found, samples={gpu(0): HALF})), topology)


from_host = partial(host_link, direction="device to host")
DIFFERED = "the samples of gpu0 differed by 63.8%"


@pytest.mark.parametrize(("beside", "again", "findings"), [
    # What had met its limit and was measured along counts once, by the second.
    (from_host(STEADY), from_host(STEADY),
     [("for information", DIFFERED), ("for information", ALONG), ("met", ""), ("met", "")]),
    (from_host(STEADY), from_host(LOW),
     [("for information", DIFFERED), ("for information", ALONG), ("met", ""), ("missed", "")]),
    # What was not measured again counts as it was.
    (from_host(STEADY), None, [("met", ""), ("for information", DIFFERED), ("met", "")]),
    (measured(4000.0, HOT), None, [("missed", ""), ("for information", DIFFERED), ("met", "")]),
])  # fmt: skip
def test_what_was_measured_beside_counts_once(run, beside, again, findings):
    run.judge(host_link(STALLS), beside, again=lambda: [each for each in (host_link(STEADY), again) if each])
    told = [(each.state, each.again) for each in run.recorded if each.measurement.metric != "spread"]
    assert sorted(told) == sorted(findings)
    assert bool(run.stash.get(MISSED)) == ("missed" in dict(findings))


# What they took another measurement would; and what was compared is no measurement of speed.
COMPARED = {"test_products_repeat_bit_for_bit", "test_collectives_of_the_soak_are_exact"}
HOURS = {"test_burn_in", "test_burn_in_of_all_nodes", "test_power_steps", *COMPARED}


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("lasting", [False, True])
def test_in_every_check_a_disturbance_that_was_there_once_rejects_nobody_and_one_that_lasts_does(run, lasting, nodes):
    """The first time that each figure is measured it misses; where it lasts, the second time too."""
    rejected, checks = set(), set()

    def judging(check):
        seen = []

        def judged(_, figures, required):
            missed = [lasting or figure_of(each) not in seen for each in figures]
            seen.extend(map(figure_of, figures))
            states = ["missed" if each else "met" for each in missed]
            return [Finding(check, each, state, reason="slow") for each, state in zip(figures, states, strict=True)]

        def judge(*measurements, on_miss=None, **how):
            run.run.judged, run.stash[MISSED] = judged, ([], [])
            run.judge(*measurements, **how)
            checks.add(check)
            rejected.update([check] if run.stash[MISSED][0] else [])

        return judge

    board = BOARDS[H200]
    machine = board.machine(4, memory_bytes=141 << 30)
    dry_suite.measured(board, machine, nodes, False, "burnin", METRICS, judging)
    assert len(checks) > 4
    assert rejected == (checks if lasting else checks & HOURS)

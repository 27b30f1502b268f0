"""Bandwidth and latency of collectives on CPU ranks: what is counted, and under which conditions."""

import math
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pytest_gpufleet import WORLD, GiB, measure, measure_all
from pytest_gpufleet.model.gpu import Gpu, GpuTopology
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import gpu
from pytest_gpufleet.probes.collectives import speed
from pytest_gpufleet.probes.collectives.speed import bus_bandwidth, collective_latency
from pytest_gpufleet.probes.collectives.table import COLLECTIVES
from pytest_gpufleet.probes.collectives.under_load import beside
from pytest_gpufleet.probes.timing import plan
from pytest_gpufleet.verdict.judgement import judge

# Of 8 ranks: the factor of busbw (doc/PERFORMANCE.md of nccl-tests), and what a rank holds of 8 GiB.
TABLE = {
    "all_reduce": (1.75, 8), "all_gather": (0.875, 9), "reduce_scatter": (0.875, 9), "broadcast": (1, 8),
    "reduce": (1, 8), "all_to_all": (0.875, 16), "gather": (0.875, 9), "scatter": (0.875, 9), "sendrecv": (1, 16),
}  # fmt: skip


def test_factors_are_those_of_nccl_tests_and_buffers_count_what_a_rank_holds():
    assert {name: (each.factor(8), each.held(8 * GiB, 8) // GiB) for name, each in COLLECTIVES.items()} == TABLE


@pytest.mark.parametrize(
    ("each", "iterations", "runs", "ahead"),
    [
        (10e-6, 20, 7, 50),
        (250e-6, 20, 7, 20),  # 64 MiB on two H200
        (3.2e-3, 18, 3, 2),  # 1 GiB
        (24.6e-3, 2, 3, 1),  # 8 GiB
        (0.1, 2, 3, 1),
        (2.5, 2, 1, 0),  # 8 GiB on a machine on which everything is a hundred times as slow
    ],
)
def test_samples_are_long_enough_and_end_on_a_broken_machine(each, iterations, runs, ahead):
    assert plan("cuda", each) == (iterations, runs, ahead)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_parts_are_equal_and_in_place_shares_memory(name, n):
    collective = COLLECTIVES[name]
    total = collective.total(1_000_003, n)
    assert total - 1_000_003 in range(n if collective.in_parts else 1)
    assert collective.total(1, n) == (n if collective.in_parts else 1)
    for me in range(n):
        sizes = []

        def empty(count, sizes=sizes):
            sizes.append(count)
            return range(count)

        input, output = collective.buffers(total, n, me, True, empty)
        assert sizes == [total]  # one buffer
        part = range(total)[total // n * me :][: total // n]
        assert input == (part if collective.one_part == "input" else range(total))
        assert output == (part if collective.one_part == "output" else range(total))


@pytest.mark.parametrize(
    ("usual", "slow", "named"),
    [
        (36.4, 50.5, []),  # two healthy H200 differed so
        (30.6, 53.7, []),  # and so where the samples of one were the lowest and of the other the highest
        (40.0, 85.0, [gpu(2)]),  # its processor has another program on it
    ],
)
def test_a_rank_of_which_the_host_launches_slowly_is_named(usual, slow, named):
    values = {gpu(index): slow if index == 2 else usual for index in range(8)}
    launching = Measurement("launch_time", values, {"collective": "all_reduce", "bytes": 8, "ranks": 8})
    gpus = tuple(Gpu(index, {"name": "Card", "uuid": f"GPU-{index}"}) for index in range(8))
    finding = judge(launching, None, GpuTopology(gpus=gpus), "a", rehearsal=False, required=False)
    assert [*(finding.slower_than_peers or ())] == named
    assert finding.state == ("missed" if named else "for information")


def test_figures_say_what_they_were_measured_with(three_ranks):
    figures = measure_all(three_ranks, speed.sweep, bus_bandwidth, "all_gather", [65536], in_place=True)
    assert figures[0].conditions["in_place"] is True
    in_place = set()
    for name, collective in COLLECTIVES.items():
        least = 3 * 4 if collective.in_parts else 4
        latencies = measure_all(three_ranks, speed.sweep, collective_latency, name, [8, 1024])
        bandwidths = measure_all(three_ranks, speed.sweep, bus_bandwidth, name, [65536])
        assert [one.conditions["bytes"] for one in (*latencies, *bandwidths)] == [max(8, least), 1024, 65536]
        assert {(one.definition.unit, len(one.samples[WORLD])) for one in latencies} == {("us", 5)}
        assert {(one.definition.unit, len(one.samples[WORLD])) for one in bandwidths} == {("GB/s", 3)}
        figures += [*latencies, *bandwidths]
        in_place |= {name} if bandwidths[0].conditions["in_place"] else set()
    for one in figures:
        assert one.values[WORLD] > 0
        shown = [one.conditions[name] for name in ("ranks", "dtype", "nvls", "method")]
        assert shown == [3, "float32", False, "eager"]  # CPU ranks have no graphs
    assert in_place == {"all_reduce", "broadcast", "reduce", "gather", "scatter"}


def slow_on_rank_1(rank):
    genuine = dist.all_to_all_single
    if rank.index == 1:
        dist.all_to_all_single = lambda *args, **kwargs: (time.sleep(0.01), genuine(*args, **kwargs))[1]
    return collective_latency(rank, "all_to_all", 8)


def test_a_slow_rank_counts(three_ranks):
    assert measure(three_ranks, slow_on_rank_1).values[WORLD] > 10_000


def delivered(rank):
    received = {}
    for name, collective in COLLECTIVES.items():
        input, output = collective.buffers(6, rank.size, rank.index, False, torch.zeros)
        if collective.in_place == "always":
            input = output
        input.copy_(torch.arange(len(input)) + 100 * rank.index)
        collective.run(rank.group, output, input, root=1)
        received[name] = output.tolist()
    return received


def test_what_is_timed_delivers_what_is_expected(three_ranks):
    each = three_ranks.run(delivered)
    for name, collective in COLLECTIVES.items():
        inputs = torch.stack([torch.arange(2 if collective.one_part == "input" else 6) + 100 * k for k in range(3)])
        for me, received in enumerate(each):
            expected = collective.expected(inputs, me, 1, lambda stacked: stacked.sum(0))
            assert (expected is None) == (name in ("reduce", "gather") and me != 1)  # who is not the root gets nothing
            if expected is not None:
                assert received[name] == expected.tolist(), (name, me)


@pytest.mark.parametrize(("variables", "may"), [({}, True), ({"NCCL_NVLS_ENABLE": "0"}, False)])
def test_nccl_reduces_in_the_switch_unless_a_variable_rules_it_out(monkeypatch, variables, may):
    driver = SimpleNamespace(cuDeviceGetAttribute=lambda value, *_: setattr(value._obj, "value", 1))
    monkeypatch.setattr(speed, "steering", lambda: variables)
    monkeypatch.setattr(speed.ctypes, "CDLL", lambda _: driver)
    assert speed.nvls(torch.device("cuda", 0)) == may
    assert not speed.nvls(torch.device("cpu"))


# ---------------------------------------------------------------- works that run at once


@pytest.mark.parametrize(("own", "others", "seconds"), [
    # The other ends in the midst of the third.
    ([0.0, 2.0, 4.0, 5.0, 6.0], [0.0, 1.0, 2.0, 3.0, 4.5], 2.0),
    # The other begins in the midst of the first.
    ([0.0, 1.0, 3.0, 5.0], [0.5, 5.5], 2.0),
    ([0.0, 1.0, 2.0, 3.0], [0.0, 10.0], 1.0),
])  # fmt: skip
def test_what_ran_alone_does_not_count(own, others, seconds):
    assert beside(own, others) == seconds
    assert math.isnan(beside(own, [7.0, 8.0]))  # of works that never met there is no figure

"""Bandwidth and latency of collectives on CPU ranks: what is counted, and under which conditions."""

import math
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pytest_gpufleet import WORLD, GiB, World, measure_all
from pytest_gpufleet.machine.nccl_log import Beside, NcclLog, Way
from pytest_gpufleet.model.endings import NotJudged
from pytest_gpufleet.model.events import TransportRead
from pytest_gpufleet.model.fault import Faults
from pytest_gpufleet.model.metric import Measurement
from pytest_gpufleet.model.place import Gpu, GpuTopology, gpu
from pytest_gpufleet.probes.collectives import speed, transport
from pytest_gpufleet.probes.collectives.speed import bus_bandwidth, collective_latency
from pytest_gpufleet.probes.collectives.table import COLLECTIVES
from pytest_gpufleet.probes.collectives.under_load import beside
from pytest_gpufleet.probes.timing import plan
from pytest_gpufleet.verdict.judgement import judge
from pytest_gpufleet.world.failure import RankFailure, RankReport
from tests.boards import H200

# Of 8 ranks: the factor of busbw (doc/PERFORMANCE.md of nccl-tests), and what a rank holds of 8 GiB.
TABLE = {
    "all_reduce": (1.75, 8), "all_gather": (0.875, 9), "reduce_scatter": (0.875, 9), "broadcast": (1, 8),
    "reduce": (1, 8), "all_to_all": (0.875, 16), "gather": (0.875, 9), "scatter": (0.875, 9), "sendrecv": (1, 16),
}  # fmt: skip


def test_factors_are_those_of_nccl_tests_and_buffers_count_what_a_rank_holds():
    assert {name: (each.factor(8), each.held(8 * GiB, 8) // GiB) for name, each in COLLECTIVES.items()} == TABLE


@pytest.mark.parametrize(("each", "iterations", "runs", "ahead"), [
    (10e-6, 20, 7, 50),
    (250e-6, 20, 7, 20),  # 64 MiB on two H200
    (3.2e-3, 18, 3, 2),  # 1 GiB
    (24.6e-3, 2, 3, 1),  # 8 GiB
    (0.1, 2, 3, 1),
    (2.5, 2, 1, 0),  # 8 GiB on a machine on which everything is a hundred times as slow
])  # fmt: skip
def test_samples_are_long_enough_and_end_on_a_broken_machine(each, iterations, runs, ahead):
    assert plan("cuda", each) == (iterations, runs, ahead)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_parts_are_equal_and_in_place_shares_memory(name, n):
    collective = COLLECTIVES[name]
    total = collective.total(1_000_003, n)
    assert total - 1_000_003 in range(n if collective.one_part else 1)
    assert collective.total(1, n) == (n if collective.one_part else 1)
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


@pytest.mark.parametrize(("usual", "slow", "named"), [
    (36.4, 50.5, []),  # two healthy H200 differed so
    (30.6, 53.7, []),  # and so where the samples of one were the lowest and of the other the highest
    (40.0, 85.0, [gpu(2)]),  # its processor has another program on it
])  # fmt: skip
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
        least = 3 * 4 if collective.one_part else 4
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


# ---------------------------------------------------------------- what NCCL's log says of a short run
exchanged = transport._exchanged


def logs(rank, file, sizes):
    own = os.environ["NCCL_DEBUG_FILE"].replace("%h", "here").replace("%p", str(os.getpid()))
    line = f"Channel 00 : {rank.index}[0] -> {(rank.index + 1) % rank.size}[0] via SHM/direct\n"
    Path(own).write_text(line if os.environ["NCCL_DEBUG"] == "INFO" else "")
    return exchanged(rank, file, sizes)


def test_ranks_of_a_short_run_alone_have_a_log(two_ranks, monkeypatch):
    monkeypatch.setattr(transport, "_exchanged", logs)
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    log, beside = transport.transport(
        World(two_ranks._pool, False), two_ranks, {"all_reduce": [8], "all_to_all": [8, 64]}
    )
    assert log.ways == (Way(0, 1, "SHM"), Way(1, 0, "SHM"))
    assert [each.variables for each in beside] == [{"NCCL_IB_DISABLE": "1"}] * 2  # somebody's own stay
    assert not list(Path(tempfile.gettempdir()).glob("gpufleet-nccl-*"))
    assert two_ranks.run(lambda rank: os.environ.get("NCCL_DEBUG", "")) == ["", ""]


def failure(kind, *stuck):
    reports = [RankReport(rank, f"rank {rank}", "running" if rank in stuck else "returned", "") for rank in range(4)]
    return RankFailure(kind, "all_reduce", tuple(reports))


def four(bad):
    """Four GPUs, of which these pairs do not meet."""

    def each(pairs, *args, **how):
        if hanging := {rank for pair in pairs if pair in bad for rank in pair}:
            raise failure("hang", *hanging)

    places = [gpu(index) for index in range(4)]
    return SimpleNamespace(size=4, gpus=places, nodes=[0], places=places, each=each, restarted=lambda _: nullcontext())


@pytest.mark.parametrize(("kind", "bad", "fault", "subjects"), [
    ("hang", {(1, 2)}, "p2p_hangs", ["gpu1-gpu2"]),
    ("hang", {(0, 3), (1, 2)}, "p2p_hangs", ["gpu0-gpu3", "gpu1-gpu2"]),
    ("hang", set(), "p2p_hangs", ["node"]),
    ("exception", set(), "nvls_not_used", ["node"]),
    *((kind, set(), "", []) for kind in ("hang", "exception", "crash")),  # it fails all the same
    *((kind, set(), "large", []) for kind in ("hang", "exception")),  # and not small ones, as without memory
])  # fmt: skip
def test_a_first_collective_that_works_without_p2p_or_nvls_names_it(kind, bad, fault, subjects, monkeypatch):
    def logged(group, sizes, variables):
        if len(sizes["all_reduce"]) > 1 or (fault != "large" and not (fault and variables)):
            raise failure(kind, 0)
        return "seen"

    monkeypatch.setattr(transport, "_logged", logged)
    with pytest.raises(Faults if subjects else RankFailure) as found:
        transport.transport(four(bad), four(bad), {"all_reduce": [8, 1 << 30]})
    if subjects:
        assert [(each.name, list(map(str, each.subjects))) for each in found.value.faults] == [(fault, subjects)]


@pytest.mark.parametrize(("log", "beside", "ends"), [
    (NcclLog(ways=(Way(0, 1, "P2P/CUMEM"),)), Beside(nvlink=4096), nullcontext()),
    (NcclLog(ways=(Way(0, 1, "P2P/CUMEM"),)), Beside(nvlink=0), pytest.raises(NotJudged, match="counted no bytes")),
    (NcclLog(unknown=("via TELEPORT",)), Beside(), pytest.raises(NotJudged, match="TELEPORT")),
    (NcclLog(), Beside(), pytest.raises(NotJudged, match="does not say")),
    (NcclLog(ways=(Way(0, 1, "SHM"),)), Beside(), pytest.raises(Faults, match="SHM")),
])  # fmt: skip
def test_what_the_log_leaves_open_is_not_judged(log, beside, ends):
    with ends:
        assert transport.expect_fastest((log, [beside] * 4), four(set()), H200.machine(4)) == []


@pytest.mark.parametrize(
    ("of_log", "ranks", "nvls"), [(False, 8, False), (True, 8, True), (None, 8, True), (False, 4, True)]
)
def test_measurements_of_all_these_ranks_have_nvls_as_the_log_says(of_log, ranks, nvls):
    measured = Measurement("busbw", {"world": 480.0}, {"collective": "all_reduce", "ranks": ranks, "nvls": True})
    read = TransportRead(check="check", ranks=8, nvls=of_log, log=None)
    assert read.corrected(measured).conditions["nvls"] is nvls

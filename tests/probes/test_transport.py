"""The short run of ranks that has NCCL's log, with CPU ranks that write one as NCCL would; and what is said of a first
collective that fails."""

import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_gpufleet.machine.nccl_log import Beside, NcclLog, Way
from pytest_gpufleet.model.endings import NotJudged
from pytest_gpufleet.model.events import TransportRead
from pytest_gpufleet.model.fault import Faults
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import gpu
from pytest_gpufleet.probes.collectives import transport
from pytest_gpufleet.world.failure import RankFailure, RankReport
from pytest_gpufleet.world.world import World
from tests.boards import H200

exchanged = transport._exchanged


def logs(rank, file, sizes):
    own = os.environ["NCCL_DEBUG_FILE"].replace("%h", "here").replace("%p", str(os.getpid()))
    line = f"Channel 00 : {rank.index}[0] -> {(rank.index + 1) % rank.size}[0] via SHM/direct\n"
    Path(own).write_text(line if os.environ["NCCL_DEBUG"] == "INFO" else "")
    return exchanged(rank, file, sizes)


def debug(rank):
    return os.environ.get("NCCL_DEBUG", "")


def test_ranks_of_a_short_run_alone_have_a_log(two_ranks, monkeypatch):
    monkeypatch.setattr(transport, "_exchanged", logs)
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    seen = transport.transport(World(two_ranks._pool, False), two_ranks, {"all_reduce": [8], "all_to_all": [8, 64]})
    assert seen.log.ways == (Way(0, 1, "SHM"), Way(1, 0, "SHM"))
    assert [each.variables for each in seen.beside] == [{"NCCL_IB_DISABLE": "1"}] * 2  # somebody's own stay
    assert not list(Path(tempfile.gettempdir()).glob("gpufleet-nccl-*"))
    assert two_ranks.run(debug) == ["", ""]


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


@pytest.mark.parametrize(
    ("kind", "bad", "fault", "subjects"),
    [
        ("hang", {(1, 2)}, "p2p_hangs", ["gpu1-gpu2"]),
        ("hang", {(0, 3), (1, 2)}, "p2p_hangs", ["gpu0-gpu3", "gpu1-gpu2"]),
        ("hang", set(), "p2p_hangs", ["node"]),
        ("exception", set(), "nvls_not_used", ["node"]),
    ],
)
def test_a_first_collective_that_works_without_p2p_or_nvls_names_it(kind, bad, fault, subjects, monkeypatch):
    def logged(group, sizes, variables=None):
        if not variables:
            raise failure(kind, 0)

    monkeypatch.setattr(transport, "_logged", logged)
    with pytest.raises(Faults) as found:
        transport.transport(four(bad), four(bad), {})
    assert [(each.name, list(map(str, each.subjects))) for each in found.value.faults] == [(fault, subjects)]


@pytest.mark.parametrize("kind", ["hang", "exception", "crash"])
def test_one_that_fails_all_the_same_is_the_failure_of_its_ranks(kind, monkeypatch):
    monkeypatch.setattr(transport, "_logged", lambda *args: (_ for _ in ()).throw(failure(kind, 0)))
    with pytest.raises(RankFailure):
        transport.transport(four(set()), four(set()), {})


@pytest.mark.parametrize(
    ("log", "beside", "ends"),
    [
        (NcclLog(ways=(Way(0, 1, "P2P/CUMEM"),)), Beside(nvlink=4096), nullcontext()),
        (NcclLog(ways=(Way(0, 1, "P2P/CUMEM"),)), Beside(nvlink=0), pytest.raises(NotJudged, match="counted no bytes")),
        (NcclLog(unknown=("via TELEPORT",)), Beside(), pytest.raises(NotJudged, match="TELEPORT")),
        (NcclLog(), Beside(), pytest.raises(NotJudged, match="does not say")),
        (NcclLog(ways=(Way(0, 1, "SHM"),)), Beside(), pytest.raises(Faults, match="SHM")),
    ],
)
def test_what_the_log_leaves_open_is_not_judged(log, beside, ends):
    with ends:
        assert transport.expect_fastest(transport.Transport(log, [beside] * 4), four(set()), H200.machine(4)) == []


@pytest.mark.parametrize(
    ("of_log", "ranks", "nvls"), [(False, 8, False), (True, 8, True), (None, 8, True), (False, 4, True)]
)
def test_measurements_of_all_these_ranks_have_nvls_as_the_log_says(of_log, ranks, nvls):
    measured = Measurement("busbw", {"world": 480.0}, {"collective": "all_reduce", "ranks": ranks, "nvls": True})
    read = TransportRead(check="check", ranks=8, nvls=of_log, log=None)
    assert read.corrected(measured).conditions["nvls"] is nvls

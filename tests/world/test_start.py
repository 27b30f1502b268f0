"""Ranks that do not come up, process groups that do not, and whose deadlines end a test; and when ranks end: while the
report is written, but not before fixtures are done with them."""

from dataclasses import replace

import pytest

from pytest_gpufleet import Gpu, RankFailure, World
from pytest_gpufleet.world import world as pool
from pytest_gpufleet.world.engines import forkserver
from pytest_gpufleet.world.engines.local import LocalEngine
from tests.conftest import rehearsal
from tests.world.fake_engine import specs


@pytest.fixture
def started():
    """started(spec, ...): ranks of their own, and of an engine of their own."""
    made = []

    def start(*wanted, timeout=60.0):
        engine = LocalEngine()
        made.append(engine)
        return World(pool.Pool(engine, wanted, timeout), with_group=False)

    yield start
    for engine in made:
        engine.end()


USES = "".join(f"def test_{i}(world):\n    world.run(lambda rank: None)\n" for i in range(5))


def test_a_gpu_on_which_cuda_does_not_start_is_named(started):
    """Rank 1 has to use a GPU that no machine has."""
    facts = {"name": "NVIDIA H200", "uuid": "GPU-feed", "pci_bus_id": "0000:1b:00.0", "serial": "1234"}
    well, sick = specs(2)
    world = started(well, replace(sick, gpu=Gpu(7, facts), device="cuda:99"))
    named = "^rank 1 of 2, GPU 7 NVIDIA H200, serial 1234, 0000:1b:00.0, GPU-feed: raised .* .create the CUDA context"
    with pytest.raises(RankFailure, match=named):
        world.run(print)


def test_a_broken_process_group_leaves_what_needs_only_the_world(started, monkeypatch):
    world = started(*specs(2))
    group = World(world._pool, with_group=True)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(RankFailure, match='process group: gloo"'):
        group.run(print)
    assert world.run(lambda rank: rank.index) == [0, 1]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    world._pool.stop()
    assert group.run(lambda rank: rank.group.size()) == [2, 2]


def test_a_fork_server_that_never_starts_a_rank_ends_with_the_deadline(started, monkeypatch):
    stopped = f"import os, signal; os.kill(os.getpid(), signal.SIGSTOP); {forkserver.BOOT}"
    monkeypatch.setattr(forkserver, "BOOT", stopped)
    monkeypatch.setattr(pool, "MIN_START_SECONDS", 1.0)
    what = r"^ranks 0, 1: running before it was forked from process \d+ \(stopped by a signal\)"
    with pytest.raises(RankFailure, match=what):
        started(*specs(2), timeout=1.0).run(print)


def test_a_torch_that_cannot_be_loaded_is_reported(run_fresh):
    conftest = """
    import sys, torch
    from pytest_gpufleet.world.engines import local
    local.PRELOAD = []
    sys.path.insert(0, "broken")
    """
    broken = "raise ImportError('libnccl.so.2: cannot open shared object file')"
    run = rehearsal(run_fresh)(USES, files={"conftest.py": conftest, "broken/torch/__init__.py": broken})
    assert set(run.outcomes.values()) == {"failed"}
    assert "libnccl.so.2: cannot open shared object file" in run.check("test_0").message


SESSION = """
    import os, pytest

    def remember(rank):
        rank.kept["word"] = rank.index
        return os.getpid()

    @pytest.fixture(scope="session")
    def remembered(world):
        pids = world.run(remember)
        yield pids
        print("still known:", world.run(lambda rank: rank.kept["word"]))
"""


def test_ranks_are_gone_before_the_report_is_done(fleet):
    conftest = f"""{SESSION}
    PIDS = []

    @pytest.fixture(autouse=True)
    def pids_of(remembered):
        PIDS[:] = remembered

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary():
        from pytest_gpufleet.world.engines import processes
        from tests.conftest import comes_true
        assert comes_true(lambda: not any(map(processes.look, PIDS)))  # before the session is closed
    """
    run = fleet("def test_one(): pass\n", "-s", files={"conftest.py": conftest})
    assert run.status == 0, run.text
    assert "still known: [0, 1]" in run.text


def test_fixtures_of_a_session_that_was_ended_are_taken_down_on_the_same_ranks(fleet):
    module = f"""{SESSION}
    def test_ends(remembered):
        pytest.exit("enough", 0)
    """
    assert "still known: [0, 1]" in fleet(module, "-s").text


OWN = """
import time

import pytest

def test_own(world):
    time.sleep(0.1)
    assert world.run(lambda rank: rank.index) == [0, 1]

@pytest.mark.timeout(1)
def test_with_a_limit_of_its_own():
    time.sleep(60)
"""


def test_a_limit_of_pytest_timeout_fails_no_check_and_is_reported(fleet):
    run = fleet(OWN, files={"pytest.ini": "[pytest]\ntimeout = 0.01\n"})
    assert (run.check("test_own").outcome, run.record.spoiled) == ("passed", []), run.text
    assert "limit of 0.01 s a test is left out" in run.text
    assert run.check("test_with_a_limit_of_its_own").outcome == "failed", run.text

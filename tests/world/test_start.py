"""Ranks that do not come up, process groups that do not, and when ranks end: while the report is written, but not
before fixtures are done with them."""

import pytest

from tests.conftest import rehearsal

SICK_DEVICE = """
import dataclasses
import pytest

@pytest.fixture(autouse=True, scope="session")
def sick_device(request):
    # Rank 1 has to use a GPU that no machine has.
    from pytest_gpufleet.plugin.compat import RUN
    pool = request.config.stash[RUN].ranks.pool
    sick = dataclasses.replace(pool.specs[1], gpu=GPU, device="cuda:99")
    pool.specs = (pool.specs[0], sick)

from pytest_gpufleet import Gpu
GPU = Gpu(7, {"name": "NVIDIA H200", "uuid": "GPU-feed", "pci_bus_id": "0000:1b:00.0", "serial": "1234"})

def test_one(world):
    world.run(lambda rank: None)
"""
USES = "".join(f"def test_{i}(world):\n    world.run(lambda rank: None)\n" for i in range(5))


def test_a_gpu_on_which_cuda_does_not_start_is_named(fleet):
    message = fleet(SICK_DEVICE).check("test_one").message
    assert message.startswith("rank 1 of 2, GPU 7 NVIDIA H200, serial 1234, 0000:1b:00.0, GPU-feed: raised")
    assert 'in phase "create the CUDA context"' in message


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


def test_a_broken_process_group_leaves_tests_that_need_only_the_world(fleet):
    module = """
    import os, pytest

    def test_group(nccl_group, monkeypatch):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
        nccl_group.run(lambda rank: None)

    def test_world(world):
        assert world.run(lambda rank: rank.index) == [0, 1]

    def test_group_again(nccl_group):
        assert nccl_group.run(lambda rank: rank.group.size()) == [2, 2]
    """
    run = fleet(module)
    assert run.outcomes == {"test_group": "failed", "test_world": "passed", "test_group_again": "passed"}, run.text
    assert 'process group: gloo"' in run.check("test_group").message


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
    conftest = (
        SESSION
        + """
    PIDS = []

    @pytest.fixture(autouse=True)
    def pids_of(remembered):
        PIDS[:] = remembered

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary():
        from tests.nodes.controller import wait_until_gone
        wait_until_gone(PIDS)  # which hangs if nobody ends them before the session is closed
    """
    )
    run = fleet("def test_one(): pass\n", "-s", files={"conftest.py": conftest})
    assert run.status == 0, run.text
    assert "still known: [0, 1]" in run.text


@pytest.mark.parametrize("status", [0, 2])
def test_fixtures_of_a_session_that_was_ended_are_taken_down_on_the_same_ranks(fleet, status):
    module = (
        SESSION
        + f"""
    def test_ends(remembered):
        pytest.exit("enough", {status})
    """
    )
    assert "still known: [0, 1]" in fleet(module, "-s").text

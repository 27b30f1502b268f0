"""Ranks that do not come up, and process groups that do not."""

import fcntl
import os

from pytest_gpufleet.world.engines.scratch import MARKER

SICK_DEVICE = """
import dataclasses
import pytest

@pytest.fixture(autouse=True, scope="session")
def sick_device(request):
    # Rank 1 is told to use a GPU that no machine has.
    from pytest_gpufleet.plugin.keys import RUN
    pool = request.config.stash[RUN].ranks.pool
    sick = dataclasses.replace(pool.specs[1], gpu=GPU, device="cuda:99")
    pool.specs = (pool.specs[0], sick)

from pytest_gpufleet import Gpu
GPU = Gpu(7, "NVIDIA H200", "GPU-feed", "0000:1b:00.0", 1, serial="1234")

def test_one(world):
    world.run(lambda rank: None)
"""
USES = "".join(f"def test_{i}(world):\n    world.run(lambda rank: None)\n" for i in range(5))


def test_a_gpu_on_which_cuda_does_not_start_is_named(fleet):
    run = fleet(SICK_DEVICE)
    message = run.check("test_one").message
    assert message.startswith("rank 1 of 2, GPU 7 NVIDIA H200, serial 1234, 0000:1b:00.0, GPU-feed: raised")
    assert 'in phase "create the CUDA context"' in message


def test_a_torch_that_cannot_be_loaded_is_told(fleet):
    conftest = """
    import sys, torch
    from pytest_gpufleet.world.engines import local
    local.PRELOAD = []
    sys.path.insert(0, "broken")
    """
    broken = "raise ImportError('libnccl.so.2: cannot open shared object file')"
    run = fleet(USES, files={"conftest.py": conftest, "broken/torch/__init__.py": broken})
    assert set(run.outcomes.values()) == {"failed"}
    assert "libnccl.so.2: cannot open shared object file" in run.check("test_0").message


def test_a_rank_that_dies_while_it_starts_is_named_and_a_hopeless_start_is_not_tried_for_ever(fleet):
    conftest = """
    from pytest_gpufleet.world.engines import local
    import dying
    local.worker = dying
    """
    dying = """
    import os
    from pytest_gpufleet.world.worker import main
    def main(pipe, lifeline, spec):
        if spec.index == 1:
            with open("starts", "a") as file:
                file.write("x")
            os._exit(11)
        main.main(pipe, lifeline, spec)
    """
    run = fleet(USES, files={"conftest.py": conftest, "dying.py": dying})
    assert set(run.outcomes.values()) == {"failed"}
    assert "rank 1 of 2, CPU: died with exit status 11" in run.check("test_4").message
    assert (run.root / "starts").read_text() == "xxx"


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


def test_a_process_group_that_never_comes_up_is_not_tried_by_every_test(fleet):
    module = """
    import pytest

    @pytest.mark.parametrize("number", range(5))
    def test_group(nccl_group, number):
        nccl_group.run(lambda rank: None)

    def test_world(world):
        assert world.run(lambda rank: rank.index) == [0, 1]
    """
    run = fleet(module, GLOO_SOCKET_IFNAME="no-such-interface")
    assert [outcome for name, outcome in run.outcomes.items() if name != "test_world"] == ["failed"] * 5
    assert run.outcomes["test_world"] == "passed"
    assert 'process group: gloo"' in run.check("test_group[4]").message
    tried = [line for line in (run.folders[0] / "evidence.jsonl").read_text().splitlines() if '"failure"' in line]
    assert len(tried) == 3


def test_two_failures_in_a_row(fleet):
    module = """
    import os
    def test_first(world):
        world.run(lambda rank: os.abort())
    def test_second(world):
        world.run(lambda rank: 1 / 0)
    def test_third(world):
        assert world.run(lambda rank: rank.index) == [0, 1]
    """
    run = fleet(module)
    assert run.outcomes == {"test_first": "failed", "test_second": "failed", "test_third": "passed"}


def test_a_rank_that_cannot_be_killed_ends_the_use_of_its_gpu(fleet):
    # A stand-in for a process stuck in the driver: the real kill, and one rank said to be still there.
    conftest = """
    from pytest_gpufleet.world.engines.local import LocalEngine
    kill = LocalEngine.kill
    LocalEngine.kill = lambda self, timeout: kill(self, timeout) or [1]
    """
    module = """
    def test_breaks(world):
        world.run(lambda rank: 1 / 0)
    def test_next(world):
        world.run(lambda rank: None)
    """
    run = fleet(module, files={"conftest.py": conftest})
    assert run.outcomes == {"test_breaks": "failed", "test_next": "failed"}
    message = run.check("test_next").message
    assert "rank 1 of 2, CPU: running and could not be killed" in message
    assert "reset this GPU or restart the machine" in message


def test_a_result_of_one_gigabyte(fleet):
    module = """
    import torch
    def test_large(world):
        zero, one = world.run(lambda rank: torch.ones(rank.index << 28))
        assert one.numel() * one.element_size() == 1 << 30 and one.sum() == 1 << 28
    """
    assert fleet(module).outcomes == {"test_large": "passed"}


def test_scratch_of_killed_controllers_is_removed_and_that_of_living_ones_is_not(fleet, tmp_path):
    dead, living = tmp_path / "gpufleet-world-dead", tmp_path / "gpufleet-world-living"
    for folder in (dead, living):
        folder.mkdir()
        (folder / "rank0.output").write_text("x")
        (folder / MARKER).touch()
        os.utime(folder, (0, 0))
    held = os.open(living, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        run = fleet("def test_it(world):\n    world.run(lambda rank: None)\n", TMPDIR=str(tmp_path))
    finally:
        os.close(held)
    assert run.status == 0, run.text
    assert [folder.name for folder in tmp_path.glob("gpufleet-world-*")] == ["gpufleet-world-living"]

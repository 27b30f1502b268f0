"""Ranks that do not come up, and process groups that do not."""

from tests.conftest import rehearsal

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
GPU = Gpu(7, {"name": "NVIDIA H200", "uuid": "GPU-feed", "pci_bus_id": "0000:1b:00.0", "serial": "1234"})

def test_one(world):
    world.run(lambda rank: None)
"""
USES = "".join(f"def test_{i}(world):\n    world.run(lambda rank: None)\n" for i in range(5))


def test_a_gpu_on_which_cuda_does_not_start_is_named(fleet):
    run = fleet(SICK_DEVICE)
    message = run.check("test_one").message
    assert message.startswith("rank 1 of 2, GPU 7 NVIDIA H200, serial 1234, 0000:1b:00.0, GPU-feed: raised")
    assert 'in phase "create the CUDA context"' in message


def test_a_torch_that_cannot_be_loaded_is_told(run_fresh):
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

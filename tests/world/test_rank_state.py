"""What a test changes on a rank is gone when the next one comes; the suite gets ranks that no other test has used."""

from pathlib import Path

from tests import edited_evidence

ACCEPTANCE = Path(__file__).parents[2] / "acceptance"

MODULE = """
    import gc
    import logging
    import os
    import random
    import resource
    import signal
    import sys

    import numpy
    import pytest
    import torch
    import torch.distributed as dist

    from pytest_gpufleet import RankFailure

    def cudnn_flags():
        import torch

        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        return cudnn.enabled, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32

    def change_flags():
        import torch

        torch.backends.cudnn.enabled = False
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = True

    def snapshot(rank):
        umask = os.umask(0)
        os.umask(umask)
        return {
            "environment": sorted(os.environ.items()),
            "folder": os.readlink("/proc/self/cwd"),
            "umask": umask,
            "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            "timer": signal.getitimer(signal.ITIMER_REAL) != (0, 0),
            "stack": signal.getsignal(signal.SIGUSR1),
            "flight recorder": signal.getsignal(signal.SIGUSR2),
            "interrupt": signal.getsignal(signal.SIGINT),
            "output": [os.path.realpath(f"/proc/self/fd/{number}") for number in (1, 2)],
            "streams": [stream is None or stream.closed for stream in (sys.stdout, sys.stderr)],
            "modules": list(sys.path),
            "logging": (logging.root.level, logging.root.manager.disable, len(logging.root.handlers)),
            "garbage": gc.isenabled(),
            "limits": [resource.getrlimit(number)[0] for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
            "cores": os.sched_getaffinity(0),
            "anomalies": torch.is_anomaly_enabled(),
            "autocast": [torch.is_autocast_enabled(device) for device in ("cuda", "cpu")],
            "dtype": torch.get_default_dtype(),
            "device": torch.get_default_device(),
            "threads": torch.get_num_threads(),
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "flags": cudnn_flags(),
            "precision": torch.get_float32_matmul_precision(),
            "random": random.getstate(),
            "torch's random": torch.random.initial_seed(),
            "function": dist.all_reduce.__name__,
            "method": torch.Tensor.allclose(torch.ones(1), torch.ones(1)),
            "operator": torch.matmul.__name__,
            "kept": sorted(rank.kept),
        }

    def change(rank, folder):
        rank.kept["left"] = torch.zeros(1)
        os.environ["LEFT"] = "1"
        del os.environ["RANK"]
        os.chdir(folder)
        os.umask(0o777)
        signal.signal(signal.SIGALRM, lambda number, frame: None)
        signal.setitimer(signal.ITIMER_REAL, 1000)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        torch.use_deterministic_algorithms(True)
        with open("kept", "w") as kept:
            os.dup2(kept.fileno(), 1)
        os.unlink("kept")
        os.close(2)
        sys.stdout.close()
        sys.stderr = None
        sys.path = ["left"]
        logging.basicConfig(level=1, handlers=[logging.NullHandler()])
        logging.disable(50)
        gc.disable()
        for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE):
            soft, hard = resource.getrlimit(number)
            resource.setrlimit(number, (200 if soft != 200 else 100, hard))
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        torch.autograd.set_detect_anomaly(True)
        for device in ("cuda", "cpu"):
            torch.set_autocast_enabled(device, True)
        change_flags()
        torch.set_float32_matmul_precision("medium")
        torch.set_num_threads(torch.get_num_threads() + 1)
        random.seed(rank.index)
        torch.manual_seed(7)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        global mode
        mode = torch.inference_mode()
        mode.__enter__()

        def patched(*args, **kwargs):
            return "patched"

        dist.all_reduce = torch.matmul = torch.Tensor.allclose = patched
        os.rmdir(folder)

    def test_a_test_finds_what_it_has_changed(world, tmp_path_factory):
        global BEFORE
        BEFORE = world.run(snapshot)
        folders = [str(tmp_path_factory.mktemp("gone")) for _ in range(world.size)]
        world.run(lambda rank: change(rank, folders[rank.index]))
        for before, now in zip(BEFORE, world.run(snapshot), strict=True):
            assert [name for name in before if before[name] == now[name]] == []

    def test_the_next_one_does_not(world):
        for before, now in zip(BEFORE, world.run(snapshot), strict=True):
            assert [name for name in before if before[name] != now[name]] == []

    def seeds(rank):
        return torch.rand(3).tolist(), random.random()

    def test_seeds_1(world):
        global SEEDS
        SEEDS = world.run(seeds)
        assert world.run(seeds) != SEEDS

    def test_seeds_2(world):
        assert world.run(seeds) == SEEDS

    # Torch's other interface: what was changed by it cannot be read by the one above.
    @pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="came with torch 2.9")
    def test_precision_by_operation(world):
        def change(rank):
            import torch

            torch.backends.cuda.matmul.fp32_precision = "tf32"
            torch.backends.cudnn.conv.fp32_precision = "ieee"

        world.run(change)

    def test_the_stack_of_a_hang_is_shown_whatever_was_there_before(world):
        def for_ever_in_here(rank):
            assert snapshot(rank)["precision"] == "highest"
            while True:
                pass

        with pytest.raises(RankFailure, match="for_ever_in_here"):
            world.run(for_ever_in_here, timeout=1)
"""


def test_cheap_state_is_put_back_between_tests_and_kept_within_one(fleet):
    run = fleet(MODULE)
    assert run.status == 0, run.text
    assert set(run.outcomes.values()) <= {"passed", "skipped"}


OWN = """
import os

{changed}

def test_own(request):
    world = request.getfixturevalue("world")
    assert world.run(lambda rank: os.environ.get("NCCL_ALGO")) == [{seen!r}] * 2
"""


def test_the_suite_gets_ranks_that_no_other_test_has_used(run_pytest):
    first = OWN.format(changed="os.environ['NCCL_ALGO'] = 'Ring'", seen="Ring")
    last = OWN.format(changed="", seen=None)  # on the ranks of the suite
    check = f"{ACCEPTANCE / 'test_4_each_gpu.py'}::test_matrix_product_is_exact"
    run = run_pytest(
        "first.py", f"{check}[fp32]", f"{check}[bf16]", "last.py", "--rehearse=2", "--fleet-dir=runs",
        files={"first.py": first, "last.py": last},
    )  # fmt: skip
    assert run.status == 0, run.text
    events = edited_evidence.events(run.folders[0] / "evidence.jsonl")
    happened = [
        event["check"]["id"].rpartition("::")[2] if event["event"] == "check_finished" else event["event"]
        for event in events
        if event["event"] in ("world_started", "fresh_world", "check_finished")
    ]
    exact = "test_matrix_product_is_exact"
    assert happened == [
        "world_started", "test_own", "fresh_world", "world_started", f"{exact}[fp32]", f"{exact}[bf16]", "test_own",
    ]  # fmt: skip
    (fresh,) = [event for event in events if event["event"] == "fresh_world"]
    assert fresh["after"].endswith("first.py::test_own")
    assert fresh["check"].endswith(f"{exact}[fp32]")

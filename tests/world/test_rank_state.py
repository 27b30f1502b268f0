"""What a test changes on a rank is gone when the next one comes; the suite gets ranks that no other test has used."""

from pathlib import Path

from tests import edited_evidence

ACCEPTANCE = Path(__file__).parents[2] / "acceptance"

MODULE = """
    import gc, logging, os, random, signal, sys

    import numpy
    import pytest
    import torch
    import torch.distributed as dist

    from pytest_gpufleet import RankFailure

    def flags():
        import torch

        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        return cudnn.enabled, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32

    def change_flags():
        import torch

        torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark = False, True
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = False, True

    def umask():
        umask = os.umask(0)
        os.umask(umask)
        return umask

    def change_environment():
        os.environ["LEFT"] = "1"
        del os.environ["RANK"]

    def change_output():
        with open("kept", "w") as kept:
            os.dup2(kept.fileno(), 1)
        os.unlink("kept")
        os.close(2)

    def change_streams():
        sys.stdout.close()
        sys.stderr = None

    def change_logging():
        logging.basicConfig(level=1, handlers=[logging.NullHandler()])
        logging.disable(50)

    def change_inference():
        global mode
        mode = torch.inference_mode()
        mode.__enter__()

    def patched(*args, **kwargs):
        return "patched"

    def handles(number):
        return lambda: signal.getsignal(number), lambda: signal.signal(number, lambda number, frame: None)

    # How each is read, and changed.
    STATE = {
        "environment": (lambda: sorted(os.environ.items()), change_environment),
        "umask": (umask, lambda: os.umask(0o777)),
        "mask": (lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
                 lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})),
        "alarm": handles(signal.SIGALRM),
        "timer": (lambda: signal.getitimer(signal.ITIMER_REAL) != (0, 0),
                  lambda: signal.setitimer(signal.ITIMER_REAL, 1000)),
        "stack": handles(signal.SIGUSR1),
        "flight recorder": handles(signal.SIGUSR2),
        "interrupt": handles(signal.SIGINT),
        "output": (lambda: [os.path.realpath(f"/proc/self/fd/{number}") for number in (1, 2)], change_output),
        "streams": (lambda: [each is None or each.closed for each in (sys.stdout, sys.stderr)], change_streams),
        "modules": (lambda: list(sys.path), lambda: setattr(sys, "path", ["left"])),
        "logging": (lambda: (logging.root.level, logging.root.manager.disable, len(logging.root.handlers)),
                    change_logging),
        "garbage": (gc.isenabled, gc.disable),
        "cores": (lambda: os.sched_getaffinity(0), lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})),
        "anomalies": (torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True)),
        "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.set_autocast_enabled("cpu", True)),
        "GPU autocast": (lambda: torch.is_autocast_enabled("cuda"), lambda: torch.set_autocast_enabled("cuda", True)),
        "threads": (torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
        "grad": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
        "inference": (torch.is_inference_mode_enabled, change_inference),
        "deterministic": (torch.are_deterministic_algorithms_enabled, lambda: torch.use_deterministic_algorithms(True)),
        "flags": (flags, change_flags),
        "precision": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("medium")),
        "random": (lambda: random.getstate(), lambda: random.seed(4711)),
        "torch's random": (torch.random.initial_seed, lambda: torch.manual_seed(7)),
        "dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
        "device": (torch.get_default_device, lambda: torch.set_default_device("meta")),
        "function": (lambda: dist.all_reduce.__name__, lambda: setattr(dist, "all_reduce", patched)),
        "operator": (lambda: torch.matmul.__name__, lambda: setattr(torch, "matmul", patched)),
        "method": (lambda: torch.Tensor.allclose(torch.ones(1), torch.ones(1)),
                   lambda: setattr(torch.Tensor, "allclose", patched)),
        "folder": (lambda: os.readlink("/proc/self/cwd"), lambda: None),
    }

    def snapshot(rank):
        return {**{name: read() for name, (read, _) in STATE.items()}, "kept": sorted(rank.kept)}

    def change(rank, folder):
        rank.kept["left"] = torch.zeros(1)
        os.chdir(folder)
        for _, change in STATE.values():
            change()
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

"""world.run, its subsets and groups, and how pytest ends what ends on a rank."""

import os

import torch
import torch.distributed as dist

from pytest_gpufleet import Place


def test_functions_arguments_and_results_travel(fleet):
    module = """
    import os
    import threading
    from dataclasses import dataclass

    import helper
    import pytest
    from helper import Point, double

    TABLE = {"one": 1}
    PIDS = []

    def pids(world):
        return world.run(lambda rank: os.getpid())

    @dataclass(frozen=True)
    class Pair:
        left: int
        right: int

        def total(self):
            return self.left + self.right

    def use_helpers(rank):
        return TABLE["one"] + double(rank.index) + helper.double(1)

    def test_results_come_by_rank(world):
        assert world.size == 2
        assert world.run(lambda rank: (rank.index, rank.size, rank.device.type)) == [(0, 2, "cpu"), (1, 2, "cpu")]

    def test_arguments(world):
        def collect(rank, *args, **kwargs):
            return rank.index, args, kwargs

        assert world.run(collect, 1, (2, None), named="x", world=3) == [
            (rank, (1, (2, None)), {"named": "x", "world": 3}) for rank in range(2)
        ]

    def test_closures_and_recursive_local_functions(world):
        seen = [10]

        def factorial(n):
            return seen[0] if n == 0 else n * factorial(n - 1)

        assert world.run(lambda rank: factorial(3)) == [60, 60]

    def test_helpers_of_this_module_and_its_sibling(world):
        assert world.run(use_helpers) == [3, 5]

    @pytest.mark.parametrize("kind", [Pair, Point])
    def test_dataclasses_stay_themselves_both_ways(world, kind):
        sent = kind(1, 2)
        received = world.run(lambda rank, value: (value.total(), value, kind(rank.index, 0)), sent)
        assert received == [(3, sent, kind(rank, 0)) for rank in range(2)]
        assert all(type(value) is kind for _, value, _ in received)

    def test_output_of_ranks_is_captured(world, capfd):
        def speak(rank):
            print("hello from", rank.index)
            os.system("echo from a child")
            os.write(2, b"raw \\xff")
            print("x" * 100_000 + " the end", flush=True)

        world.run(lambda rank: print("hello from", rank.index) or os.system("echo from a child"))
        world.run(speak)
        out = capfd.readouterr().out
        for rank in (0, 1):
            assert f"[rank {rank}] hello from {rank}\\n[rank {rank}] from a child\\n" in out
        assert out.count("the end\\n") == 2
        assert len(out) < 50_000

    def test_warm_processes(world, nccl_group):
        PIDS.extend(pids(world))
        assert len(set(PIDS)) == 2
        assert os.getpid() not in PIDS
        assert pids(nccl_group) == pids(world) == PIDS

    def test_unsendable_arguments_are_named_and_cost_no_world(world):
        lock = threading.Lock()
        for arguments, named, name in (
            ((1, lock), {}, r"argument 2 \\(lock\\)"),
            ((), {"guard": lock}, r"guard \\(lock\\)"),
            ((), {}, "uses_lock"),
        ):
            def uses_lock(rank, *args, guard=None, own=lock if name == "uses_lock" else None):
                pass

            with pytest.raises(TypeError, match=name):
                world.run(uses_lock, *arguments, **named)
        with pytest.raises(TypeError, match="stay in the controller"):
            world.run(lambda rank: world.size)
        assert pids(world) == PIDS

    def test_skips_cost_no_world(world):
        with pytest.raises(pytest.skip.Exception, match=r"^no reason \\(on rank 1 of 2 only\\)$"):
            world.run(lambda rank: pytest.skip("no reason") if rank.index else None)
        assert pids(world) == PIDS

    @pytest.mark.fresh_world
    def test_fresh(world, gpu_topology):
        assert not set(pids(world)) & set(PIDS)
        assert gpu_topology.gpus == world.gpus == ()
        assert gpu_topology.torch
    """
    helper = """
        from dataclasses import dataclass

        def double(x):
            return 2 * x

        @dataclass
        class Point:
            x: int
            y: int

            def total(self):
                return self.x + self.y
    """
    run = fleet(module, files={"helper.py": helper})
    assert run.status == 0, run.text
    assert len(run.record.worlds) == 2


def pids(group):
    return group.run(lambda rank: os.getpid())


def total(rank):
    value = torch.tensor([rank.index + 1.0], device=rank.device)
    dist.all_reduce(value, group=rank.group)
    return rank.index, rank.size, dist.get_rank(rank.group), value.item()


def test_a_subset_is_counted_anew_in_ascending_order(worlds):
    four = worlds(1, 4)
    subset, nested = four.subset([3, 1, 3]), four.subset([0, 2, 3]).subset([1, 2])
    assert subset.places == (Place(0, "cpu", 1), Place(0, "cpu", 3))
    assert pids(subset) == pids(four)[1::2]
    assert nested.places == (Place(0, "cpu", 2), Place(0, "cpu", 3))
    assert nested.name_of(1).startswith("rank 3 of 4")
    assert four.run(total) == [(rank, 4, rank, 10.0) for rank in range(4)]
    for two in (subset, nested):
        assert two.run(total) == [(0, 2, 0, 3.0), (1, 2, 1, 3.0)]


def meet(rank, folder, count):
    (folder / str(os.getpid())).touch()
    while len(os.listdir(folder)) < count:
        pass
    return total(rank)


def test_groups_run_at_the_same_time(worlds, tmp_path):
    four = worlds(1, 4)
    results = four.each([[3], [2, 0]], meet, tmp_path, 3)
    assert results == [[(0, 1, 0, 1.0)], [(0, 2, 0, 3.0), (1, 2, 1, 3.0)]]
    assert four.run(total) == [(rank, 4, rank, 10.0) for rank in range(4)]


# What a test makes of a failure, and endings that are none.
ENDINGS = """
    import pytest
    from pytest_gpufleet import RankFailure, not_applicable

    class Strange(Exception):
        def __init__(self, code, *, why):
            super().__init__(f"{code} because {why}")

    def fail(rank):
        if rank.index == 1:
            raise ValueError("on purpose")

    def refuse(rank):
        raise Strange(7, why="it can")

    def test_raises(world):
        with pytest.raises(ValueError, match="on purpose") as caught:
            world.run(fail)
        assert isinstance(caught.value, RankFailure)
        assert caught.value.kind == "exception"
        assert [report.rank for report in caught.value.reports] == [1, 0]
        assert world.run(lambda rank: rank.index) == [0, 1]

    def test_raises_type_of_this_module(world):
        with pytest.raises(Strange, match="7 because it can"):
            world.run(refuse)

    @pytest.mark.parametrize("stop", ["breakpoint()", "import pdb; pdb.set_trace()", "pytest.set_trace()"])
    def test_no_debugger(world, stop):
        with pytest.raises(RuntimeError, match="no debugger on a rank, which has no terminal") as caught:
            world.run(lambda rank: exec(stop, {"pytest": pytest}))
        assert caught.value.kind == "exception"

    @pytest.mark.xfail(raises=ValueError, strict=True)
    def test_expected(world):
        world.run(fail)

    @pytest.mark.xfail(raises=KeyError, strict=True)
    def test_other_than_expected(world):
        world.run(fail)

    def test_skip(world):
        world.run(lambda rank: pytest.skip("no such thing"))

    def test_skip_on_one(world):
        world.run(lambda rank: pytest.skip("not here") if rank.index == 0 else None)

    def test_not_applicable(world):
        world.run(lambda rank: not_applicable("no such hardware"))

    def test_xfail(world):
        world.run(lambda rank: pytest.xfail("known"))

    def test_failure_counts_more_than_a_skip(world):
        world.run(lambda rank: pytest.skip("not here") if rank.index == 0 else fail(rank))
"""


def test_endings_reach_pytest_as_what_they_are(fleet):
    run = fleet(ENDINGS)
    assert len(run.outcomes) == 12
    assert {name: outcome for name, outcome in run.outcomes.items() if outcome != "passed"} == {
        "test_expected": "skipped",  # as pytest reports an expected failure
        "test_other_than_expected": "failed",
        "test_skip": "skipped",
        "test_skip_on_one": "skipped",
        "test_not_applicable": "not applicable",
        "test_xfail": "skipped",
        "test_failure_counts_more_than_a_skip": "failed",
    }, run.text
    assert run.check("test_skip").message.endswith("no such thing")
    assert run.check("test_skip_on_one").message.endswith("not here (on rank 0 of 2 only)")
    assert run.check("test_not_applicable").message == "not applicable: no such hardware"
    failed = run.check("test_failure_counts_more_than_a_skip")
    assert "raised ValueError: on purpose" in failed.message
    (fault,) = (each for each in run.record.faults if each.check == failed.id)
    assert (fault.name, fault.subjects) == ("rank_raised", (Place(0, "cpu", 1),))
    assert "2 xfailed" in run.text

"""Tests marked spmd: their body runs on every rank, with all that pytest gives a test."""

import pytest


def test_body_runs_on_ranks_with_everything_a_test_has(fleet):
    module = """
        import os
        from dataclasses import dataclass
        from functools import partial

        import pytest
        import torch
        import torch.distributed as dist

        pytestmark = pytest.mark.spmd

        CONTROLLER = os.getpid()
        NUMBERS = [10, 20]

        @dataclass
        class Recipe:
            name: str

            def shout(self):
                return self.name.upper()

        @pytest.fixture
        def recipe(request):
            return Recipe(request.param)

        @pytest.fixture(scope="module")
        def made_in_the_controller():
            yield os.getpid()

        def test_ranks_are_processes_of_their_own(rank):
            assert os.getpid() != CONTROLLER
            assert NUMBERS[rank.index] == 10 * (rank.index + 1)
            assert (rank.size, rank.device, rank.gpu) == (2, torch.device("cpu"), None)

        @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
        @pytest.mark.parametrize("count", [1, 1000])
        def test_group_and_parameters(rank, nccl_group, count, dtype):
            assert isinstance(nccl_group, dist.ProcessGroup)
            assert nccl_group is rank.group
            assert dist.get_backend(nccl_group) == "gloo"
            x = torch.full((count,), rank.index + 1, dtype=dtype, device=rank.device)
            dist.all_reduce(x, group=nccl_group)
            assert (x == 3).all()

        @pytest.mark.parametrize("recipe", ["fast", "exact"], indirect=True)
        def test_fixtures(rank, recipe, made_in_the_controller, tmp_path, of_conftest):
            assert recipe.shout() in ("FAST", "EXACT")
            assert made_in_the_controller == CONTROLLER
            (tmp_path / str(rank.index)).write_text(of_conftest(rank.index))
            assert (tmp_path / str(rank.index)).read_text() == f"conftest {rank.index}"

        @pytest.fixture
        def wrote(tmp_path):
            yield tmp_path
            assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]

        def test_a_fixture_is_torn_down_in_the_controller_after_all_ranks(rank, wrote):
            (wrote / str(rank.index)).touch()

        @pytest.mark.usefixtures("made_in_the_controller")
        class TestClass:
            limit = 2

            @pytest.fixture
            def own(self):
                return self.limit + 1

            def helper(self, rank):
                return rank.index + self.limit

            def test_method(self, rank, own):
                assert own == 3
                assert self.helper(rank) == rank.index + 2

            @staticmethod
            def test_static(rank):
                assert rank.index < 2

        def test_group_without_the_fixture(rank):
            with pytest.raises(RuntimeError, match="use the fixture nccl_group"):
                rank.group

        def test_without_rank():
            assert os.getpid() != CONTROLLER

        def at_least(rank, least):
            assert rank.size >= least and os.getpid() != CONTROLLER

        test_partial = partial(at_least, least=2)

        def test_monkeypatch(rank, monkeypatch):
            monkeypatch.setenv("PATCHED", "1")
            monkeypatch.setattr(Recipe, "shout", lambda self: "patched")
            monkeypatch.setattr(dist, "all_reduce", None)

        def test_after_monkeypatch(rank):
            assert "PATCHED" not in os.environ
            assert Recipe("fast").shout() == "FAST"
            assert callable(dist.all_reduce)

        @pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
        def test_expected_to_fail(rank):
            assert 1 / rank.index
    """
    conftest = """
        import pytest

        WORD = "conftest"

        @pytest.fixture
        def of_conftest():
            return lambda index: f"{WORD} {index}"
    """
    run = fleet(module, files={"conftest.py": conftest})
    assert run.status == 0, run.text
    assert {name for name, outcome in run.outcomes.items() if outcome != "passed"} == {"test_expected_to_fail"}


@pytest.fixture(scope="module")
def failures(fleet):
    module = """
        import functools
        import threading
        import unittest

        import pytest

        pytestmark = pytest.mark.spmd

        @pytest.fixture
        def guard():
            return threading.Lock()

        def test_lists(rank):
            left, right = [1, 2, 3], [1, 2, 3 + rank.index]
            assert left == right, "they should agree"

        def test_texts(rank):
            assert "100 % of one\\nand two" == "100 % of one\\nand three"

        def test_operands(rank):
            assert rank.index < rank.size - 1

        def test_fixture_that_stays(rank, guard):
            pass

        def test_fixture_world(rank, world): pass
        def test_fixture_capsys(rank, capsys): pass
        def test_fixture_request(rank, request): pass

        @pytest.fixture
        def too_early(rank):
            return rank.index

        def test_fixture_that_uses_rank(too_early):
            pass

        def test_fail(rank):
            pytest.fail("given up")

        async def test_async(rank):
            assert False

        def test_returned_value(rank):
            return False

        def generator(rank):
            assert False
            yield

        @functools.wraps(generator)
        def test_hidden_generator(rank):
            return generator(rank)

        class TestUnit(unittest.TestCase):
            def test_unittest(self):
                pass

        def test_called_by_another_plugin(rank):
            assert False

        def test_fine_again(rank):
            assert rank.size == 2
    """
    forgotten = """
        import torch
        import torch.distributed as dist

        def test_forgotten_marker(nccl_group):
            dist.all_reduce(torch.ones(1), group=nccl_group)

        def test_forgotten_marker_and_rank(rank):
            assert rank.index == 0
    """
    conftest = """
        import pytest

        @pytest.hookimpl(tryfirst=True)
        def pytest_pyfunc_call(pyfuncitem):
            return True if pyfuncitem.name == "test_called_by_another_plugin" else None
    """
    return fleet(module, files={"conftest.py": conftest, "test_forgotten.py": forgotten})


@pytest.mark.parametrize(("name", "words"), [
    ("lists", ["rank 1 of 2, CPU: raised AssertionError: they should agree", "rank 0 of 2, CPU: returned",
               "assert [1, 2, 3] == [1, 2, 4]", "At index 2 diff: 3 != 4"]),
    ("texts", ["100 % of one", "- and three", "+ and two"]),
    ("operands", ["rank 1 of 2, CPU: raised", "assert 1 < (2 - 1)", "where 1 = ", ".index"]),
    ("fixture_that_stays", ["cannot be sent to the ranks: ", "guard (lock)"]),
    ("fixture_world", ["cannot use world", "call world.run(function)"]),
    ("fixture_capsys", ["cannot use capsys", "redirect_stdout"]),
    ("fixture_request", ["cannot use request", "have a fixture of yours use it"]),
    ("fixture_that_uses_rank", ["rank.index is known on ranks only"]),
    ("fail", ["given up", "in test_fail"]),
    ("async", ["the body of an spmd test cannot be async"]),
    ("returned_value", ["must return None", "on rank 0 it returned a value of type bool"]),
    ("hidden_generator", ["must return None", "type generator"]),
    ("unittest", ["a method of unittest.TestCase cannot be spmd"]),
    ("called_by_another_plugin", ["ran on no rank"]),
    ("forgotten_marker", ["nccl_group.allreduce", "@pytest.mark.spmd", "nccl_group.run(function)"]),
    ("forgotten_marker_and_rank", ["only in tests marked @pytest.mark.spmd"]),
])  # fmt: skip
def test_failure_of_a_body_explains_itself(failures, name, words):
    check = failures.check(f"test_{name}")
    assert check.outcome == "failed"
    assert [word for word in words if word not in check.message] == [], check.message
    assert [word for word in words if word not in failures.text] == []


def test_a_failing_body_costs_one_test_and_shows_no_frame_of_the_plugin(failures):
    assert failures.check("test_fine_again").outcome == "passed"
    shown = [check.message for check in failures.record.checks.values()]
    assert [text for text in shown if "pytest_gpufleet/" in text or "torch/distributed" in text] == []

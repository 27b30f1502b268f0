"""Bodies of tests marked spmd: their way to the ranks and the story of their failure back."""

import inspect
import unittest
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from pytest_gpufleet.plugin import compat
from pytest_gpufleet.world.call import CannotTravel
from pytest_gpufleet.world.failure import RankFailure
from pytest_gpufleet.world.world import NoProcessGroup, Rank, World


class OnRank:
    """Stands in the controller for the fixture `rank`, which exists only on ranks."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself asks what this can do
            raise AttributeError(name)
        pytest.fail(
            f"rank.{name} is known on ranks only, and fixtures are made in pytest's own process: use rank in the body "
            "of the test, or in a function that the fixture gives to it",
            pytrace=False,
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("it leads to objects of pytest, or to the fixture rank, which only the body of a test can use")


# The fixtures of pytest and of this plugin that work in the controller alone, and what does the same in a body.
STAY = {
    ("capsys", "capfd", "capsysbinary", "capfdbinary", "capteesys"):
        "catch what the body prints by contextlib.redirect_stdout(io.StringIO()) within it",
    ("caplog",): "records are shown with a failure anyway; to look at them add a logging.Handler within the body",
    ("recwarn",): "use pytest.warns or warnings.catch_warnings(record=True) within the body",
    ("request", "pytestconfig", "cache", "pytester"):
        "have a fixture of yours use it, which gives the body plain values",
    ("judge", "burn_in", "power_steps", "record_fingerprints", "record_transport", "record_property",
     "record_xml_attribute", "record_testsuite_property", "subtests", "world"):
        "leave out the marker, call world.run(function) and use it with what that returns",
}  # fmt: skip

# The fixtures that each rank fills in itself, and what stands for them in the controller.
FILLED_IN: dict[str, tuple[type, Callable[[Rank], object]]] = {
    "rank": (OnRank, lambda rank: rank),
    "nccl_group": (World, lambda rank: rank.group),
    "monkeypatch": (pytest.MonkeyPatch, lambda rank: pytest.MonkeyPatch()),
}


def run_body(item: pytest.Function, world: World) -> None:
    """Run the body of an spmd test on every rank of `world`. Raises what World.run raises."""
    __tracebackhide__ = True
    given, function = {name: item.funcargs[name] for name in compat.argument_names(item)}, item.obj
    filled = [name for name in given if name in FILLED_IN and isinstance(given[name], FILLED_IN[name][0])]

    def call(rank: Rank, *, filled_in: list[str], fixtures: dict[str, Any]) -> str:
        """The type of what the function returned, "" if that is None."""
        __tracebackhide__ = True
        own = {name: FILLED_IN[name][1](rank) for name in filled_in}
        try:
            returned = function(**fixtures, **own)
        finally:
            if isinstance(monkeypatch := own.get("monkeypatch"), pytest.MonkeyPatch):
                monkeypatch.undo()
        return "" if returned is None else type(returned).__name__

    call.__qualname__ = getattr(function, "__qualname__", item.name)  # as reports name it
    fixtures = {name: value for name, value in given.items() if name not in filled}
    for rank, returned in enumerate(world.run(call, filled_in=filled, fixtures=fixtures)):
        if returned:
            pytest.fail(
                f"the body of an spmd test must return None, since nothing looks at what it returns: on rank {rank} it "
                f"returned a value of type {returned}",
                pytrace=False,
            )


def refuse(item: pytest.Item) -> None:
    """Fail a test marked spmd whose body no rank could run."""
    function, why = getattr(item, "obj", None), ""
    for name in compat.argument_names(item):
        made_by = [definition.func.__module__ for definition in compat.fixture_definitions(item).get(name, ())]
        ours = made_by[-1:] and made_by[-1].startswith(("_pytest.", "pytest_gpufleet."))
        instead = next((each for names, each in STAY.items() if name in names), "")
        if instead and (ours or name == "request"):  # which nobody may define
            why = f"the body of an spmd test, which runs on ranks, cannot use {name}: {instead}"
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        why = "the body of an spmd test cannot be async, since nothing awaits it on a rank"
    if isinstance(cls := getattr(item, "cls", None), type) and issubclass(cls, unittest.TestCase):
        why = (
            "a method of unittest.TestCase cannot be spmd, since unittest itself calls it, in the controller: make it "
            "a function or a method of a plain class"
        )
    if why:
        pytest.fail(why, pytrace=False)


def explain(item: pytest.Item, error: BaseException, report: pytest.TestReport) -> None:
    """What no frame of the controller says more of: the story that the ranks of an spmd test tell, what kept its body
    from them, and a call of torch with what is no process group."""
    of_ranks = isinstance(error, (RankFailure, CannotTravel)) and item.get_closest_marker("spmd")
    if report.failed and (of_ranks or isinstance(error, NoProcessGroup)):
        report.longrepr = str(error)

"""Bodies of tests marked spmd: their way to the ranks and the story of their failure back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from pytest_gpufleet.world.failures import RankFailure
from pytest_gpufleet.world.pool import Pool
from pytest_gpufleet.world.rank import Rank
from pytest_gpufleet.world.world import World

# The fixtures that each rank fills in itself.
FILLED_IN: dict[str, Callable[[Rank], object]] = {
    "rank": lambda rank: rank,
    "nccl_group": lambda rank: rank.group,
}


class OnRank:
    """Stands in the controller for the fixture `rank`, which exists only on ranks."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("an spmd test gets its rank from the rank itself")


class Body:
    """A test function with its fixtures, called on a rank; it bears the function's name in reports."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__qualname__ = function.__qualname__

    def __call__(self, rank: Rank, *, filled_in: list[str], fixtures: dict[str, Any]) -> None:
        self.function(**fixtures, **{name: FILLED_IN[name](rank) for name in filled_in})


def run_body(item: pytest.Function, world: World) -> None:
    """Run the body of an spmd test on every rank of `world`. Raises what World.run raises."""
    __tracebackhide__ = True
    names = item._fixtureinfo.argnames
    world.run(
        Body(item.obj),
        filled_in=[name for name in names if name in FILLED_IN],
        fixtures={name: item.funcargs[name] for name in names if name not in FILLED_IN},
    )


def world_size(item: pytest.Item, pool: Pool) -> int:
    """How many ranks a test gets: all, or as many as its marker world_size says. Skips it if there are fewer."""
    available = len(pool.specs)
    marker = item.get_closest_marker("world_size")
    if marker is None:
        return available
    wanted = marker.args[0] if len(marker.args) == 1 else None
    if not isinstance(wanted, int) or wanted < 1:
        pytest.fail("world_size() takes a number of ranks, 1 or more", pytrace=False)
    if wanted > available:
        pytest.skip(f"needs {wanted} ranks, this run has {available}")
    return wanted


def explain(item: pytest.Item, error: BaseException, report: pytest.TestReport) -> None:
    """An spmd test failed on ranks: its report is their story, since no frame of the controller says more."""
    if isinstance(error, RankFailure) and item.get_closest_marker("spmd") and report.failed:
        report.longrepr = str(error)

"""Whose a fixture or a marker is: names like world, rank, judge and level are not ours alone."""

from __future__ import annotations

import pytest

from pytest_gpufleet.plugin import compat
from pytest_gpufleet.plugin.keys import RUN

FIXTURES = "pytest_gpufleet.plugin.fixtures"
OF_RANKS = ("world", "nccl_group", "rank")  # behind them there are ranks


def ours(item: pytest.Item, name: str) -> bool:
    """Whether a test gets the fixture of this name from here, and not one of the same name that is somebody else's."""
    if name not in getattr(item, "fixturenames", ()):
        return False
    for definition in reversed(compat.fixture_definitions(item).get(name, ())):
        if definition.func.__module__ == FIXTURES:
            return True
        if name not in definition.argnames:  # else it is made of the one that it hides
            return False
    return False


def is_built_in(item: pytest.Item, name: str) -> bool:
    """Whether the fixture of this name that a test gets is pytest's own or from here."""
    if name == "request":  # which nobody may define
        return True
    definitions = compat.fixture_definitions(item).get(name, ())
    return bool(definitions) and definitions[-1].func.__module__.startswith(("_pytest.", "pytest_gpufleet."))


def is_spmd(item: pytest.Item) -> bool:
    """Whether the body of a test is for the ranks. With none of our options and fixtures the marker is not ours."""
    asked = item.config.stash[RUN].options.asked
    return item.get_closest_marker("spmd") is not None and (asked or any(ours(item, name) for name in OF_RANKS))


def uses_ranks(item: pytest.Item) -> bool:
    return is_spmd(item) or any(ours(item, name) for name in OF_RANKS)


def is_between_nodes(item: pytest.Item) -> bool:
    """Whether a test is about several nodes together. All others are about one, and in a run on many each node runs
    them by itself."""
    return any(marker.kwargs.get("nodes", 1) > 1 for marker in item.iter_markers("needs"))

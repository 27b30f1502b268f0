"""The markers of this plugin, as `pytest --markers` shows them, and which tests they and our fixtures make ours: names
like world, rank, judge and level are those of others too."""

from __future__ import annotations

import pytest

from pytest_gpufleet.plugin import compat
from pytest_gpufleet.plugin.keys import RUN

FIXTURES = "pytest_gpufleet.plugin.fixtures"
OF_RANKS = ("world", "nccl_group", "rank")  # behind them there are ranks
MARKERS = (
    "spmd: run the body of this test on every rank; its argument `rank` says which one it is",
    "world_size(n): run this test on n ranks only; skipped where there are fewer",
    "level(name): run this test at this level and above only (quick, standard, burnin)",
    "fresh_world: start new rank processes for this test",
    "at_the_end: run this test after all others, whatever order was asked for",
    "host_alone: nodes of a run that are one host, and runs beside each other on it, run this test one after the other",
    "needs(ranks=, capability=, gpus=, nodes=): where there are fewer ranks, a GPU of a lower compute capability, no "
    "GPUs but CPU ranks, or fewer nodes, this test does not apply",
    "figures(metric, ..., of_several=(), required=(), of='', peers=''): what this test is there for; one of the suite "
    "that passed without them is not done. `of_several`: those that take several GPUs. How they are judged, in words "
    "for docs/checks.md: a limit for one of `required` must be there, `of` which of its figures; which are held "
    "against those of the `peers`, '' for all, None for none",
    "chapter(title, question): where this test of the suite stands in the report",
    "proves_sound: a machine of which no test with this mark ran is not known to be good",
)


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

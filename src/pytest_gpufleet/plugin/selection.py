"""Which checks a run that was asked for has: those of its level, without those that an earlier run has done."""

from __future__ import annotations

import pytest

from pytest_gpufleet.model import levels, suite
from pytest_gpufleet.plugin import ownership
from pytest_gpufleet.plugin.keys import RUN


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    run = config.stash[RUN]
    if run.carried:
        items[:] = [item for item in items if suite.shipped().known_as(item.nodeid) not in run.carried]
    items.sort(key=lambda item: item.get_closest_marker("at_the_end") is not None)
    if run.options.nodes is not None:  # each node by itself first
        items.sort(key=ownership.is_between_nodes)
    above = [item for item in items if not levels.includes(run.options.level, level_of(item))]
    if above:
        config.hook.pytest_deselected(items=above)
        items[:] = [item for item in items if item not in above]


def pytest_collection_finish(session: pytest.Session) -> None:
    if names := suite.altered({item.path for item in session.items}):
        session.config.stash[RUN].record_event("suite", altered=names)


def pytest_deselected(items: list[pytest.Item]) -> None:
    for config in {item.config for item in items}:
        run = config.stash[RUN]
        wanted = [item.nodeid for item in items if levels.includes(run.options.level, level_of(item))]
        if wanted:  # what the level does not ask for is not missing
            run.record_event("deselected", checks=wanted)


def level_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("level")
    if marker is None:
        return "quick"
    if marker.args not in [(name,) for name in levels.LEVELS]:
        raise pytest.UsageError(f"{item.nodeid}: level() takes one of {', '.join(levels.LEVELS)}")
    return str(marker.args[0])

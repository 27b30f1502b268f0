"""The limits of pytest-timeout, where a test works on ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pytest_gpufleet.plugin import ownership
from pytest_gpufleet.plugin.keys import RUN


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """pytest-timeout's limit of a test becomes the deadline of its ranks, so that a hang is told by rank.

    Its own timer stays behind it, for a test that hangs in the controller.
    """
    run = item.config.stash[RUN]
    if run.options.makes_a_run and run.options.nodes is not None and not ownership.is_between_nodes(item):
        return True  # each node's own run holds it
    if not ownership.uses_ranks(item):
        return None
    import pytest_timeout

    run.ranks.test_deadline = time.monotonic() + settings.timeout
    return bool(pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=settings.timeout + 5)))


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    item.config.stash[RUN].ranks.test_deadline = None

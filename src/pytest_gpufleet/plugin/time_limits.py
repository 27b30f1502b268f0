"""The limits of pytest-timeout, where a test works on ranks."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest

from pytest_gpufleet.plugin import markers
from pytest_gpufleet.plugin.keys import RUN

GRACE_SECONDS = 5.0  # for ranks that hang to be asked what they do, and killed


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """pytest-timeout's limit of a test becomes the deadline of its ranks, so that a hang is told by rank.

    Its own timer comes GRACE_SECONDS later, for a test that hangs in the controller.
    """
    run = item.config.stash[RUN]
    if run.options.makes_a_run and run.options.nodes is not None and not markers.is_between_nodes(item):
        return True  # each node's own run holds it
    if not markers.uses_ranks(item):
        return None
    import pytest_timeout

    run.ranks.test_deadline = time.monotonic() + settings.timeout
    later = settings.timeout + GRACE_SECONDS
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return bool(pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=later)))
    pytest_timeout.pytest_timeout_set_timer(item, settings)  # whose handler tells the limit that was given
    signal.setitimer(signal.ITIMER_REAL, later)
    return True


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    item.config.stash[RUN].ranks.test_deadline = None

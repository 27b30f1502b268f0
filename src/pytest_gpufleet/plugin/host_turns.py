"""Tests that need the host to themselves: on nodes of one run that are one host, and in runs beside each other there,
one has its turn after the other."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

import pytest

from pytest_gpufleet.plugin.keys import RUN
from pytest_gpufleet.run.run import Run


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the timer of pytest-timeout: waiting is not the test's own time
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    run = item.config.stash[RUN]
    if item.get_closest_marker("host_alone") is None or not _takes_turns(run):
        return (yield)
    from pytest_gpufleet.hardware import host_turn

    with host_turn.taken(partial(_tell, run, item.nodeid)):
        if run.sampling is not None:
            run.sampling.end_of_check()  # nor are the GPUs' readings meanwhile those of the test
        return (yield)


def _takes_turns(run: Run) -> bool:
    """Not the run on many nodes, where each node's own run does; nor CPU ranks, which measure nothing that counts."""
    return run.evidence is not None and run.options.nodes is None and bool(run.ground.topology.gpus)


def _tell(run: Run, check: str, holder: str) -> None:
    run.tell(f"{check} needs this host to itself and waits for {holder}")

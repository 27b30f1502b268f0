"""Tests that need the host to themselves: on nodes of one run that are one host, and in runs beside each other there,
one has its turn after the other."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

import pytest

from pytest_gpufleet.plugin.keys import KEPT_FROM_TURNS, RUN
from pytest_gpufleet.run.run import Run

GPUS_A_HOST = 8  # of HGX: as many nodes of a run may be one host, and each has its turn before the last one


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the timer of pytest-timeout: waiting is not the test's own time
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    run, stash = item.config.stash[RUN], item.config.stash
    if item.get_closest_marker("host_alone") is None or not _takes_turns(run) or KEPT_FROM_TURNS in stash:
        return (yield)
    from pytest_gpufleet.hardware import locks

    with locks.taken(partial(_tell, run, item.nodeid), _most_seconds(run)) as kept_by:
        if kept_by:
            stash[KEPT_FROM_TURNS] = True  # nobody waits as long for each of the other tests
            assert run.evidence is not None
            run.evidence.spoil(f"checks that need this host to themselves had no turn, which was kept by {kept_by}")
        if run.sampling is not None:
            run.sampling.end_of_check()  # nor are the GPUs' readings meanwhile those of the test
        return (yield)


def _takes_turns(run: Run) -> bool:
    """Not the run on many nodes, where each node's own run does; nor CPU ranks, which measure nothing that counts."""
    return run.evidence is not None and run.options.nodes is None and bool(run.ground.topology.gpus)


def _most_seconds(run: Run) -> float:
    """DCGM's diagnostic is the longest check that takes turns, and has a deadline of its own."""
    from pytest_gpufleet.hardware import dcgm

    return GPUS_A_HOST * dcgm.SECONDS[run.options.dcgm]


def _tell(run: Run, check: str, holder: str) -> None:
    run.tell(f"{check} needs this host to itself and waits for {holder}")

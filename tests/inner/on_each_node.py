"""Checks of one machine, for a run on three nodes: each plays a part that no other has."""

import os
import signal
import time
from functools import cache
from pathlib import Path

import pytest

from pytest_gpufleet.model.endings import not_applicable

BROUGHT = "runs/*/nodes/*/report.html"  # the last file of a node


@cache
def part():
    for name in ("fails", "ends", "is lost"):
        try:
            os.mkdir(name)
            return name
        except FileExistsError:
            pass
    return ""


def test_on_ranks(world):
    assert world.run(lambda rank: (rank.index, rank.node)) == [(0, 0)]


def test_does_not_apply():
    not_applicable("no such thing")


def test_does_not_apply_on_one():
    if part() == "fails":
        not_applicable("no such thing")


def test_skipped_on_one():
    if part() == "fails":
        pytest.skip("not here")


@pytest.mark.parametrize("name", ["a b", "c[d]", "e::f"])
def test_cases(name):
    pass


def test_fails_on_one():
    assert part() != "fails", "this node is wrong"


def test_ends_on_one(capfd):
    if part() == "ends":
        with capfd.disabled():
            print("its last words", flush=True)
        os._exit(9)


def test_after_one_has_ended():
    pass


def test_one_is_lost():
    if part() == "is lost":
        while not any(Path().glob(BROUGHT)):  # the node that fails has come to its end
            time.sleep(0.05)
        os.kill(os.getppid(), signal.SIGKILL)  # the agent that has started this run
        time.sleep(3600)


def test_after_one_was_lost():
    pass


@pytest.mark.needs(nodes=2)
def test_between_those_that_are_left(world):
    pass

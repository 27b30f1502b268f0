"""Checks that say who has come where, and stop there for as long as they have to.

Every node imports this file, so none imports torch before it needs it.
"""

import os
import socket
import time
from pathlib import Path

import pytest

from pytest_gpufleet import KiB, expect_none

TURN_SECONDS = 0.02
# A folder that all hosts share has others in it: who is where, and where nobody may go on yet. Of Ray's variables an
# agent has what its raylet has: there it is the parent of the folder in which the run was started.
SHARED = Path(os.environ.get("STATIONS", ".."))
AT, HELD = SHARED / "at", SHARED / "held"
NBYTES, SEED = 512 * KiB, 16
BETWEEN = pytest.mark.needs(nodes=2)


def arrive(station):
    (AT / f"{station} {socket.gethostname()} {os.getpid()}").touch()


def stop_at(station):
    arrive(station)
    while (HELD / station).exists():
        time.sleep(TURN_SECONDS)


def added_up(number):
    import torch

    total = torch.tensor([number])
    torch.distributed.all_reduce(total)
    return total.item()


def talk_at(rank, station):
    """As long as any rank has to stay, all exchange data. Where they are, by their numbers."""
    arrive(station)
    while added_up(float((HELD / station).exists())):
        pass
    return socket.gethostname()


def test_alone():
    stop_at("alone")


def test_alone_on_ranks(world):
    world.run(lambda rank: stop_at("alone on ranks"))


def test_then():
    pass


@BETWEEN
def test_together(nccl_group):
    nccl_group.run(talk_at, "together")


@BETWEEN
def test_later(nccl_group):
    nccl_group.run(talk_at, "later")


@BETWEEN
def test_last(nccl_group):
    (SHARED / "who").write_text(" ".join(nccl_group.run(talk_at, "last")))
    assert nccl_group.run(lambda rank: added_up(1.0)) == [nccl_group.size] * nccl_group.size


# As the suite measures, where no figure of CPU ranks is judged.


@BETWEEN
def test_rails(nccl_group):
    from pytest_gpufleet.probes.between_nodes import rail_bandwidth
    from pytest_gpufleet.probes.search.nodes import who_slows_rails

    nccl_group.run(talk_at, "rails")
    expect_none(who_slows_rails(nccl_group, rail_bandwidth(nccl_group, "all", NBYTES, SEED), NBYTES))


@BETWEEN
def test_pairs(nccl_group):
    from pytest_gpufleet.probes.between_nodes import pairs_of_nodes
    from pytest_gpufleet.probes.search.nodes import who_slows_nodes

    nccl_group.run(talk_at, "pairs")
    expect_none(who_slows_nodes(nccl_group, pairs_of_nodes(nccl_group, NBYTES, SEED), NBYTES))

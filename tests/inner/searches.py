"""Faults are planted in torch.distributed on the ranks, where they last until the world is a fresh one."""

import ctypes
import os
import re
import time

import pytest
import torch.distributed as dist

from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.place import THIS_NODE, Pair, Place
from pytest_gpufleet.probes.search import collective, collective as search_of_a_file
from pytest_gpufleet.probes.search.collective import Deadline

pytestmark = pytest.mark.fresh_world

USUAL, LONG = 0.02, 0.15  # seconds; what a busy machine adds is small beside the one and beside their difference
search_of_a_file.FASTER = 1.5  # the same work twice differs by several percent on a busy machine


class Slow:
    def __init__(self, work, seconds):
        self.work, self.seconds = work, seconds

    def wait(self):
        time.sleep(self.seconds)
        self.work.wait()


FILE = "/etc/of-another-machine.xml"


def topology_file():
    """As the C library has it, where NCCL looks."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return getenv(b"NCCL_TOPO_FILE")


def plant(rank, late=None, links=None, link=None, end=None, file=False):
    me, all_reduce, batch_isend_irecv = rank.index, dist.all_reduce, dist.batch_isend_irecv

    def slow_all_reduce(tensor, *args, **kwargs):
        time.sleep(LONG if me == late or (file and topology_file()) else USUAL)
        work = all_reduce(tensor, *args, **kwargs)
        after = LONG if me == end else USUAL
        if work is None and tensor.numel() > 1000:  # not those that only line ranks up
            time.sleep(after)
        return work and Slow(work, after)

    def slow_batch(ops):
        time.sleep(LONG if me == links or {me, ops[0].peer} == link else USUAL)
        return batch_isend_irecv(ops)

    dist.all_reduce, dist.batch_isend_irecv = slow_all_reduce, slow_batch


def fail(rank):
    def batch(ops):
        raise RuntimeError("no route")

    dist.batch_isend_irecv = batch


def find(group):
    found = collective.who_is_slow(group, GpuTopology(), "all_reduce", 1 << 16)
    print(*found, sep="\\n")
    return found


def cpu(index):
    return Place(0, "cpu", index)


@pytest.mark.parametrize(
    ("planted", "code", "subject", "words"),
    [
        ({"late": 2}, "straggler", cpu(2), r".*ms late to every all_reduce"),
        ({"links": 2}, "links_slow", cpu(2), r"every pair with it takes .* us, all others "),
        ({"link": {1, 3}}, "link_slow", Pair(cpu(1), cpu(3)), ""),
        ({"end": 1}, "slows_collectives", cpu(1), r".*without any other "),
    ],
    ids=["late", "links", "link", "end"],
)
def test_a_single_one(nccl_group, planted, code, subject, words):
    nccl_group.run(plant, **planted)
    (found,) = find(nccl_group)
    assert (found.name, found.subjects) == (code, (subject,))
    assert re.match(words, found.what)


def test_no_single_one_where_all_are_slow(nccl_group):
    nccl_group.run(plant)
    found = find(nccl_group)
    assert {(each.name, each.subjects) for each in found} == {("cause_unclear", ())}
    pairs, others, variables = (each.what for each in found)
    assert pairs.startswith("no single GPU: each of the 6 pairs takes ")
    assert others.startswith("without any one rank all_reduce reaches ")
    assert "among ranks 0 to 1 " in others
    assert "among ranks 2 to 3 " in others
    assert variables == "variables that steer NCCL are set: NCCL_ALGO=Ring"


@pytest.fixture
def file_of_another_machine(nccl_group, monkeypatch):
    monkeypatch.setenv("NCCL_TOPO_FILE", FILE)
    nccl_group.run(lambda rank: os.environ.update(NCCL_TOPO_FILE=FILE))
    yield
    assert nccl_group.run(lambda rank: topology_file()) == [FILE.encode()] * 4


def test_a_topology_file_that_slows_all(nccl_group, file_of_another_machine):
    nccl_group.run(plant, file=True)
    (found,) = search_of_a_file.without_topology_file(nccl_group, "all_reduce", 1 << 16, Deadline())
    assert (found.name, found.subjects) == ("harmful_variable", (THIS_NODE,))
    assert found.what.startswith(f"without NCCL_TOPO_FILE={FILE} all_reduce reaches ")


def test_a_topology_file_that_slows_nobody(nccl_group, file_of_another_machine):
    """It is looked at where no single one was found, and comes first of what is found."""
    nccl_group.run(plant)
    found, *_ = find(nccl_group)
    assert (found.name, found.subjects) == ("cause_unclear", ())
    assert found.what.startswith(f"without NCCL_TOPO_FILE={FILE} all_reduce reaches ")


@pytest.mark.world_size(2)
def test_no_single_one_of_two(nccl_group):
    nccl_group.run(plant, links=1)
    found, *_ = find(nccl_group)
    assert found.what.startswith("with two ranks it can be either: their link takes ")


@pytest.mark.world_size(3)
def test_a_search_that_fails(nccl_group):
    nccl_group.run(plant)  # beside which no rank is late on a busy machine
    nccl_group.run(fail)
    found, *_ = find(nccl_group)
    assert found.what.startswith("the search for the cause failed: RankFailure")
    assert "RuntimeError: no route" in found.what
    assert nccl_group.run(lambda rank: rank.index) == [0, 1, 2]  # the next check has its ranks

"""Every fault costs one test, names the rank that caused it, and leaves a world that works."""

import re
from pathlib import Path

import pytest
import torch._C._distributed_c10d as c10d

from pytest_gpufleet.model.place import Place

from .faults import CULPRIT, FAULTS, RANKS

CODES = {"crash": "rank_died", "exception": "rank_raised", "hang": "rank_hung"}
INNER = """
import pytest
from faults import FAULTS, HANG_SECONDS, RANKS, all_reduce, cause

STEPS = [(name, step) for name, fault in FAULTS.items() if not fault.needs_gpu for step in ("fault", "next")]

@pytest.mark.parametrize(("name", "step"), STEPS)
def test_it(nccl_group, name, step):
    if step == "fault":
        nccl_group.run(all_reduce)  # the group is there before anything goes wrong
        nccl_group.run(cause, name, timeout=HANG_SECONDS if FAULTS[name].kind in ("hang", "") else None)
    else:
        assert nccl_group.run(all_reduce) == [RANKS * (RANKS + 1) // 2] * RANKS
"""


@pytest.fixture(scope="module")
def suite(fleet):
    return fleet(INNER, "--fleet-timeout=60", ranks=RANKS, files={"faults.py": Path(__file__).with_name("faults.py")})


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if not fault.needs_gpu])
def test_costs_one_test_and_names_the_rank(suite, name):
    check = suite.check(f"test_it[{name}-fault]")
    assert check.outcome == "failed", suite.text
    fault, (found,) = FAULTS[name], [each for each in suite.record.faults if each.check == check.id]
    assert not fault.kind or found.name == CODES[fault.kind], check.message
    for words in fault.says:
        assert words in check.message, check.message
    assert fault.kind != "hang" or "worker/main.py" not in check.message  # of its stack only what it was given to do
    if fault.kind and fault.others != "same":
        assert found.subjects == (Place(0, "cpu", CULPRIT),)
        assert check.message.startswith(f"rank {CULPRIT} of {RANKS}")
    assert suite.check(f"test_it[{name}-next]").outcome == "passed", suite.text  # in a world that works


UNEQUAL = """
import time

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.fresh_world  # every count begins at 0
LATE = 3

def all_reduce(rank, times=1):
    for _ in range(times):
        dist.all_reduce(torch.ones(1), group=rank.group)

def never_comes(rank):
    if rank.index == LATE:
        time.sleep(3600)
    all_reduce(rank)

def sends_and_never_comes(rank):
    if rank.index == LATE:
        for other in range(LATE):
            dist.send(torch.ones(1), other, group=rank.group)
    else:
        dist.recv(torch.ones(1), LATE, group=rank.group)
    never_comes(rank)

def test_after_calls_of_a_few(nccl_group):
    nccl_group.subset([2, 3]).run(all_reduce, 3)
    nccl_group.run(never_comes, timeout=1)

def test_after_a_group_that_counts_less(nccl_group):
    nccl_group.run(all_reduce, 9)
    nccl_group.subset([2, 3]).run(all_reduce)
    nccl_group.run(never_comes, timeout=1)

def test_after_sending(nccl_group):
    nccl_group.run(sends_and_never_comes, timeout=1)
"""


HANGS = re.findall(r"^def (test_\w+)", UNEQUAL, re.MULTILINE)


@pytest.fixture(scope="module")
def unequal(fleet):
    """Hangs of ranks that have not called equally many collectives before, as ranks may."""
    return fleet(UNEQUAL, ranks=RANKS)


@pytest.mark.skipif(not hasattr(c10d, "_dump_fr_trace_json"), reason="this torch records no flight of Gloo")
@pytest.mark.parametrize("name", HANGS)
def test_the_flight_recorder_compares_within_one_group(unequal, name):
    message = unequal.check(name).message
    assert message.startswith("rank 3 of 4"), message
    (line,) = (line for line in message.splitlines() if line.startswith("flight recorder: "))
    assert line.startswith("flight recorder: ranks 0, 1, 2 arrived at collective number ")
    assert "; rank 3 did not: only at number " in line

"""Every fault costs one call, names the rank that caused it, and leaves a world that works."""

import time

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from pytest_gpufleet import RankFailure

from .faults import CULPRIT, FAULTS, HANG_SECONDS, RANKS, all_reduce, cause

CODES = {"crash": "rank_died", "exception": "rank_raised", "hang": "rank_hung"}


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if not fault.needs_gpu])
def test_costs_one_call_and_names_the_rank(worlds, name):
    group, fault = worlds(1, RANKS), FAULTS[name]
    assert group.run(all_reduce) == [RANKS * (RANKS + 1) // 2] * RANKS  # also after the fault before this one
    with pytest.raises(RankFailure) as failure:
        group.run(cause, name, timeout=HANG_SECONDS if fault.kind in ("hang", "") else 60)
    message, found = str(failure.value), failure.value.fault(group.places)
    assert not fault.kind or found.name == CODES[fault.kind], message
    for words in fault.says:
        assert words in message, message
    assert fault.kind != "hang" or "worker/main.py" not in message  # of its stack only what it was given to do
    if fault.kind and fault.others != "same":
        assert found.subjects == (group.places[CULPRIT],)
        assert message.startswith(f"rank {CULPRIT} of {RANKS}")


def some_all_reduces(rank, times=1):
    for _ in range(times):
        dist.all_reduce(torch.ones(1), group=rank.group)


def last_one_never_comes(rank):
    if rank.index == rank.size - 1:
        time.sleep(3600)
    some_all_reduces(rank)


def last_one_sends_and_never_comes(rank):
    last = rank.size - 1
    if rank.index == last:
        for other in range(last):
            dist.send(torch.ones(1), other, group=rank.group)
    else:
        dist.recv(torch.ones(1), last, group=rank.group)
    last_one_never_comes(rank)


# What ranks have called before: not equally many collectives, as ranks may.
BEFORE = {
    "calls of a few": (lambda group: group.subset([2, 3]).run(some_all_reduces, 3), last_one_never_comes),
    "a group that counts less": (
        lambda group: (group.run(some_all_reduces, 9), group.subset([2, 3]).run(some_all_reduces)),
        last_one_never_comes,
    ),
    "sending": (lambda group: None, last_one_sends_and_never_comes),
}


@pytest.mark.skipif(not hasattr(c10d, "_dump_fr_trace_json"), reason="this torch records no flight of Gloo")
@pytest.mark.parametrize(("before", "hang"), BEFORE.values(), ids=BEFORE)
def test_the_flight_recorder_compares_within_one_group(on_ranks, before, hang):
    group = on_ranks(1, RANKS)  # every count begins at 0
    before(group)
    with pytest.raises(RankFailure, match=r"^rank 3 of 4") as failure:
        group.run(hang, timeout=HANG_SECONDS)
    (line,) = failure.value.notes
    assert line.startswith("flight recorder: ranks 0, 1, 2 arrived at collective number ")
    assert "; rank 3 did not: only at number " in line

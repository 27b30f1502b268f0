"""What the local engine promises to those above it: seen from there, with real processes."""

import os
import pickle
import signal
import time
from pathlib import Path

import pytest

from pytest_gpufleet.world import shipping
from pytest_gpufleet.world.call import START, Call
from pytest_gpufleet.world.engines.channel import INLINE_BYTES
from pytest_gpufleet.world.engines.local import DEFAULTS, ON_LOOPBACK, RECORDED, LocalEngine, recorder
from pytest_gpufleet.world.engines.protocol import Answer, Engine

from .fake_engine import specs

SECONDS = 60
RANKS = (0, 1)


@pytest.fixture(scope="module")
def of_module():
    engine = LocalEngine()
    yield engine
    engine.kill(SECONDS)


@pytest.fixture
def engine(of_module) -> Engine:
    of_module.start(specs(2))
    for answer in heard(of_module, 2):
        assert (pickle.loads(answer.parcel).kind, pickle.loads(answer.parcel).call) == ("returned", START)
    yield of_module
    assert of_module.kill(SECONDS) == {}


def heard(engine, count):
    """The next so many events."""
    events, deadline = [], time.monotonic() + SECONDS
    while len(events) < count and time.monotonic() < deadline:
        events += engine.wait(1.0)
    return events


def submit(engine, function, *args):
    work = shipping.pack_work(function, args, {})
    engine.submit(RANKS, shipping.pack(Call("it", (RANKS,), {0: 2}, False, work, number=7)))


def folder(engine):
    return Path(engine.rendezvous().removeprefix("file://")).parent


def test_large_parcels_are_gone_when_they_are_read(engine):
    value = b"x" * 10 * INLINE_BYTES
    submit(engine, lambda rank, value: (rank.index, value), value)
    answers = sorted(heard(engine, 2), key=lambda answer: answer.rank)
    assert [shipping.unpack(pickle.loads(each.parcel).result) for each in answers] == [(0, value), (1, value)]
    assert list(folder(engine).glob("*.parcel")) == []


def falls_silent(rank):
    import torch
    import torch.distributed as dist

    print("a last word", flush=True)
    with rank.phase("deep in thought"):
        if rank.index:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            dist.all_reduce(torch.ones(1))
        except ValueError:  # there is no process group
            while True:
                pass


def test_ranks_are_examined_as_they_are(engine):
    submit(engine, falls_silent)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        busy, stopped = (engine.examine(RANKS)[rank] for rank in RANKS)
        if "in falls_silent" in busy.stack and stopped.state:  # and not in what the collective calls any more
            break
    assert (busy.phase, busy.collective, busy.number, busy.state) == ("deep in thought", "all_reduce", 1, "")
    assert 0 <= busy.seconds < SECONDS
    assert "in falls_silent" in busy.stack
    assert "worker/main.py" not in busy.stack
    assert (stopped.phase, stopped.state) == ("deep in thought", "(stopped by a signal)")
    assert "in falls_silent" not in stopped.stack  # at most it is what an earlier look found it at
    assert "a last word" in busy.output
    assert "a last word" in stopped.output


def test_a_death_is_told_once_with_its_reason_and_leaves_its_trace(engine):
    submit(engine, lambda rank: os.abort() if rank.index else None)
    events = heard(engine, 2)
    (death,) = (event for event in events if not isinstance(event, Answer))
    assert (death.rank, death.reason) == (1, "by SIGABRT (Aborted)")
    assert "Fatal Python error: Aborted" in engine.examine([1])[1].stack
    assert engine.wait(0.0) == []


def test_nothing_is_left_of_ranks_that_are_killed(engine):
    made = folder(engine)
    assert made.stat().st_mode & 0o777 == 0o700
    assert engine.kill(SECONDS) == {}
    assert not made.exists()
    assert engine.kill(SECONDS) == {}


def test_a_process_that_is_forked_leaves_the_files_of_ranks_alone(engine):
    made = folder(engine)
    child = os.fork()
    if child == 0:
        engine.end()  # as it does when a process ends
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert made.exists()
    submit(engine, lambda rank: rank.index)
    assert len(heard(engine, 2)) == 2


def test_a_rank_finds_the_environment_of_the_controller_and_what_torchrun_sets(monkeypatch):
    defaults = {**DEFAULTS, recorder(): RECORDED}
    for name in defaults | ON_LOOPBACK:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    environment = LocalEngine().environment(specs(2, 3)[4])
    torchrun = {"RANK": "4", "LOCAL_RANK": "2", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "3"}
    mine = {**ON_LOOPBACK, "GLOO_SOCKET_IFNAME": "eth0"}
    assert environment == {**os.environ, **defaults, **mine, **torchrun}
    several = LocalEngine(lambda spec: {"GLOO_SOCKET_IFNAME": f"eth{spec.local_index}"}).environment(specs(2, 3)[4])
    assert several == {**os.environ, **defaults, "GLOO_SOCKET_IFNAME": "eth2", **torchrun}

"""Agents that are processes of this machine: real processes, which die, stop and do not read."""

import os
import signal
from contextlib import contextmanager

import pytest

from pytest_gpufleet.nodes.agent_process import AgentSettings
from pytest_gpufleet.nodes.cluster import Cluster
from pytest_gpufleet.nodes.messages import Rendezvous, Submit
from pytest_gpufleet.nodes.transport import LocalTransport
from pytest_gpufleet.world.engines import processes
from tests.nodes import stub_agent

LONG = 30.0


@contextmanager
def cluster(nodes: int, lost_after: float = LONG):
    settings = [AgentSettings(run_folder=".", name=f"gf{node}") for node in range(nodes)]
    made = Cluster(LocalTransport(settings, stub_agent.begin), beat_seconds=0.1, lost_after=lost_after)
    try:
        made.start(LONG)
        assert made.alive == tuple(range(nodes))
        yield made
    finally:
        made.close(4.0)


def news(of: Cluster) -> list:
    return of.rank_news(LONG)


def test_a_frozen_agent_is_lost_fenced_when_it_wakes_and_answers_then():
    with cluster(2, lost_after=1.0) as made:
        os.kill(made.hellos[0].pid, signal.SIGSTOP)
        made.send(0, Submit((0,), bytes(5_000_000)))  # more than a socket holds: nobody waits for it
        ((node, lost),) = news(made)
        assert (node, made.alive) == (0, (1,))
        assert "nothing was heard" in lost.why
        os.kill(made.hellos[0].pid, signal.SIGCONT)
        assert all(made.ask_one(node, Rendezvous(), LONG) for node in (0, 1))
        assert made.alive == (1,)
        assert made.rank_news(0) == []


@pytest.mark.parametrize("how", [signal.SIGCONT, signal.SIGSTOP])
def test_nothing_is_left_of_agents_and_what_they_have_started(how):
    with cluster(2) as made:
        agents = [hello.pid for hello in made.hellos.values()]
        children = [int(hello.host) for hello in made.hellos.values()]
        os.kill(agents[0], how)
        assert made.close(5.0) == {}
        assert not any(map(processes.look, [*agents, *children]))
        assert made.lost == {}
        assert made.close(1.0) == {}

"""Ranks on several nodes: what each node gets of them, and what becomes of them with it."""

import os
import pickle
import signal
import threading
from contextlib import contextmanager

import pytest

from pytest_gpufleet.model import codec
from pytest_gpufleet.nodes import messages
from pytest_gpufleet.nodes.cluster import Cluster, ClusterEngine
from pytest_gpufleet.nodes.launchers import AgentSettings, OwnAgents
from pytest_gpufleet.nodes.wire import Transport
from pytest_gpufleet.world.call import Answer, Death, Trace
from pytest_gpufleet.world.failure import RankFailure
from pytest_gpufleet.world.world import Pool, World
from tests.nodes.fake_transport import LONG, FakeTransport, running
from tests.world.fake_engine import specs


# ---------------------------------------------------------------- without processes
class AnsweringTransport(FakeTransport):
    """Nodes that answer questions as `answers` says, by the kind of question; without an entry they do not answer."""

    def __init__(self, nodes, **answers):
        super().__init__(nodes)
        self.answers = answers

    def send(self, node, message):
        super().send(node, message)
        told = self.sent[-1][1]
        if isinstance(told, messages.Ask) and (kind := type(told.question).__name__) in self.answers:
            answer = self.answers[kind](node, told.question)
            trouble = isinstance(answer, str) and answer.startswith("trouble")
            reply = messages.Reply(told.number, b"" if trouble else codec.packed(answer), answer if trouble else "")
            self._happened += 1
            self._steps.put((0.0, [(node, codec.packed(reply))]))


@contextmanager
def engine_on(transport, *ranks_of_nodes):
    with running(transport) as cluster:
        engine = ClusterEngine(cluster)
        engine.start(specs(*ranks_of_nodes))
        yield engine, cluster


NONE_LEFT = {"KillRanks": lambda node, question: {}}


def test_each_node_gets_its_own_ranks_and_a_parcel_once():
    transport = AnsweringTransport(3)
    with engine_on(transport, 2, 1, 2) as (engine, _):
        engine.submit((4, 0, 1), b"parcel")
    started = [pickle.loads(transport.told(node, messages.StartRanks)[0].specs) for node in range(3)]
    assert [[spec.index for spec in of_node] for of_node in started] == [[0, 1], [2], [3, 4]]
    submitted = [(node, told) for node in range(3) for told in transport.told(node, messages.Submit)]
    assert submitted == [(0, messages.Submit((0, 1), b"parcel")), (2, messages.Submit((4,), b"parcel"))]


def test_answers_and_deaths_come_once_as_they_are_and_with_a_node_all_of_its_ranks_die():
    transport = AnsweringTransport(2)
    with engine_on(transport, 1, 2) as (engine, _):
        transport.happens((1, Answer(2, b"hello")), (0, Death(0, "by SIGSEGV")))
        assert engine.wait(LONG) == [Answer(2, b"hello"), Death(0, "by SIGSEGV")]
        transport.happens((0, Death(0, "by SIGSEGV")), (1, Answer(1, b"last")))
        assert engine.wait(LONG) == [Answer(1, b"last")]
        assert engine.wait(0.0) == []
    transport = AnsweringTransport(2)
    with engine_on(transport, 1, 2) as (engine, _):
        transport.happens((1, Death(2, "by SIGBUS")), (1, "its agent died by SIGKILL"))
        assert engine.wait(LONG) == [Death(2, "by SIGBUS"), Death(1, "with its node, gf1: its agent died by SIGKILL")]


def test_a_start_takes_no_answers_of_ranks_before_and_those_of_a_lost_node_are_dead():
    transport = AnsweringTransport(2, **NONE_LEFT)
    with engine_on(transport, 1, 1) as (engine, _):
        transport.happens((1, "its agent died by SIGKILL"))
        assert engine.kill(1.0) == {}
        engine.start(specs(1, 1))
        assert engine.wait(0.0) == [Death(1, "with its node, gf1: its agent died by SIGKILL")]
        assert len(transport.told(1, messages.StartRanks)) == 1
    transport = AnsweringTransport(1, **NONE_LEFT)
    with engine_on(transport, 1) as (engine, _):
        transport.happens((0, Answer(0, b"too late")))
        engine.kill(1.0)
        engine.start(specs(1))
        assert engine.wait(0.0) == []


def test_a_node_where_ranks_cannot_meet_is_left_out_and_its_ranks_are_dead():
    transport = AnsweringTransport(2, Rendezvous=lambda node, question: "trouble: no port")
    with engine_on(transport, 1, 1) as (engine, cluster):
        engine.rendezvous()
        assert [event.rank for event in engine.wait(0.0)] == [0]
        assert list(cluster.left_out) == [0]
        cluster.leave_out(1, "its GPUs are taken")
        assert [event.rank for event in engine.wait(LONG)] == [1]


def test_ranks_are_examined_where_they_are():
    """Rank 1 is there no more, as where its node was left out meanwhile."""
    traces = {"Examine": lambda node, question: {rank: Trace(phase=f"on {node}") for rank in question.ranks[-1:]}}
    transport = AnsweringTransport(3, **traces)
    with engine_on(transport, 1, 2, 1) as (engine, _):
        transport.happens((2, "its agent died by SIGKILL"))
        seen = engine.examine((0, 1, 2, 3))
    assert {rank: trace.phase for rank, trace in seen.items()} == {0: "on 0", 1: "", 2: "on 1", 3: ""}
    assert "nothing can be seen of it" in seen[1].state
    assert "its agent died by SIGKILL" in seen[3].state


def test_nobody_waits_for_a_node_that_has_fallen_silent():
    transport = AnsweringTransport(2, **NONE_LEFT, Examine=lambda node, question: {0: Trace(phase="here")})
    with engine_on(transport, 1, 1) as (engine, cluster):
        for _ in range(11):
            transport.happens((0, messages.Pulse()), after=1.0)
        assert list(cluster.lost) == [1]
        asked = len(transport.told(1, messages.Ask))
        assert engine.examine((0, 1))[0].phase == "here"
        assert engine.kill(1.0) == {}
        assert (len(transport.told(1, messages.Ask)), cluster.left_out) == (asked, {})


@pytest.mark.parametrize(
    ("answer", "left"),
    [({1: "(stopped by a debugger)"}, {1: "(stopped by a debugger)"}), ("trouble: stuck", {})],
    ids=["one cannot be killed", "it cannot"],
)
def test_a_node_that_does_not_end_its_ranks_is_left_out(answer, left):
    transport = AnsweringTransport(2, KillRanks=lambda node, question: answer if node else {})
    with engine_on(transport, 1, 1) as (engine, cluster):
        assert engine.kill(1.0) == left
        assert list(cluster.left_out) == [1]


# ---------------------------------------------------------------- with two agents of this machine
@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    """A cluster of two agents, whose ranks are started anew by each test that uses `world`."""
    settings = [
        AgentSettings(
            str(tmp_path_factory.mktemp("run")), 2, keep_in=str(tmp_path_factory.getbasetemp()), name=f"gf{i}", index=i
        )
        for i in range(2)
    ]
    cluster = Cluster(Transport(OwnAgents("local", "loopback", bytes(32), settings)))
    cluster.start(LONG * 10)
    yield cluster
    assert cluster.close(LONG) == {}


@pytest.fixture
def world(agents):
    pool = Pool(ClusterEngine(agents), specs(2, 2), timeout=LONG * 10)
    yield World(pool, with_group=True)
    pool.stop()


def sums(rank, value):
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([rank.index + len(value)])
    dist.all_reduce(tensor, group=rank.group)
    return rank.node, os.getppid(), tensor.tolist()


def test_ranks_of_two_nodes_reduce_together_and_go_on_after_one_that_dies_and_is_named(agents, world):
    value = bytes(20 << 20)  # which travels once to each node
    results = world.run(sums, value)
    assert [node for node, _, _ in results] == [0, 0, 1, 1]
    assert len({forked_from for _, forked_from, _ in results}) == 2
    assert {total for _, _, (total,) in results} == {6 + 4 * len(value)}
    each = world.each(world.nodes, lambda rank: (rank.node, rank.index, rank.size))
    assert each == [[(0, 0, 2), (0, 1, 2)], [(1, 0, 2), (1, 1, 2)]]
    assert world.run(lambda rank: value) == [value] * 4
    with pytest.raises(RankFailure) as failure:
        world.run(kills_itself)
    assert (failure.value.kind, failure.value.reports[0].rank) == ("crash", 2)
    assert len(world.run(sums, b"")) == 4
    assert agents.alive == (0, 1)


def sum_of_all(rank):
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([rank.index + 1])
    dist.all_reduce(tensor)  # of the world that it is in
    return tensor.item(), dist.get_rank(), len(rank._groups)


def test_groups_of_ranks_of_several_nodes_are_worlds_of_their_own_that_all_members_leave_together(world):
    """Of two H200 as two nodes the one that got a world of its own did not come back from leaving that of both."""
    near, far = [[0, 1], [2, 3]], [[0, 2], [3]]
    for groups in (near, far, near, far):
        assert world.run(sum_of_all) == [(10, rank, 1) for rank in range(4)]
        assert [len(each) for each in world.each(groups, sum_of_all)] == [len(group) for group in groups]
    assert world.subset([1, 3]).run(sum_of_all) == [(3, 0, 1), (3, 1, 1)]  # 0 and 2 have had other groups than these
    assert world.subset([2, 3]).run(sum_of_all) == [(3, 0, 1), (3, 1, 1)]
    world.run(sum_of_all)
    assert len(world.subset([1, 3]).run(sum_of_all)) == 2
    assert World(world._pool, with_group=False).run(is_in_a_world) == [False, True, False, True]


def is_in_a_world(rank):
    import torch.distributed as dist

    return dist.is_initialized()


def two_meet(rank):
    from pytest_gpufleet.world.world import join_alone

    if rank.index < 2:
        join_alone(rank, [(0, 1)], 99, "")
    return sum_of_all(rank)[0] if rank.index < 2 else 0


def test_nobody_but_its_members_makes_a_world(world):
    world.run(sum_of_all)
    assert world.run(two_meet) == [3, 3, 0, 0]


def kills_itself(rank):
    if rank.node == 1 and rank.index == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    threading.Event().wait()

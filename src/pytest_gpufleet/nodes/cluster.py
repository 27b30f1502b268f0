"""The nodes of a run as its controller has them: who is there or lost, what each is sent and sends; and their ranks."""

import itertools
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.place import grouped
from pytest_gpufleet.nodes import messages
from pytest_gpufleet.nodes.messages import BEAT, BEAT_SECONDS, Hello, Listening, Pulse
from pytest_gpufleet.nodes.wire import Transport
from pytest_gpufleet.verdict.fleet.host_runs import Common
from pytest_gpufleet.world.call import Answer, Death, RankSpec, Trace

LOST_AFTER_SECONDS = 10.0  # a cable that is put back after 5 s costs nothing
T = TypeVar("T")
# A text: why the run goes on without the node, as it goes on where "gf1 is lost" ends: ": its agent died by SIGKILL".
RankNews = Answer | Death | str
SuiteNews = messages.CheckEnded | messages.SuiteEnded | str


class Cluster:
    """A thread of its own sends a Beat to all nodes, takes in what they send and notices who has gone silent. All else
    may be called by any thread, and waits no longer than its timeout. A node that is lost stays so. If it comes back it
    is fenced, as one that is left out: its ranks are killed, and until it is ended it only reports what its own run
    comes to, and answers questions (for its files)."""

    def __init__(
        self, transport: Transport, lost_after: float = LOST_AFTER_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.transport = transport
        self._clock = clock
        self._lost_after = lost_after
        self.listening = Listening(BEAT_SECONDS)
        self._common = Common()
        self._heard: dict[int, float] = {}  # the last of each node, in seconds of listening
        self._changed = threading.Condition()  # guards what follows
        # All by the number of the node. Each of these is replaced and never changed, so that any thread may read it,
        # but for the pulses, which come too often for that, and of which nobody asks for all.
        self.names: Mapping[int, str] = {}  # every node on which an agent was started
        self.hellos: Mapping[int, Hello] = {}
        self.pulses: dict[int, Pulse] = {}  # the last of each
        self.clocks_ahead: Mapping[int, float] = {}  # seconds that its clock is ahead of this one's
        self.lost: Mapping[int, str] = {}
        self.left_out: Mapping[int, str] = {}  # and why
        self._fenced: set[int] = set()  # lost and back, or left out: an agent is there that takes no part
        self._gone: set[int] = set()  # nothing reaches them any more
        self.rank_news: list[tuple[int, RankNews]] = []
        self.suite_news: list[tuple[int, SuiteNews]] = []
        self._numbers = itertools.count()
        self._asked: dict[int, messages.Reply | None] = {}
        self._closing = self._over = False
        self._thread = threading.Thread(target=self._listen, name="gpufleet nodes", daemon=True)

    def start(self, timeout: float) -> None:
        """Start all agents, and wait until each has said Hello or is lost, at the latest after `timeout` seconds."""
        self.names = self.transport.start()
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: not self.names.keys() - self.hellos.keys() - self.lost.keys(), timeout)
            for node in self.names.keys() - self.hellos.keys():
                self._lose(node, f"its agent has not started within {timeout:g} s")

    def takes_part(self, node: int) -> bool:
        return node in self.names and node not in self.lost and node not in self.left_out

    @property
    def alive(self) -> tuple[int, ...]:
        """The nodes that take part and have said Hello."""
        return tuple(sorted(filter(self.takes_part, self.hellos)))

    @property
    def _listening(self) -> set[int]:
        """Those whose agent hears what is sent to it, as far as one knows."""
        return self.names.keys() - self._gone - (self.lost.keys() - self._fenced)

    def send(self, node: int, message: messages.ToAgent) -> None:
        """To a node that takes part; else nothing is sent."""
        if self.takes_part(node):
            self.transport.send(node, codec.packed(message))

    def ask_each(
        self, questions: Mapping[int, messages.Asked], timeout: float = 10.0, also_lost: bool = False
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """What each node answers to its question, and why others do not. `also_lost`: lost ones too, if back."""
        with self._changed:
            there = [node for node in questions if node not in self._gone and (also_lost or node not in self.lost)]
            may_be_back = self.lost.keys() & there
            numbers = {node: next(self._numbers) for node in there}
            self._asked.update(dict.fromkeys(numbers.values()))
        for node, number in numbers.items():
            self.transport.send(node, codec.packed(messages.Ask(number, questions[node])))
        with self._changed:

            def settled() -> bool:
                silent = self._gone | (self.lost.keys() - may_be_back)
                while there and (self._asked[numbers[there[-1]]] or there[-1] in silent):
                    there.pop()
                return not there

            self._changed.wait_for(settled, timeout)
            replies = {node: self._asked.pop(number) for node, number in numbers.items()}
        answers, troubles = dict[int, Any](), dict[int, str]()
        for node, question in questions.items():
            if (reply := replies.get(node)) is None:
                gone = "its agent has ended" if node in self._gone else f"no answer within {timeout:g} s"
                troubles[node] = f"it is lost: {self.lost[node]}" if node in self.lost else gone
            elif reply.trouble:
                troubles[node] = reply.trouble
            else:
                try:
                    answers[node] = codec.unpacked(reply.answer, question.answer)
                except ValueError as error:
                    troubles[node] = f"it answered what is no answer: {error}"
        return answers, troubles

    def take(self, news: list[T], timeout: float) -> list[T]:
        """What is in `rank_news` or `suite_news`, as soon as anything is; [] after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: news, timeout)
            taken = news.copy()
            news.clear()
        return taken

    def leave_out(self, node: int, why: str) -> None:
        """Go on without a node that is there. Nothing for one that is lost."""
        with self._changed:
            if self.takes_part(node):
                self.left_out = {**self.left_out, node: why}
                self._fence(node)

    def close(self, timeout: float) -> dict[int, str]:
        """End all agents, after half of the time by force. Those of which nobody knows whether they ended, and why."""
        until = time.monotonic() + timeout
        with self._changed:
            self._closing = True
            for node in self.names.keys() - self._gone:
                self.transport.send(node, codec.packed(messages.End(messages.OVER)))
            if self._thread.is_alive():
                self._changed.wait_for(lambda: not self._listening, timeout / 2)
            self._over = True
        if self._thread.is_alive():
            self._thread.join(BEAT_SECONDS + 1.0)  # for what it does beside waiting
        unknown = self.names.keys() - self._gone - {*self.transport.starter.own}
        left = self.transport.close(max(0.0, until - time.monotonic()))
        return {**dict.fromkeys(unknown, "nothing is heard of it"), **left}

    def _listen(self) -> None:
        next_beat = 0.0
        try:
            while not self._over and (self._listening or not self._closing):
                if self._clock() >= next_beat:
                    with self._changed:
                        for node in self.alive:
                            if (silent := self.listening.seconds - self._heard[node]) >= self._lost_after:
                                self._lose(node, f"nothing was heard of it for {silent:.0f} s")
                        expected = self._listening
                    for node in expected:
                        self.transport.send(node, BEAT)
                    next_beat = self._clock() + BEAT_SECONDS
                events = self.transport.receive(max(0.0, next_beat - self._clock()))
                with self._changed:
                    self.listening.look(self._clock())
                    for event in events:
                        self._take_in(*event)
                    if events:
                        self._changed.notify_all()
        except Exception as error:  # or everybody would wait for nodes that nobody listens to
            with self._changed:
                for node in self.names:
                    self._gone.add(node)
                    self._lose(node, f"the controller cannot listen to it any more: {error!r}")

    def _take_in(self, node: int, packed: bytes | str) -> None:
        if isinstance(packed, str):
            self._gone.add(node)
            self._lose(node, packed)
            return
        try:
            message = codec.unpacked(packed, messages.FromAgent)
        except ValueError as error:
            self._lose(node, f"its agent sent what this version cannot read: {error}")
            return
        if isinstance(message, Pulse):
            self.suite_news += [(node, ended) for ended in message.ended]
        if not self.takes_part(node):
            if node not in self._fenced and not self._closing:
                self._fence(node)
            if not isinstance(message, messages.Reply | messages.End):
                return  # nothing else that the fenced send counts, but what their own runs come to
        match message:
            case Hello():
                topology, machine = self._common.topology(message.topology), self._common.machine(message.machine)
                hello = msgspec.structs.replace(message, topology=topology, machine=machine)
                self.hellos = {**self.hellos, node: hello}
            case Pulse(clock):
                # The longer it is on its way, the more its clock seems to be behind: the fastest one counts.
                self.pulses[node] = message
                ahead, before = clock - time.time(), self.clocks_ahead.get(node)
                if before is None or ahead > before:
                    self.clocks_ahead = {**self.clocks_ahead, node: ahead}
            case Answer() | Death():
                self.rank_news.append((node, message))
            case messages.Reply(number):
                if number in self._asked:  # else the asker has stopped waiting
                    self._asked[number] = message
            case messages.End(why):
                self._gone.add(node)
                self._lose(node, f"its agent ended: {why}")
        self._heard[node] = self.listening.seconds

    def _fence(self, node: int) -> None:
        self._fenced.add(node)
        self.transport.send(node, codec.packed(messages.Ask(next(self._numbers), messages.KillRanks(timeout=5.0))))

    def _lose(self, node: int, why: str) -> None:
        if not self._closing and self.takes_part(node):
            self.lost = {**self.lost, node: why}
            self.rank_news.append((node, why))
            self.suite_news.append((node, why))
            self._changed.notify_all()


class ClusterEngine:
    """An Engine. A rank's node is that of its RankSpec, by the cluster's numbers. With a node all of its ranks die."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._nodes: dict[int, int] = {}  # of each rank
        self._dead: set[int] = set()  # whose death `wait` has returned

    def start(self, specs: Sequence[RankSpec]) -> None:
        self._cluster.take(self._cluster.rank_news, 0.0)  # of ranks before these
        self._nodes, self._dead = {spec.index: spec.node for spec in specs}, set()
        for node, here in grouped((spec.node, spec) for spec in specs).items():
            self._cluster.send(node, messages.StartRanks(pickle.dumps(here, protocol=pickle.HIGHEST_PROTOCOL)))

    def rendezvous(self) -> str:
        found, troubles = self._cluster.ask_each({(first := self._nodes[0]): messages.Rendezvous()})
        if troubles:
            self._cluster.leave_out(first, f"it has no address for the ranks to meet: {troubles[first]}")
        # Without: `wait` returns its death at once. The others try to connect there until they are killed.
        return str(found.get(first, "tcp://127.0.0.1:9"))

    def submit(self, ranks: Iterable[int], parcel: bytes) -> None:
        for node, here in self._by_node(ranks).items():
            self._cluster.send(node, messages.Submit(tuple(here), parcel))

    def wait(self, timeout: float) -> list[Answer | Death]:
        news = self._cluster.take(self._cluster.rank_news, 0.0 if self._of_gone_nodes() else timeout)
        events = [each for node, each in news if not isinstance(each, str) and self._nodes.get(each.rank) == node]
        found: list[Answer | Death] = []
        for event in [*events, *self._of_gone_nodes()]:  # what came of a node before it was lost counts
            found += [event] * (event.rank not in self._dead)
            self._dead |= {event.rank} if isinstance(event, Death) else set()
        return found

    def examine(self, ranks: Iterable[int]) -> dict[int, Trace]:
        asked = self._by_node(ranks)
        questions = {node: messages.Examine(tuple(here)) for node, here in asked.items()}
        answers, troubles = self._cluster.ask_each(questions, 5.0)  # a node itself needs 0.3 s
        traces: dict[int, Trace] = {}
        for node, here in asked.items():
            why = troubles.get(node, "its node has ended it")  # as one does that is left out
            traces |= dict.fromkeys(here, Trace(state=f"(nothing can be seen of it: {why})")) | answers.get(node, {})
        return traces

    def kill(self, timeout: float) -> dict[int, str]:
        """Without nodes that do not: nothing more can be started on their GPUs. Lost ones have their agent or fence."""
        questions = dict.fromkeys(set(self._nodes.values()), messages.KillRanks(timeout))
        answers, troubles = self._cluster.ask_each(questions, timeout + 5.0)
        for node, why in troubles.items():
            self._cluster.leave_out(node, f"it did not confirm that it ended its ranks: {why}")
        left: dict[int, str] = {}
        for node, alive in ((node, alive) for node, alive in answers.items() if alive):
            self._cluster.leave_out(node, f"{len(alive)} of its ranks could not be killed")
            left |= alive
        self._cluster.take(self._cluster.rank_news, 0.0)
        self._nodes = {}
        return left

    def _of_gone_nodes(self) -> list[Death]:
        """Deaths of ranks whose node takes no part any more, that were not returned."""
        lost, names = self._cluster.lost, self._cluster.names
        why = {node: f"which is left out: {text}" for node, text in self._cluster.left_out.items()}
        why |= {node: f"{names[node]}: {text}" for node, text in lost.items()}
        dead = ((rank, node) for rank, node in self._nodes.items() if node in why and rank not in self._dead)
        return [Death(rank, f"with its node, {why[node]}") for rank, node in dead]

    def _by_node(self, ranks: Iterable[int]) -> dict[int, list[int]]:
        return grouped((self._nodes[rank], rank) for rank in sorted(set(ranks)))

"""Ranks on several nodes, each behind the agent of its node."""

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.nodes import messages
from pytest_gpufleet.nodes.cluster import Cluster, Lost, Trouble
from pytest_gpufleet.world.call import RankSpec
from pytest_gpufleet.world.engines import forkserver
from pytest_gpufleet.world.engines.protocol import Answer, Death, Trace

EXAMINE_SECONDS = 5.0  # a node itself needs 0.3 s
ANSWER_SECONDS = 5.0  # beyond what a node is given to kill its ranks
# Where ranks meet whose first one is dead, which `wait` returns at once: they try to connect until they are killed.
NOWHERE = "tcp://127.0.0.1:9"


class ClusterEngine:
    """An Engine. A rank's node is that of its RankSpec, by the cluster's numbers. With a node all of its ranks die."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._nodes: dict[int, int] = {}  # of each rank
        self._deaths: list[Death] = []  # that `wait` returns next
        self._dead: set[int] = set()  # whose death it has returned

    def start(self, specs: Sequence[RankSpec]) -> None:
        self._cluster.rank_news(0.0)  # of ranks before these
        self._nodes = {spec.index: spec.node for spec in specs}
        self._deaths, self._dead = [], set()
        packages = forkserver.beside_the_path()  # of pytest, which is not on the nodes
        there = self._cluster.alive  # asked after the old news: of who is lost from here on there will be new
        for node, here in grouped((spec.node, replace(spec, packages=packages)) for spec in specs).items():
            if node in there:
                self._cluster.send(node, messages.StartRanks(pickle.dumps(here, protocol=pickle.HIGHEST_PROTOCOL)))
            else:
                self._deaths += self._deaths_of(node)

    def rendezvous(self) -> str:
        first = self._nodes[0]
        try:
            return str(self._cluster.ask_one(first, messages.Rendezvous()))
        except Trouble as trouble:
            self._cluster.leave_out(first, f"it has no address for the ranks to meet: {trouble}")
            self._deaths += self._deaths_of(first)
            return NOWHERE

    def submit(self, ranks: Iterable[int], parcel: bytes) -> None:
        for node, here in self._by_node(ranks).items():
            self._cluster.send(node, messages.Submit(tuple(here), parcel))

    def wait(self, timeout: float) -> list[Answer | Death]:
        events: list[Answer | Death] = [*self._deaths]
        self._deaths = []
        for node, news in self._cluster.rank_news(0.0 if events else timeout):
            if isinstance(news, Lost):
                events += self._deaths_of(node)
            elif self._nodes.get(news.rank) == node:
                events.append(news)
        found: list[Answer | Death] = []
        for event in events:
            found += [event] * (event.rank not in self._dead)
            self._dead |= {event.rank} if isinstance(event, Death) else set()
        return found

    def examine(self, ranks: Iterable[int]) -> dict[int, Trace]:
        asked = self._by_node(ranks)
        questions = {node: messages.Examine(tuple(here)) for node, here in asked.items()}
        traces: dict[int, Trace] = {}
        for node, answer in self._answers(questions, EXAMINE_SECONDS).items():
            why = answer if isinstance(answer, Trouble) else "its node has ended it"  # as one does that is left out
            traces |= dict.fromkeys(asked[node], Trace(state=f"(nothing can be seen of it: {why})"))
            traces |= {} if isinstance(answer, Trouble) else answer
        return traces

    def kill(self, timeout: float) -> dict[int, str]:
        """A node that does not end its ranks is left out: nothing more can be started on their GPUs."""
        questions = dict.fromkeys(set(self._nodes.values()), messages.KillRanks(timeout))
        left: dict[int, str] = {}
        for node, answer in self._answers(questions, timeout + ANSWER_SECONDS).items():
            if isinstance(answer, Trouble):
                self._cluster.leave_out(node, f"it did not confirm that it ended its ranks: {answer}")
            elif answer:
                self._cluster.leave_out(node, f"{len(answer)} of its ranks could not be killed")
                left |= answer
        self._cluster.rank_news(0.0)
        self._nodes, self._deaths = {}, []
        return left

    def _answers(self, questions: Mapping[int, messages.Asked], timeout: float) -> dict[int, Any]:
        """Nobody waits for a node that is lost already: its ranks end with its agent, or by the fence."""
        lost = self._cluster.lost
        asked = {node: question for node, question in questions.items() if node not in lost}
        silent = {node: Trouble(f"it is lost: {lost[node].why}") for node in questions if node in lost}
        return {**self._cluster.ask_each(asked, timeout), **silent}

    def _deaths_of(self, node: int) -> list[Death]:
        """Of the ranks of a node that takes no part."""
        if lost := self._cluster.lost.get(node):
            how = f"with its node, {lost.name}: {lost.why}"
        else:
            how = f"with its node, which is left out: {self._cluster.left_out.get(node, 'it has not started')}"
        return [Death(rank, how) for rank, of in self._nodes.items() if of == node]

    def _by_node(self, ranks: Iterable[int]) -> dict[int, list[int]]:
        return grouped((self._nodes[rank], rank) for rank in sorted(set(ranks)))

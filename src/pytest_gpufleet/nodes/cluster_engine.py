"""Ranks on several nodes, each behind the agent of its node."""

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.nodes import messages
from pytest_gpufleet.nodes.cluster import Cluster, Lost, RankNews, Trouble
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
        by_rank = {spec.index: spec for spec in specs}
        for node, ranks in self._by_node(self._nodes).items():
            if node in there:
                here = [replace(by_rank[rank], packages=packages) for rank in ranks]
                self._cluster.send(node, messages.StartRanks(pickle.dumps(here, protocol=pickle.HIGHEST_PROTOCOL)))
            else:
                self._deaths += self._of_node(node, self._why_not(node))

    def rendezvous(self) -> str:
        first = self._nodes[0]
        try:
            return str(self._cluster.ask_one(first, messages.Rendezvous()))
        except Trouble as trouble:
            self._give_up(first, f"it has no address for the ranks to meet: {trouble}")
            return NOWHERE

    def submit(self, ranks: Iterable[int], parcel: bytes) -> None:
        for node, here in self._by_node(ranks).items():
            self._cluster.send(node, messages.Submit(here, parcel))

    def wait(self, timeout: float) -> list[Answer | Death]:
        pending, self._deaths = self._deaths, []
        news = self._cluster.rank_news(0.0 if pending else timeout)
        events: list[Answer | Death] = []
        for event in [*pending, *(event for node, each in news for event in self._events(node, each))]:
            if event.rank not in self._dead:
                events.append(event)
            if isinstance(event, Death):
                self._dead.add(event.rank)
        return events

    def examine(self, ranks: Iterable[int]) -> dict[int, Trace]:
        asked = self._by_node(ranks)
        answers = self._answers({node: messages.Examine(here) for node, here in asked.items()}, EXAMINE_SECONDS)
        traces: dict[int, Trace] = {}
        for node, here in asked.items():
            answer = answers[node]
            why = answer if isinstance(answer, Trouble) else "its node has ended it"  # as one does that is left out
            traces |= dict.fromkeys(here, Trace(state=f"(nothing can be seen of it: {why})"))
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

    def _events(self, node: int, news: RankNews) -> list[Answer | Death]:
        if isinstance(news, Lost):
            return [*self._of_node(node, _lost(news))]
        if self._nodes.get(news.rank) != node:
            return []
        return [
            Answer(news.rank, news.parcel) if isinstance(news, messages.RankAnswered) else Death(news.rank, news.reason)
        ]

    def _of_node(self, node: int, how: str) -> list[Death]:
        return [Death(rank, how) for rank in self._by_node(self._nodes).get(node, ())]

    def _give_up(self, node: int, why: str) -> None:
        self._cluster.leave_out(node, why)
        self._deaths += self._of_node(node, self._why_not(node))

    def _why_not(self, node: int) -> str:
        """How the ranks of a node that takes no part have died."""
        if lost := self._cluster.lost.get(node):
            return _lost(lost)
        return f"with its node, which is left out: {self._cluster.left_out.get(node, 'it has not started')}"

    def _by_node(self, ranks: Iterable[int]) -> Mapping[int, tuple[int, ...]]:
        found = grouped((self._nodes[rank], rank) for rank in sorted(set(ranks)))
        return {node: tuple(here) for node, here in found.items()}


def _lost(lost: Lost) -> str:
    return f"with its node, {lost.name}: {lost.why}"

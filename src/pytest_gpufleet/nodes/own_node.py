"""The node of an agent: what the agent is asked about it, and what it sees of its GPUs while ranks work on them."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

import msgspec

from pytest_gpufleet.machine import host, local_node
from pytest_gpufleet.machine.health_watch import Guard, Health
from pytest_gpufleet.machine.local_node import LocalNode
from pytest_gpufleet.machine.locks import GpuTaken
from pytest_gpufleet.machine.nvml import NoGpus
from pytest_gpufleet.machine.telemetry import Sampler
from pytest_gpufleet.model.events import HostFound
from pytest_gpufleet.model.measurement import Sample
from pytest_gpufleet.nodes import messages as say
from pytest_gpufleet.nodes.agent_process import AgentSettings

SAMPLE_SECONDS = 1.0  # as a run of one machine does, unless it is told otherwise
REHEARSAL = "--rehearse was given"


@contextmanager
def opened(settings: AgentSettings) -> "Iterator[OwnNode]":
    """Reads the machine, which takes seconds. Without GPUs it is a node all the same, and says why."""
    with ExitStack() as stack:
        if settings.rehearse:
            yield OwnNode(local_node.without_gpus(REHEARSAL))
            return
        try:
            yield OwnNode(stack.enter_context(local_node.opened(settings.gpus)))
        except NoGpus as reason:
            yield OwnNode(local_node.without_gpus(str(reason), str(reason)))


class OwnNode:
    """Not for two threads at a time, but for `readings`."""

    def __init__(self, node: LocalNode) -> None:
        self._node = node
        self._locks: ExitStack | None = None  # freed with this process
        self._sampler: Sampler | None = None
        self.readings: Sequence[Mapping[str, Any]] = ()  # of each GPU, the latest, while ranks work on them
        self._answers: dict[type[say.Question], Callable[[Any], Any]] = {
            say.ReadHost: lambda question: node.host(question.names),
            say.Lock: lambda question: self._lock(),
            say.CheckHealth: lambda question: self._check_health(question.failed),
        }

    def hello(self, interface: str) -> say.Hello:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        machine = HostFound(now, self._node.host())
        return say.Hello(host.serial(), os.getpid(), interface, self._node.topology, self._node.present(), machine)

    def answer(self, question: say.Question) -> Any:
        """KeyError for a question that is about something else."""
        return self._answers[type(question)](question)

    def watch(self) -> None:
        """From here on the GPUs are at work: what they do is sampled, and what gets worse counts."""
        if self._node.topology.gpus and self._sampler is None:
            self._guard  # noqa: B018  # it reads what is before
            self._sampler = Sampler(self._node, SAMPLE_SECONDS, self._take_in)
            self._sampler.start()

    def stop_watching(self) -> None:
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.stop()
            self.readings = ()

    @cached_property
    def _guard(self) -> Guard:
        """What the kernel log held before is not told again: the node's own run has judged it."""
        self._node.kernel_log()
        return Guard(self._node)

    def _take_in(self, sample: Sample) -> None:
        self.readings = sample.gpus
        self._guard.note(sample)

    def _lock(self) -> str:
        try:
            self._locks = self._locks or self._node.lock()
        except GpuTaken as taken:
            return str(taken)
        return ""

    def _check_health(self, failed: bool) -> Health:
        if not self._node.topology.gpus:
            return Health()
        found, trouble = self._guard.check(failed), self._sampler.trouble if self._sampler else ""
        unsampled = f"a GPU that slowed down may have gone unseen: {trouble}" if trouble else ""
        return msgspec.structs.replace(found, unseen="; ".join(filter(None, (found.unseen, unsampled))))

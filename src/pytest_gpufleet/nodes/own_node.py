"""The node of an agent: what it has, and what is seen of its GPUs while ranks work on them."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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
from pytest_gpufleet.nodes.agent_process import AgentSettings
from pytest_gpufleet.nodes.messages import Hello

SAMPLE_SECONDS = 1.0  # as a run of one machine does, unless it was asked for something else
REHEARSAL = "--rehearse was given"


class OwnNode:
    """Not for two threads at a time, but for `readings`: of each GPU, the latest, while ranks work on them."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._node: LocalNode
        self._open_things = ExitStack()  # freed with this process, as are locks
        self._locks: ExitStack | None = None
        self._sampler: Sampler | None = None
        self.readings: Sequence[Mapping[str, Any]] = ()

    def open(self, interface: str) -> Hello:
        """Reads the machine, which takes seconds and comes before all else. Without GPUs it is a node all the same, and
        says why."""
        if self._settings.rehearse:
            self._node = local_node.without_gpus(REHEARSAL)
        else:
            try:
                self._node = self._open_things.enter_context(local_node.opened(self._settings.gpus))
            except NoGpus as reason:
                self._node = local_node.without_gpus(str(reason), str(reason))
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        machine = HostFound(now, self._node.host())
        return Hello(host.serial(), os.getpid(), interface, self._node.topology, self._node.present(), machine)

    def host(self, names: Sequence[str]) -> dict[str, Any]:
        return self._node.host(names)

    def lock(self) -> str:
        """Make the GPUs this run's own; "" or who has one."""
        try:
            self._locks = self._locks or self._node.lock()
        except GpuTaken as taken:
            return str(taken)
        return ""

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

    def check_health(self, failed: bool) -> Health:
        if not self._node.topology.gpus:
            return Health()
        found, trouble = self._guard.check(failed), self._sampler.trouble if self._sampler else ""
        unsampled = f"a GPU that slowed down may have gone unseen: {trouble}" if trouble else ""
        return msgspec.structs.replace(found, unseen="; ".join(filter(None, (found.unseen, unsampled))))

    @cached_property
    def _guard(self) -> Guard:
        """What the kernel log held before is not reported again: the node's own run has judged it."""
        self._node.kernel_log()
        return Guard(self._node)

    def _take_in(self, sample: Sample) -> None:
        self.readings = sample.gpus
        self._guard.note(sample)

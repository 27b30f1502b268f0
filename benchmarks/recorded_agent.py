"""The agent of a node that is not here: benchmarks/nodes.py starts it in the place of `pytest_gpufleet.nodes.agent`.

All of it is the agent itself, but for the machine, which is a recorded one of 4x NVIDIA H200 with GPUs of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from pytest_gpufleet.machine import host, local_node
from pytest_gpufleet.machine.gpu_facts import READINGS
from pytest_gpufleet.machine.kernel_log import Logged
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.measurement import Sample
from pytest_gpufleet.nodes import agent
from pytest_gpufleet.nodes.agent_process import AgentSettings

sys.path.insert(1, str(Path(__file__).parents[1]))
from tests import machines

NAME = "RECORDED_NODE"  # the variable that names the node to its own run


class RecordedNode:
    """A Node, whose GPUs are at rest."""

    def __init__(self, name: str) -> None:
        recorded = machines.recorded()
        self._machine = recorded.machine
        gpus = tuple(Gpu(gpu.index, self._own(name, gpu)) for gpu in recorded.topology.gpus)
        self.topology = replace(recorded.topology, gpus=gpus)
        self._host = {**recorded.machine.host, "name": name}

    def _own(self, name: str, gpu: Gpu) -> dict[str, Any]:
        return {**gpu.facts, "uuid": f"GPU-{name}-{gpu.index}", "serial": f"{name}-{gpu.index}"}

    def facts(self, names: Sequence[str]) -> tuple[Gpu, ...]:
        now = zip(self.topology.gpus, self._machine.gpus, strict=True)
        return tuple(Gpu(gpu.index, {**then.facts, **gpu.facts}) for gpu, then in now)

    def host(self) -> dict[str, Any]:
        return dict(self._host)

    def sample(self, slow: bool = True) -> Sample:
        readings = {**dict.fromkeys(READINGS), "temperature_c": 30, "power_watts": 75.0, "clock_event_reasons": 1}
        return Sample(0.0, tuple(dict(readings) for _ in self.topology.gpus))

    def kernel_log(self) -> Logged:
        return Logged()

    def present(self) -> tuple[str, ...]:
        return self._machine.present

    def lock(self) -> ExitStack:
        return ExitStack()


def main(settings: str) -> None:
    name = msgspec.json.decode(settings, type=AgentSettings).name

    @contextmanager
    def opened(wanted: int | None = None, environment: Mapping[str, str] = os.environ) -> Iterator[RecordedNode]:
        yield RecordedNode(name)

    local_node.opened = opened  # type: ignore[assignment]
    host.serial = lambda: f"SN-{name}"
    os.environ[NAME] = name
    agent.main(settings)


if __name__ == "__main__":
    main(*sys.argv[1:])

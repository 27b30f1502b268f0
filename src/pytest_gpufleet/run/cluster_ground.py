"""What a run on many nodes stands on, by what each has told of itself first."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

from pytest_gpufleet.model.cluster_topology import joined
from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.machine import Machine
from pytest_gpufleet.nodes.messages import Hello
from pytest_gpufleet.run.ground import Ground, NodeStanding


class ClusterGround(Ground):
    """`names`: of all nodes, by their numbers, `hellos` of those that are there. `rehearsed`: ranks of each, 0 with
    GPUs. `machines`: of those that are there, with the facts that do not change. What their kernel logs held, their own
    runs have judged."""

    def __init__(self, names: Mapping[int, str], hellos: Mapping[int, Hello], rehearsed: int) -> None:
        self._names = names
        self._hellos = hellos
        self.nodes = len(hellos)
        self.rehearsal_ranks = rehearsed * len(hellos)
        self.machines = {node: self._machine(node) for node in hellos}  # at once: they know how long ago that was

    @cached_property
    def topologies(self) -> dict[int, GpuTopology]:
        """Each as its node describes itself."""
        missing = GpuTopology(absent="its agent was never heard")
        return {node: self._hellos[node].topology if node in self._hellos else missing for node in self._names}

    def topology_of(self, node: int) -> GpuTopology:
        """With the number of its node in the places of its GPUs."""
        return self.topologies[node].on_node(node)

    @cached_property
    def topology(self) -> GpuTopology:
        return joined(self.topologies, self.hosts)

    @property
    def hosts(self) -> dict[int, str]:
        return {node: self._hellos[node].host if node in self._hellos else name for node, name in self._names.items()}

    @property
    def gpus_present(self) -> int:
        """Those of nodes that are one host are there once."""
        return len(
            {
                (hello.machine.get("boot_id") or node, bus or index)
                for node, hello in self._hellos.items()
                for index, bus in enumerate(hello.present)
            }
        )

    @property
    def why(self) -> str:
        """As those nodes say that were heard."""
        return joined({node: hello.topology for node, hello in self._hellos.items()}, self.hosts).absent

    @property
    def where(self) -> str:
        return f" of {self.nodes} nodes"

    @property
    def standing(self) -> list[NodeStanding]:
        return [self._standing(node) for node in self._names]

    def _standing(self, node: int) -> NodeStanding:
        hello = self._hellos.get(node)
        facts: Mapping[str, Any] = hello.machine if hello else {}
        serial = hello.serial if hello else None
        return NodeStanding(node, self.hosts[node], serial, self.topologies[node], facts, _taken(hello))

    def _machine(self, node: int) -> Machine:
        hello = self._hellos[node]
        return Machine(self.topology_of(node).gpus, hello.machine, _taken(hello), present=hello.present, node=node)


def _taken(hello: Hello | None) -> str:
    """When a node was read, by its own clock."""
    return "" if hello is None else datetime.fromtimestamp(hello.clock, timezone.utc).isoformat(timespec="seconds")

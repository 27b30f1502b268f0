"""The GPUs of several nodes as those of one run: who is who there, and who is like whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_gpufleet.model.gpu import SOFTWARE, GpuTopology
from pytest_gpufleet.model.place import Place, Where

NETWORK = "network"  # what links places of two nodes, in the words of GpuTopology.links
MIXED = "mixed"


@dataclass(frozen=True)
class ClusterTopology(GpuTopology):
    """What is true of all nodes together, and what each is asked for what is its own. Made by `joined`.

    `nodes`: their topologies, with their numbers in their GPUs' places, by these; `hosts`: their names. The links of
    GPUs stand in the topology of their node and nowhere else.
    """

    nodes: Mapping[int, GpuTopology] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)

    def identity(self, where: Where) -> str:
        return " and ".join(map(self._named, where.parts))

    def kind(self, where: Where) -> tuple[str, ...]:
        """Of GPUs, and of pairs of one node, what their node says of them. Nodes and rails are compared with those of
        the same GPUs, and pairs of two nodes with such pairs."""
        on = self._on(where)
        if len(on) == 1 and where.parts[0].is_device and where.parts[0].kind != "rail":
            return on[0].kind(where)
        models = (", ".join(sorted(gpu.name for gpu in node.gpus)) for node in on)
        return (*sorted(models), NETWORK if len(on) > 1 else where.parts[0].kind)

    def processors_near(self, where: Where) -> tuple[Any, ...]:
        return tuple(each for node in self._on(where) for each in node.processors_near(where))

    def switch_neighbours(self, where: Where) -> tuple[int, ...]:
        return tuple(each for node in self._on(where) for each in node.switch_neighbours(where))

    def __str__(self) -> str:
        return "\n".join(f"{self.hosts[number]}\n{node}" for number, node in self.nodes.items())

    def _on(self, where: Where) -> list[GpuTopology]:
        """The nodes of a place, each once."""
        numbers = dict.fromkeys(part.node for part in where.parts if part.is_on_node)
        return [self.nodes.get(number, GpuTopology()) for number in numbers]

    def _named(self, part: Place) -> str:
        if not part.is_on_node:
            return str(part)
        host = self.hosts.get(part.node, f"node {part.node}")
        return f"{host} {self.nodes.get(part.node, GpuTopology()).identity(part)}" if part.is_device else host


def joined(nodes: Mapping[int, GpuTopology], hosts: Mapping[int, str]) -> GpuTopology:
    """The topology of all these nodes, each as it describes itself: as if it were the only one, node 0. Of one node
    with the number 0 its own."""
    if list(nodes) == [0]:
        return nodes[0]
    numbered = {number: topology.on_node(number) for number, topology in nodes.items()}
    there = [topology for topology in nodes.values() if topology.gpus]
    software: dict[str, Any] = {name: _of_all(getattr(each, name) for each in nodes.values()) for name in SOFTWARE}
    fabrics = {topology.fabric for topology in there}
    cluster = ClusterTopology(
        gpus=tuple(gpu for topology in numbered.values() for gpu in topology.gpus),
        fabric=(fabrics.pop() if len(fabrics) == 1 else MIXED) if there else "none",
        problems=tuple(f"{hosts[number]}: {each}" for number, node in nodes.items() for each in node.problems),
        absent="" if there else _of_all(topology.absent for topology in nodes.values()) or "",
        nodes=numbered,
        hosts=dict(hosts),
    )
    return replace(cluster, **software)


def _of_all(values: Iterable[str | None]) -> str | None:
    """What all have; each that any has where they differ."""
    return " and ".join(sorted(set(filter(None, values)))) or None

"""The ranks of a run on many nodes: of those that take part, and anew when that changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.run.ranks import Ranks

if TYPE_CHECKING:
    from pytest_gpufleet.model.gpu import Gpu
    from pytest_gpufleet.run.cluster_run import ClusterRun
    from pytest_gpufleet.world.engines.protocol import Engine


class ClusterRanks(Ranks):
    _run: ClusterRun

    @property
    def nodes(self) -> int:  # type: ignore[override]
        return len(self._run.cluster.alive)

    def begin_test(self, test: str, of_the_suite: bool, fresh: bool) -> None:
        super().begin_test(test, of_the_suite, fresh)
        pool = self.in_use
        if pool is not None and {spec.node for spec in pool.specs} - {*self._run.cluster.alive}:
            pool.stop()
            self._run.lock()
            pool.start_on(self._specs())

    def get_ready(self) -> None:
        """The agents start what ranks need, and only after their nodes' own runs."""

    def _engine(self) -> Engine:
        from pytest_gpufleet.nodes.cluster_engine import ClusterEngine

        return ClusterEngine(self._run.cluster)

    def _gpus_of_nodes(self) -> Mapping[int, tuple[Sequence[Gpu | None], str]]:
        """Those that are left."""
        ground, rehearsed = self._run.ground, (None,) * (self._run.options.rehearse or 0)
        nodes = {
            node: (rehearsed or ground.topology_of(node).gpus, ground.hosts[node]) for node in self._run.cluster.alive
        }
        if not any(gpus for gpus, _ in nodes.values()):
            raise Refused("no rank is left to run on")
        return nodes

    def _threads(self, node: int, size: int, here: int) -> int:
        """Nodes that are processes of this machine share its processors."""
        if self._run.options.rehearse and self._run.options.address is None:
            return super()._threads(node, size, here)
        processors = self._run.cluster.hellos[node].machine.get("processors") or 1
        return max(1, int(processors) // here)

"""The ranks of a run on many nodes: of those that take part, and anew when that changes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.run.ranks import Ranks
from pytest_gpufleet.world.rank_spec import RankSpec, nothing

if TYPE_CHECKING:
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

    def _specs(self) -> list[RankSpec]:
        """Numbered from 0 on, whichever nodes are left."""
        cluster, ground = self._run.cluster, self._run.ground
        here = {node: range(self._run.options.rehearse or len(ground.topologies[node].gpus)) for node in cluster.alive}
        size = sum(map(len, here.values()))
        if not size:
            raise Refused("no rank is left to run on")
        places = [(node, local) for node, ranks in here.items() for local in ranks]
        return [
            RankSpec(
                index=index,
                size=size,
                node=node,
                local_index=local,
                local_size=len(here[node]),
                device="cpu" if self._run.options.rehearse else f"cuda:{local}",
                gpu=None if self._run.options.rehearse else ground.topology_of(node).gpus[local],
                cpu_threads=self._threads(node, size, len(here[node])),
                prepare=self._run.prepare_rank or nothing,
                host=ground.hosts[node],
            )
            for index, (node, local) in enumerate(places)
        ]

    def _threads(self, node: int, size: int, here: int) -> int:
        """Of each rank. Nodes that are processes of this machine share its processors."""
        if self._run.options.rehearse and self._run.options.address is None:
            return max(1, len(os.sched_getaffinity(0)) // size)
        processors = self._run.cluster.hellos[node].machine.get("processors") or 1
        return max(1, int(processors) // here)

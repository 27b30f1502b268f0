"""The ranks of a run: made when the first test needs them or is collected, and shared by all."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_gpufleet.model.refused import Refused

# This module is loaded in every pytest run: all else is imported where it is used.
if TYPE_CHECKING:
    from pytest_gpufleet.model.gpu import Gpu
    from pytest_gpufleet.run.run import Run
    from pytest_gpufleet.run.settings import Options
    from pytest_gpufleet.world.engines.local import LocalEngine
    from pytest_gpufleet.world.engines.protocol import Engine
    from pytest_gpufleet.world.pool import Pool
    from pytest_gpufleet.world.rank_spec import RankSpec
    from pytest_gpufleet.world.world import World

# What training imports: every optimizer and DDP torch's compiler, which takes seconds. No import here may start CUDA,
# which could not be used in processes that are forked afterwards.
OF_TRAINING = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint.state_dict_saver",
    "torchvision",
)


def likely(options: Options) -> tuple[str, ...]:
    """Modules that ranks are likely to need, for processes to import that have nothing else to do yet."""
    return () if options.level == "quick" else OF_TRAINING


class Ranks:
    """Nothing here touches a GPU before a test does, or is about to."""

    nodes = 1  # that they are on

    def __init__(self, run: Run) -> None:
        self._run = run
        self.test_deadline: float | None = None  # monotonic time, where pytest-timeout sets one
        self.test = ""  # the running one
        self.foreign_test = ""  # the running test, if it is none of the suite
        self.environment: dict[str, str] = {}  # what of it steers drivers and libraries, when the run began

    @cached_property
    def _local_engine(self) -> LocalEngine:
        from pytest_gpufleet.world.engines.local import LocalEngine

        return LocalEngine(likely=likely(self._run.options))

    def get_ready(self) -> None:
        """Begin with what ranks need before they start and what takes seconds, while pytest still collects."""
        from pytest_gpufleet.world.rank_spec import nothing

        self._local_engine.get_ready(self._run.prepare_rank or nothing)

    def begin(self) -> None:
        """Start them while pytest collects what needs them. What keeps them from it is told by the first test, which
        tries it itself then."""
        with suppress(Exception):
            self.pool.begin()

    @cached_property
    def pool(self) -> Pool:
        """Refused without a GPU, or if somebody else has one of them."""
        from pytest_gpufleet.redaction import throughout
        from pytest_gpufleet.world.pool import Pool

        run = self._run
        if not run.ground.size:
            raise Refused(f"there is no GPU to run on: {run.ground.why}")
        run.lock()
        return Pool(
            self._engine(),
            self._specs(),
            run.options.timeout,
            test_deadline=lambda: self.test_deadline,
            foreign_test=lambda: self.foreign_test,
            on_event=lambda name, **content: run.record_event(name, check=self.test, **throughout(content)),
        )

    def _engine(self) -> Engine:
        return self._local_engine

    def _specs(self) -> list[RankSpec]:
        """Numbered from 0 on, over all nodes."""
        from pytest_gpufleet.world.rank_spec import RankSpec, nothing

        nodes = self._gpus_of_nodes()
        size = sum(len(gpus) for gpus, _ in nodes.values())
        ranks = [(node, local, gpu) for node, (gpus, _) in nodes.items() for local, gpu in enumerate(gpus)]
        return [
            RankSpec(
                index=index,
                size=size,
                node=node,
                local_index=local,
                local_size=len(nodes[node][0]),
                device="cpu" if gpu is None else f"cuda:{local}",
                gpu=gpu,
                cpu_threads=self._threads(node, size, len(nodes[node][0])),
                prepare=self._run.prepare_rank or nothing,
                host=nodes[node][1],
            )
            for index, (node, local, gpu) in enumerate(ranks)
        ]

    def _gpus_of_nodes(self) -> Mapping[int, tuple[Sequence[Gpu | None], str]]:
        """By the number of each node the GPU of each of its ranks, None of a CPU rank, and its name where there are
        several."""
        ground = self._run.ground
        return {0: ((None,) * ground.rehearsal_ranks or ground.topology.gpus, "")}

    def _threads(self, node: int, size: int, here: int) -> int:
        """Of each rank, of which there are so many `here`, on its node. By itself torch takes all processors for each:
        then as many threads as ranks wait for each one of them."""
        return max(1, len(os.sched_getaffinity(0)) // size)

    @property
    def in_use(self) -> Pool | None:
        """The pool if a test has used it, else None."""
        return self.__dict__.get("pool")

    def world(self, with_group: bool) -> World:
        from pytest_gpufleet.world.world import World

        return World(self.pool, with_group)

    def begin_test(self, test: str, of_the_suite: bool, fresh: bool) -> None:
        """A test of the suite finds ranks that no other test has used, and an environment that no other test, and no
        import of its file, has changed. `fresh`: a test asks for new ranks itself."""
        self.test, self.foreign_test = test, "" if of_the_suite else test
        if of_the_suite:
            from pytest_gpufleet.hardware.environment import put_back

            put_back(self.environment)
        if (pool := self.in_use) is None:
            return
        pool.begin_test()
        if pool.started and pool.used_by and of_the_suite:
            self._run.record_event("fresh_world", check=test, after=pool.used_by)
            pool.stop()
        elif fresh:
            pool.stop()

    def let_go(self) -> None:
        """No test needs them any more: have them killed while the report is written. One that has used a GPU takes a
        quarter of a second to go."""
        if self.in_use is not None:
            threading.Thread(target=self.in_use.stop, daemon=True).start()

    def close(self) -> None:
        """Kill the ranks, wait until they are gone, and end what they are forked from."""
        if self.in_use is not None:
            self.in_use.close()
        if (engine := self.__dict__.get("_local_engine")) is not None:
            engine.end()

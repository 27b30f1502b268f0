"""The handle a test holds: a world of ranks, or a subset of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.place import Place
from pytest_gpufleet.world.pool import Pool


class World:
    """Some or all ranks of a pool, with or without a process group. Processes start at the first `run`.

    Without `ranks` it has those that the running test may use: all, or as many as its marker world_size says.
    """

    def __init__(self, pool: Pool, with_group: bool, ranks: tuple[int, ...] | None = None) -> None:
        self._pool = pool
        self._with_group = with_group
        self._chosen = ranks

    @property
    def _ranks(self) -> tuple[int, ...]:
        return self._pool.everyone[: self._pool.limit] if self._chosen is None else self._chosen

    @property
    def size(self) -> int:
        return len(self._ranks)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPU of each rank; empty in a rehearsal."""
        gpus = (self._pool.specs[rank].gpu for rank in self._ranks)
        return tuple(gpu for gpu in gpus if gpu is not None)

    @property
    def places(self) -> tuple[Place, ...]:
        """The place of each rank's own figures: its GPU, in a rehearsal "cpu3"."""
        return tuple(self._pool.specs[rank].place for rank in self._ranks)

    def name_of(self, index: int) -> str:
        """ "rank 3 of 8, GPU 3 NVIDIA H200, serial ..." """
        return self._pool.specs[self._ranks[index]].name

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Run `function(rank, *args, **kwargs)` on every rank; the results by rank.

        Closures and local functions work: code and values are sent by cloudpickle. A tensor on a GPU comes back as its
        copy on the CPU. `timeout` is the deadline in seconds, `--fleet-timeout` by default. Raises RankFailure if a
        rank raises, dies or does not answer in time, TypeError if something cannot be sent; pytest.skip on a rank
        skips the test; ValueError if `timeout` is no number of seconds above 0. Calls of several threads follow one
        another, and the deadline of each begins with it.
        """
        __tracebackhide__ = True
        if timeout is not None and not 0 < timeout < math.inf:
            raise ValueError(f"timeout is a number of seconds above 0, not {timeout}")
        return self._pool.call(self._ranks, self._with_group, timeout, function, args, kwargs)

    def subset(self, ranks: Sequence[int]) -> World:
        """Fewer ranks, in ascending order: the same processes, counted anew from 0, with a group of their own.

        ValueError if there is no such rank, or none at all.
        """
        chosen = sorted(set(ranks))
        if not chosen or chosen[0] < 0 or chosen[-1] >= self.size:
            raise ValueError(f"ranks {list(ranks)} are not a subset of the {self.size} ranks here")
        return World(self._pool, self._with_group, tuple(self._ranks[rank] for rank in chosen))

    def __reduce__(self) -> NoReturn:
        raise TypeError("world and nccl_group stay in the controller; on a rank, use its argument `rank`")

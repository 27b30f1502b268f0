"""The handle a test holds: a world of ranks, or a subset of one."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from pytest_gpufleet.model.fault import Fault, expect_none
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.metric import Size
from pytest_gpufleet.model.place import Place
from pytest_gpufleet.world.call import Call, Members, RankSpec, describe, pack_work
from pytest_gpufleet.world.pool import Pool


class NoProcessGroup(AttributeError):
    """A world was used as the process group that it is on ranks only."""


class World:
    """Some or all ranks of a pool, with or without a process group. Processes start at the first `run`.

    Without `ranks` it has those that the running test may use: all, or as many as its marker world_size says.
    """

    def __init__(self, pool: Pool, with_group: bool, ranks: Members | None = None) -> None:
        self._pool = pool
        self._with_group = with_group
        self._chosen = ranks

    @property
    def _ranks(self) -> Members:
        return self._pool.everyone[: self._pool.limit] if self._chosen is None else self._chosen

    @property
    def _specs(self) -> list[RankSpec]:
        return [self._pool.specs[rank] for rank in self._ranks]

    @property
    def size(self) -> int:
        return len(self._ranks)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPU of each rank; empty in a rehearsal."""
        return tuple(spec.gpu for spec in self._specs if spec.gpu is not None)

    @property
    def places(self) -> tuple[Place, ...]:
        """The place of each rank's own figures: its GPU, in a rehearsal "cpu3"."""
        return tuple(spec.place for spec in self._specs)

    @property
    def hosts(self) -> dict[int, str]:
        """The names of the nodes, by their numbers, where there are several."""
        return {spec.node: spec.host or f"node {spec.node}" for spec in self._specs}

    def name_of(self, index: int) -> str:
        """ "rank 3 of 8, GPU 3 NVIDIA H200, serial ..." """
        return self._specs[index].name

    @property
    def nodes(self) -> "tuple[World, ...]":
        """The ranks of each node, as a world of its own."""
        by_node = grouped((place.node, index) for index, place in enumerate(self.places))
        return tuple(self.subset(by_node[node]) for node in sorted(by_node))

    def run(
        self, function: Callable[..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Run `function(rank, *args, **kwargs)` on every rank; the results by rank.

        Closures and local functions work: code and values are sent by cloudpickle. A tensor on a GPU comes back as its
        copy on the CPU. `timeout` is the deadline in seconds, `--fleet-timeout` by default. Raises RankFailure if a
        rank raises, dies or does not answer in time, TypeError if something cannot be sent; pytest.skip on a rank
        skips the test; ValueError if `timeout` is no number of seconds above 0. Calls of several threads follow one
        another, and the deadline of each begins with it. A Size among the arguments arrives as the one for these ranks.
        """
        __tracebackhide__ = True
        return self.each([self], function, *args, timeout=timeout, **kwargs)[0]

    def each(
        self,
        groups: "Sequence[Sequence[int] | World]",
        function: Callable[..., Any],
        /,
        *args: Any,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> list[list[Any]]:
        """As `run`, on several groups of ranks at the same time; for each group its results by rank.

        A group is the ranks of a `subset`, or such a subset itself: `world.each([[0, 1], [2, 3]], probe)` measures two
        pairs at once, `world.each(world.nodes, probe)` every node. In each of them ranks count from 0 and have a
        process group of their own. A rank that is in none of them does nothing; ValueError if one is in two.
        """
        __tracebackhide__ = True
        if timeout is not None and not 0 < timeout < math.inf:
            raise ValueError(f"timeout is a number of seconds above 0, not {timeout}")
        members = tuple(self._members(group) for group in groups)
        ranks = [rank for group in members for rank in group]
        if len(set(ranks)) < len(ranks):
            shown = " and ".join(str(list(group._ranks if isinstance(group, World) else group)) for group in groups)
            raise ValueError(f"groups that run at the same time share no rank, as {shown} do")
        sized = [value.on(self) if isinstance(value, Size) else value for value in (*args, *kwargs.values())]
        named = dict(zip(kwargs, sized[len(args) :], strict=True))
        work = pack_work(function, tuple(sized[: len(args)]), named)
        nodes = tuple(self._pool.specs[rank].node for rank in ranks)
        call = Call(describe(function), members, nodes, self._with_group, work)
        results = self._pool.call(call, timeout)
        return [[results[rank] for rank in group] for group in members]

    def restarted(self, environments: Sequence[Mapping[str, str]]) -> AbstractContextManager[None]:
        """Within this block ranks are others, started afresh, each with these variables besides all that it finds: one
        mapping for each rank. For what libraries read but once. All ranks end with the block, and the next call starts
        them as they were."""
        return self._pool.restarted(dict(zip(self._ranks, environments, strict=True)))

    def _members(self, group: "Sequence[int] | World") -> Members:
        if not isinstance(group, World):
            return self.subset(group)._ranks
        if not {*group._ranks} <= {*self._ranks}:
            raise ValueError(f"ranks {list(group._ranks)} are not all of this world")
        return group._ranks

    def faultless(self, probe: Callable[..., str], *args: Any, code: str, **kwargs: Any) -> None:
        """Run a probe that returns what is wrong on its rank, "" if nothing is. Raises Faults of the kind `code` with
        the ranks' places; else as `run`."""
        __tracebackhide__ = True
        expect_none(self.faults(code, self.run(probe, *args, **kwargs)))

    def faults(self, code: str, texts: Sequence[str]) -> list[Fault]:
        """A fault for each rank whose text says what is wrong; "" if nothing is."""
        return [Fault(code, (place,), what) for place, what in zip(self.places, texts, strict=True) if what]

    def subset(self, ranks: Sequence[int]) -> "World":
        """Fewer ranks, in ascending order: the same processes, counted anew from 0, with a group of their own.

        ValueError if there is no such rank, or none at all.
        """
        chosen = sorted(set(ranks))
        if not chosen or chosen[0] < 0 or chosen[-1] >= self.size:
            raise ValueError(f"ranks {list(ranks)} are not a subset of the {self.size} ranks here")
        return World(self._pool, self._with_group, tuple(self._ranks[rank] for rank in chosen))

    def __getattr__(self, name: str) -> NoReturn:
        """What torch.distributed asks a process group for, if a test gives it this one."""
        from torch.distributed import ProcessGroup

        if hasattr(ProcessGroup, name) and not name.startswith("__"):
            raise NoProcessGroup(
                f"nccl_group.{name}: nccl_group is a process group only in the body of a test marked "
                "@pytest.mark.spmd; without the marker call nccl_group.run(function), where rank.group is one"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> NoReturn:
        raise TypeError("world and nccl_group stay in the controller; on a rank, use its argument `rank`")

"""What is run on ranks, as it travels to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pytest_gpufleet.world.rank_spec import RankSpec

Members = tuple[int, ...]

MOST_RANKS = 16  # in a sentence
START = 0  # the call that a rank answers when it is ready: nobody has sent it


@dataclass(frozen=True)
class Reporting:
    """`filters`: those of the module warnings, packed; `log_level`: below it nothing is logged."""

    filters: bytes
    log_level: int


@dataclass(frozen=True)
class Call:
    """Run `work`, a packed (function, args, kwargs), on disjoint groups of ranks at the same time, with or without the
    process group of each. `local_sizes`: how many of these ranks each node has.

    `reporting`: what is to be heard of warnings and log records; None: what a rank does by itself.
    `number`: no other call of this world has it, and its answers bear it. `test`: no other test of this session has it.
    """

    name: str
    groups: tuple[Members, ...]
    local_sizes: dict[int, int]
    with_group: bool
    work: bytes
    number: int = START
    test: int = 0
    reporting: Reporting | None = None

    @property
    def ranks(self) -> Members:
        return tuple(rank for members in self.groups for rank in members)

    def group_of(self, rank: int) -> Members:
        return next(members for members in self.groups if rank in members)


def local_sizes(specs: Iterable[RankSpec]) -> dict[int, int]:
    return dict(Counter(spec.node for spec in specs))


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0, 2 and 3998 more" """
    numbers = sorted(ranks)
    more = f" and {len(numbers) - MOST_RANKS} more" if len(numbers) > MOST_RANKS else ""
    return f"rank {numbers[0]}" if len(numbers) == 1 else "ranks " + ", ".join(map(str, numbers[:MOST_RANKS])) + more

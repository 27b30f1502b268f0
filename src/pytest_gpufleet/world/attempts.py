"""Attempts at what every test needs, until there is no hope left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pytest_gpufleet.world.rank_failure import RankFailure

# A machine on which starting has failed so often in a row is not asked again by every test.
MAX_FAILED_STARTS = 3


class Attempts:
    """Each attempt is made in `counted`. After MAX_FAILED_STARTS failures in a row there should be no further one:
    `check` raises the last failure at once."""

    def __init__(self) -> None:
        self._failed = 0
        self._hopeless: RankFailure | None = None

    def check(self) -> None:
        __tracebackhide__ = True
        if self._hopeless is not None:
            raise self._hopeless

    def give_up(self, why: RankFailure) -> None:
        self._hopeless = why

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        try:
            yield
        except RankFailure as failure:
            self._failed += 1
            if self._failed == MAX_FAILED_STARTS:
                self._hopeless = failure
            raise
        self._failed = 0

"""Warnings and log records of ranks: what the controller wants of them, and the warnings on their way back."""

from __future__ import annotations

import logging
import pickle
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, TextIO

from pytest_gpufleet.world import shipping
from pytest_gpufleet.world.call import Reporting, ranks_text
from pytest_gpufleet.world.outcomes import Notice, Outcome

NOTICES_LIMIT = 100  # of one call: a warning in each step of a long loop must not flood the report


def reporting() -> Reporting:
    """What holds in this process now, for a rank to do likewise."""
    return Reporting(_packed(tuple(warnings.filters)), logging.root.level)


@lru_cache(maxsize=8)
def _packed(filters: tuple[Any, ...]) -> bytes:
    return shipping.pack(list(filters))


class Notices:
    """On a rank: the warnings that a test is to hear of. All others go where Python sends them."""

    def __init__(self) -> None:
        self._noticed: list[Notice] = []
        self._wanted: Reporting | None = None
        self._show_as_python_does = warnings.showwarning
        warnings.showwarning = self._show

    def heed(self, wanted: Reporting | None) -> None:
        """From here on do as the controller does, whose filters come before those of this process."""
        if wanted in (None, self._wanted):
            return
        assert wanted is not None
        self._wanted = wanted
        logging.root.setLevel(wanted.log_level)
        with suppress(Exception):  # a category that cannot be imported here is not warned of here
            given = pickle.loads(wanted.filters)
            known = list(warnings.filters)
            warnings.resetwarnings()  # which also drops what is cached of them
            warnings.filters[:] = [*given, *known]  # type: ignore[index]  # a list, not declared as one

    def forget(self) -> None:
        """Another test begins; the filters have been put back."""
        self._wanted = None

    def take(self) -> tuple[Notice, ...]:
        """Those since the last time."""
        taken, self._noticed = tuple(dict.fromkeys(self._noticed)), []
        return taken

    def _show(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        if self._wanted is None:
            self._show_as_python_does(message, category, filename, lineno, file, line)
        elif len(self._noticed) < NOTICES_LIMIT:
            name = f"{category.__module__}.{category.__qualname__}"
            self._noticed.append(Notice(name, str(message), filename, lineno))


def show(outcomes: Mapping[int, Outcome]) -> None:
    """Hand on what ranks have warned of, each once, past the filters, which were asked on the rank."""
    by_notice: dict[Notice, list[int]] = {}
    for rank in sorted(outcomes):
        for notice in outcomes[rank].notices:
            by_notice.setdefault(notice, []).append(rank)
    for notice, ranks in by_notice.items():
        category = _category(notice.category)
        warnings.showwarning(f"{notice.text} ({ranks_text(ranks)})", category, notice.file, notice.line)


def _category(name: str) -> type[Warning]:
    module, _, attribute = name.rpartition(".")
    known = vars(sys.modules[module]) if module in sys.modules else {}
    found = known.get(attribute)
    return found if isinstance(found, type) and issubclass(found, Warning) else UserWarning

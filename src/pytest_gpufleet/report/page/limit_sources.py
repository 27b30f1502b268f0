"""Where the limits of a report come from, told once each."""

from __future__ import annotations

import re

from pytest_gpufleet.model.limit import Limit

# "nccl-tests 2.19.6, 2026-11-20: 285.3": the figure that a limit was made from, which differs from limit to limit.
_FIGURE_THERE = re.compile(r": ([\d.,]+( to [\d.,]+)?|(lowest|highest) of \d+ [^:]*)$")


class Sources:
    """Numbers for where limits come from, so that a table need not repeat a sentence in every row."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}

    def number(self, limit: Limit) -> int:
        made = limit.kind in ("0.90 x published measurement", "calibrated")
        source = _FIGURE_THERE.sub("", limit.source) if made else limit.source
        return self._numbers.setdefault((limit.origin, source), len(self._numbers) + 1)

    def rows(self) -> list[tuple[int, str, str]]:
        """(number, kind, source) of each."""
        return [(number, *texts) for texts, number in self._numbers.items()]

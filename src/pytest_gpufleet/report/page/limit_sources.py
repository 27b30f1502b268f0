"""Where the limits of a report come from, told once each."""

from __future__ import annotations

from pytest_gpufleet.model.limit import Limit


class Sources:
    """Numbers for where limits come from, so that a table need not repeat a sentence in every row."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}

    def number(self, limit: Limit) -> int:
        source = limit.full_source if limit.calibration else limit.source
        return self._numbers.setdefault((limit.origin, source), len(self._numbers) + 1)

    def rows(self) -> list[tuple[int, str, str]]:
        """(number, grade, source) of each."""
        return [(number, *texts) for texts, number in self._numbers.items()]

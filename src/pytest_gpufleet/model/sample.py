"""What all GPUs of a node do at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SLOW_BEAT = 5  # of so many samples one has the slow readings (model/facts.py) too


@dataclass(frozen=True)
class Sample:
    """The readings of all GPUs at `time` (seconds since the epoch): reading -> value, None where it cannot be had."""

    time: float
    gpus: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        return {"time": self.time, "gpus": list(self.gpus)}

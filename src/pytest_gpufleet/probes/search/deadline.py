"""The time that a search for a cause may take, and how it ends early: the miss that it explains must not get lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_gpufleet.world.world import World

SECONDS = 60.0


@dataclass(frozen=True)
class Deadline:
    """The moment at which a search has to be over."""

    moment: float = field(default_factory=lambda: time.monotonic() + SECONDS)

    def run(self, world: World, probe: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
        """`world.run` within the time that is left. TimeoutError before it is over: a call that is cut short ends all
        ranks."""
        return self.each(world, [world], probe, *args, **how)[0]

    def each(
        self, world: World, groups: Sequence[Sequence[int] | World], probe: Callable[..., Any], *args: Any, **how: Any
    ) -> list[list[Any]]:
        """`world.each` likewise."""
        left = self.moment - time.monotonic()
        if left < SECONDS / 10:
            raise TimeoutError(f"it was not done within {SECONDS:g} s")
        return world.each(groups, probe, *args, timeout=left, **how)


def failed(error: Exception) -> str:
    first_line = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"the search for the cause failed: {first_line}"

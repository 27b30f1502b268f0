"""Who is there, and who is lost: those of whom nothing was heard while the controller listened."""

from __future__ import annotations

from collections.abc import Iterable


class Presence:
    """Times are told to it, it reads no clock.

    A controller that is frozen itself (SIGSTOP, a debugger, a host that swaps) hears nobody, and what the nodes have
    said meanwhile still lies in its buffers. So silence counts only as long as it listened: of the time between two
    looks no more than `turn`, the longest that it waits between them.
    """

    def __init__(self, lost_after: float, turn: float) -> None:
        self._lost_after = lost_after
        self._turn = turn
        self._looked: float | None = None
        self._listened = 0.0
        self._heard: dict[int, float] = {}

    def look(self, now: float) -> None:
        """The controller has read, at `now`, all that it could."""
        if self._looked is not None:
            self._listened += min(max(0.0, now - self._looked), self._turn)
        self._looked = now

    def heard(self, nodes: Iterable[int]) -> None:
        """From now on silence of these nodes counts, from here."""
        self._heard.update(dict.fromkeys(nodes, self._listened))

    def forget(self, node: int) -> None:
        """This node's silence means nothing (any more)."""
        self._heard.pop(node, None)

    def silence(self, node: int) -> float:
        """Seconds that the controller has listened to this node in vain."""
        return self._listened - self._heard[node]

    def lost(self) -> list[int]:
        """The nodes that have been silent for too long."""
        return sorted(node for node in self._heard if self.silence(node) >= self._lost_after)

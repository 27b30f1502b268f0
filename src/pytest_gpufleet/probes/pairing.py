"""Who meets whom: pairs in rounds, of pairs that share nobody and can meet at the same time."""

from __future__ import annotations

import random
from collections.abc import Sequence

IndexPair = tuple[int, int]


def rounds(n: int) -> list[list[IndexPair]]:
    """Every pair of n once, in as few rounds as there can be (a round robin). Of an odd number one rests in each."""
    ring: list[int | None] = [*range(n), *([None] if n % 2 else [])]
    result = []
    for _ in ring[1:]:
        half = len(ring) // 2
        facing = zip(ring[:half], reversed(ring[half:]), strict=True)
        result.append([(i, j) for i, j in facing if i is not None and j is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return result


def some_rounds(among: Sequence[int], seed: int, most: int) -> list[list[IndexPair]]:
    """The first `most` rounds of these, mixed as `seed` says: the same for the same seed, and everybody meets somebody
    else in each. Each pair has the lower number first."""
    mixed = sorted(among)
    random.Random(seed).shuffle(mixed)
    return [
        sorted((min(mixed[i], mixed[j]), max(mixed[i], mixed[j])) for i, j in each)
        for each in rounds(len(mixed))[:most]
    ]

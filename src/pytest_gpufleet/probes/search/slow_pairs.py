"""Which GPU slow pairs have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import Pair, Where

# By so much the slowest pair must differ from the fastest. Pairs of a healthy H200 board differ by 0.03 % in one
# direction, and by 0.14 % in both (three machines of 4, 2026-11-21).
DIFFER = 0.005


def who_slows_pairs(figures: Sequence[Mapping[Where, float]]) -> Fault:
    """Which GPU the slow pairs have in common: those nearer to the slowest than to the fastest. `figures`: GB/s by
    place, for each kind of link."""
    slow: dict[Where, float] = {}
    others: dict[Where, float] = {}
    for values in figures:
        numbers = [value for value in values.values() if not math.isnan(value)] or [0.0]
        most, least = max(numbers), min(numbers)
        enough = (most + least) / 2 if least < (1 - DIFFER) * most else least
        slow |= {place: value for place, value in values.items() if not value >= enough}
        others |= {place: value for place, value in values.items() if value >= enough}
    if not slow:
        return Fault("cause_unclear", (), "no single GPU: all pairs are about equally slow")
    common = sorted(set.intersection(*(set(place.parts) for place in slow)))
    rates = (
        f"{min(slow.values()):,.4g} to {max(slow.values()):,.4g} GB/s, all others at least {min(others.values()):,.4g}"
    )
    if not common:
        what = f"no single GPU: {', '.join(map(str, slow))} are slow and have none in common ({rates})"
        return Fault("cause_unclear", (), what)
    if len(common) == 2:
        return Fault("link_slow", (Pair(*common),), f"only the way between these two is slow ({rates})")
    own = [place for place in (*slow, *others) if common[0] in place.parts]
    what = f"{len(slow)} of the {len(own)} figures of pairs with it are slow ({rates})"
    return Fault("links_slow", (common[0],), what)

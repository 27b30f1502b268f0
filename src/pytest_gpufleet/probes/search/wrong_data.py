"""Who corrupts the data of collectives: what the suite looks for by itself after wrong ones were delivered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import Pair, Place, Where
from pytest_gpufleet.probes.collectives.exactness import Delivery, exchange
from pytest_gpufleet.probes.search.deadline import Deadline, failed
from pytest_gpufleet.world.world import World

SHOWN = 3


def who_corrupts(world: World, deliveries: Sequence[Delivery], collective: str, operation: str, **how: Any) -> Fault:
    """Who corrupted what `exchange` delivered; its story is what was wrong on which rank. Leaves out one rank after the
    other, or one node of several: if the data are right without one only, it is that one."""
    subjects, what = _corrupting_part(world, deliveries, collective, operation, how)
    return Fault("collective_wrong", subjects, what, _story(world, deliveries))


def _story(world: World, deliveries: Sequence[Delivery]) -> str:
    lines = []
    faults: dict[tuple[str, ...], list[int]] = {}
    for index, delivery in enumerate(deliveries):
        if delivery.wrong:
            faults.setdefault(delivery.wrong, []).append(index)
    for wrong, ranks in faults.items():
        names = [world.name_of(index) for index in ranks]
        lines.append("all ranks alike:" if len(names) == world.size > 1 else f"{'; '.join(names)}:")
        lines += [f"  {fault}" for fault in wrong[:SHOWN]]
        if len(wrong) > SHOWN:
            lines.append(f"  and {len(wrong) - SHOWN} more exchanges; {deliveries[ranks[0]].right} were right")
    return "\n".join(lines)


def _parts(world: World) -> dict[Where, list[int]]:
    """What may corrupt data: each rank, or, where there are several nodes, each with its ranks."""
    ranks: dict[Where, list[int]] = {}
    several = len({place.node for place in world.places}) > 1
    for index, place in enumerate(world.places):
        ranks.setdefault(Place(place.node, "node") if several else place, []).append(index)
    return ranks


def _corrupting_part(
    world: World, deliveries: Sequence[Delivery], collective: str, operation: str, how: Mapping[str, Any]
) -> tuple[tuple[Where, ...], str]:
    seen = [index for index, delivery in enumerate(deliveries) if delivery.wrong]
    if world.size == 2 and len(seen) == 1:
        return (world.places[seen[0]],), "has wrong data"
    if world.size == 2:
        return (), "both ranks have wrong data: nobody can tell whose fault it is"
    deadline, clean = Deadline(), list[Where]()
    try:
        for where, ranks in _parts(world).items():
            rest = world.subset([other for other in range(world.size) if other not in ranks])
            again = deadline.run(rest, exchange, collective, operation, **how)
            if not any(delivery.wrong for delivery in again):
                clean.append(where)
    except Exception as error:  # whatever it is, the wrong data come first
        return (), failed(error)
    if len(clean) == 1:
        return (clean[0],), "corrupts data: only without it everything is right"
    if len(clean) == 2:
        first, second = (where.parts[0] for where in clean)
        return (Pair(first, second),), "the link between them corrupts data: without either all are right"
    if clean:
        return (), f"it did not happen again in groups without {', '.join(map(str, clean))}"
    return (), "wrong data whoever is left out: more than one corrupts them, or what lies between them"

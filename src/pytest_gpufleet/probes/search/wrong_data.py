"""Who corrupts the data of collectives: what the suite looks for by itself after wrong ones were delivered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import Pair, Where
from pytest_gpufleet.probes.collectives.exactness import Delivery, exchange
from pytest_gpufleet.probes.search.deadline import Deadline, failed
from pytest_gpufleet.world.world import World

SHOWN = 3


def who_corrupts(world: World, deliveries: Sequence[Delivery], collective: str, operation: str, **how: Any) -> Fault:
    """Who corrupted what `exchange` delivered; its story is what was wrong on which rank. Leaves out one rank after the
    other: if the data are right without one only, it is that one."""
    subjects, what = _corrupting_rank(world, deliveries, collective, operation, how)
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


def _corrupting_rank(
    world: World, deliveries: Sequence[Delivery], collective: str, operation: str, how: Mapping[str, Any]
) -> tuple[tuple[Where, ...], str]:
    seen = [index for index, delivery in enumerate(deliveries) if delivery.wrong]
    if world.size == 2 and len(seen) == 1:
        return (world.places[seen[0]],), "has wrong data"
    if world.size == 2:
        return (), "both ranks have wrong data: nobody can tell whose fault it is"
    deadline, clean = Deadline(), []
    try:
        for index in range(world.size):
            rest = world.subset([other for other in range(world.size) if other != index])
            again = deadline.run(rest, exchange, collective, operation, **how)
            if not any(delivery.wrong for delivery in again):
                clean.append(index)
    except Exception as error:  # whatever it is, the wrong data come first
        return (), failed(error)
    if len(clean) == 1:
        return (world.places[clean[0]],), "corrupts data: only without it everything is right"
    if len(clean) == 2:
        link = Pair(*(world.places[index] for index in clean))
        return (link,), "the link between them corrupts data: without either all are right"
    if clean:
        return (), f"it did not happen again in groups without {', '.join(map(world.name_of, clean))}"
    return (), "wrong data whichever rank is left out: more than one corrupts them, or what lies between them"

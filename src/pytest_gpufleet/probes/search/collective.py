"""Who makes a collective slow: what the suite looks for by itself after one was too slow."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pytest_gpufleet.machine import software
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.metric import GiB, MiB
from pytest_gpufleet.model.place import Pair, Place, Where
from pytest_gpufleet.probes.collectives.exactness import Delivery, exchange
from pytest_gpufleet.probes.collectives.speed import bus_bandwidth
from pytest_gpufleet.probes.collectives.table import COLLECTIVES
from pytest_gpufleet.probes.links.pairs import IndexPair, schedule
from pytest_gpufleet.probes.timing import agree, line_up, seconds, synchronize, timing, wait
from pytest_gpufleet.world.rank import Rank
from pytest_gpufleet.world.world import World

SECONDS = 60.0


def deadline() -> Callable[[], float]:
    """What gives the seconds that are left of a search which begins now. TimeoutError before they are over: a call that
    is cut short ends all ranks."""
    until = time.monotonic() + SECONDS

    def left() -> float:
        if (seconds := until - time.monotonic()) < SECONDS / 10:
            raise TimeoutError(f"it was not done within {SECONDS:g} s")
        return seconds

    return left


def failed(error: Exception) -> str:
    first_line = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"the search for the cause failed: {first_line}"


unclear = partial(Fault, "cause_unclear", ())
LAUNCHES = 10
SAMPLES = 3
LONGEST = 0.5  # seconds of a sample, about: the search is to be over soon on a broken machine too


def swaps(
    rank: Rank, rounds: Sequence[Sequence[IndexPair]], nbytes: int, longest: float
) -> dict[IndexPair, tuple[float, ...]]:
    """The seconds in which this rank and its partner of each round send each other `nbytes`, both ways at the same
    time, by sample. All pairs of a round do so at once."""
    sent, received = (torch.zeros(nbytes, dtype=torch.uint8, device=rank.device) for _ in range(2))

    def swap(partner: int) -> None:
        peer = dist.get_global_rank(rank.group, partner)
        there, back = dist.P2POp(dist.isend, sent, peer, rank.group), dist.P2POp(dist.irecv, received, peer, rank.group)
        wait(dist.batch_isend_irecv([there, back]))

    took = {}
    for pairs in rounds:
        mine = next((pair for pair in pairs if rank.index in pair), None)
        if mine is None:
            timing(rank, list, SAMPLES, longest=longest)  # keeps step with the others
            continue
        partner = sum(mine) - rank.index
        with rank.phase(f"pair with rank {partner} of {nbytes:,} bytes"):
            took[min(mine), max(mine)] = timing(rank, partial(swap, partner), SAMPLES, longest=longest).seconds
    return took


def launch_seconds(rank: Rank, name: str, nbytes: int) -> tuple[float, float]:
    """The seconds this rank's host needs to launch a collective, and those until it is done, when all ranks begin
    together: a rank that comes late has a long first figure, and the others wait for it in their second."""
    collective = COLLECTIVES[name]
    input, output = collective.zeros(rank, nbytes)
    run = partial(collective.run, rank.group, output, input)
    times = []
    with rank.phase(f"launches of {name} {nbytes:,} bytes"):
        seconds(rank, run, 1)  # connects the ranks
        launches = agree(rank, max(3, min(LAUNCHES, int(LONGEST / seconds(rank, run, 1)))))
        for _ in range(launches):
            line_up(rank)
            began = time.perf_counter()
            works = collective.launch(rank.group, output, input)
            launched = time.perf_counter()
            wait(works)
            synchronize(rank)
            times.append((launched - began, time.perf_counter() - began))
    launching, done = map(median, zip(*times, strict=True))
    return launching, done


# Slow is what reaches less than this share of the others: GPUs, and CPU ranks, whose machine does other things too.
SLOW = {"gpu": 0.95, "cpu": 0.8}
CLEARLY = 0.8  # what reaches less is slow, however much the others differ among themselves
LATE_SECONDS = 100e-6  # beyond what the others need; a launch takes 20 to 50 us
LATE_SHARE = 0.3  # of the time of the whole operation: what comes late matters only from there on
# NCCL sends at the full rate of an NVLink in large messages only: 8x H200 reached 81 GB/s with 64 MiB, 301 with 256.
PAIR_BYTES = 256 * MiB
LAUNCH_BYTES = 1 * GiB
GROUP_BYTES = 64 * MiB


class Slow(NamedTuple):
    """The collective over `world` that is slow at S = `nbytes`, how long its cause may be looked for, and the share of
    the others below which a rank or pair is slow."""

    world: World
    topology: GpuTopology
    collective: str
    nbytes: int
    left: Callable[[], float]
    share: float


Step = Fault | str  # who it is, or, if that is not known, what was seen


def who_is_slow(world: World, topology: GpuTopology, collective: str, nbytes: int) -> list[Fault]:
    """Who made a collective over `world` slow at S = `nbytes`: looks at launches, then at all pairs, then leaves out
    one rank after the other, and stops as soon as it knows."""
    share, clues = SLOW["gpu" if world.gpus else "cpu"], list[str]()
    slow = Slow(world, topology, collective, nbytes, deadline(), share)
    try:
        for step in (_late_rank, _slow_links, _left_out):
            if isinstance(found := step(slow), Fault):
                return [found]
            clues.append(found)
    except Exception as error:  # whatever it is, the miss comes first
        clues.append(failed(error))
    if steering := [f"{name}={value}" for name, value in software.relevant().items() if name.startswith("NCCL_")]:
        clues.append(f"variables that steer NCCL are set: {', '.join(steering)}")
    return [unclear(clue) for clue in clues if clue]


def _late_rank(slow: Slow) -> Step:
    world, nbytes = slow.world, min(slow.nbytes, LAUNCH_BYTES)
    times: list[tuple[float, float]] = world.run(launch_seconds, slow.collective, nbytes, timeout=slow.left())
    launched = [launch for launch, _ in times]
    latest = max(range(world.size), key=lambda index: launched[index])
    usual = median(launched[:latest] + launched[latest + 1 :])
    late = launched[latest] - usual
    if late < max(LATE_SECONDS, 2 * usual) or late < LATE_SHARE * times[latest][1]:
        return ""
    what = (
        f"it comes {late * 1e3:.2g} ms late to every {slow.collective}, and all others wait for it: its process needs "
        f"{launched[latest] * 1e3:.2g} ms to launch one, theirs {usual * 1e3:.2g} ms"
    )
    return Fault("straggler", (world.places[latest],), what)


def _slow_links(slow: Slow) -> Step:
    world, topology = slow.world, slow.topology
    size = PAIR_BYTES if world.gpus and slow.nbytes >= MiB else slow.nbytes
    by_rank = world.run(swaps, schedule(world.size, topology), size, LONGEST, timeout=slow.left())
    seconds = grouped(item for one in by_rank for item in one.items())
    # Of its samples the best counts, since a bad link is never fast, and of its two ranks the slower one.
    rates = {pair: size / max(map(min, took)) for pair, took in seconds.items()}
    verb = "reaches" if size >= MiB else "takes"
    if len(rates) == 1:
        return f"with two ranks it can be either: their link {verb} {_span(rates.values(), size)}"
    ends = {(a, b): Pair(world.places[a], world.places[b]) for a, b in rates}
    # Only without a switch do pairs differ by design in the number of their NVLinks.
    link = topology.link if topology.fabric == "nvlink" else lambda pair: topology.kind(pair)[-1]
    shares = of_their_kind(rates, {pair: link(at) for pair, at in ends.items()})
    if (rank := slow_rank(shares, slow.share)) is not None:
        with_it, others = (_span(each, size) for each in _split(rates, rank))
        what = f"every pair with it {verb} {with_it}, all others {others}"
        return Fault("links_slow", (world.places[rank],), what)
    few = slow_pairs(shares, slow.share)
    if not few:
        return f"no single GPU: each of the {len(rates)} pairs {verb} {_span(rates.values(), size)}"
    fine = _span((rate for pair, rate in rates.items() if pair not in few), size)
    if len(few) == 1:
        what = f"this pair {verb} {_span([rates[few[0]]], size)}, all others {fine}"
        return Fault("link_slow", (ends[few[0]],), what)
    each = ", ".join(f"{ends[pair]} {_span([rates[pair]], size)}" for pair in few)
    return f"no single GPU: {len(few)} of {len(rates)} pairs are slow ({each}), each other one {verb} {fine}"


def _left_out(slow: Slow) -> Step:
    """Bus bandwidth of the collective without each rank."""
    world, collective = slow.world, slow.collective
    if world.size < 3:
        return ""
    size, everyone = min(slow.nbytes, GROUP_BYTES), range(world.size)

    def rate(ranks: Iterable[int]) -> float:
        readings = world.subset([*ranks]).run(bus_bandwidth, collective, size, timeout=slow.left())
        return min(max(map(float, reading.samples)) for reading in readings)  # noise only makes slower

    without = {index: rate(set(everyone) - {index}) for index in everyone}
    best = max(without, key=lambda index: without[index])
    others = [value for index, value in without.items() if index != best]
    # The others must agree: with the culprit in the group, it matters little who else is.
    if _stands_out(others, [without[best]], slow.share) and min(others) > slow.share * max(others):
        reached = f"without it {collective} reaches {gigabytes([without[best]])}"
        return Fault("slows_collectives", (world.places[best],), f"{reached}, without any other {gigabytes(others)}")
    return f"without any one rank {collective} reaches {gigabytes(without.values())}"


def of_their_kind(rates: Mapping[IndexPair, float], links: Mapping[IndexPair, str]) -> dict[IndexPair, float]:
    """Each rate as a share of the median of the pairs with the same kind of link."""
    usual = {link: median(rate for pair, rate in rates.items() if links[pair] == link) for link in set(links.values())}
    return {pair: rate / usual[links[pair]] for pair, rate in rates.items()}


def _stands_out(slow: Sequence[float], others: Sequence[float], share: float) -> bool:
    """Whether all of these are slower than each of the others: by more than the others differ, if not by far."""
    most, least = max(slow), min(others)
    return most < CLEARLY * least or (most < share * least and least - most > max(others) - least)


def slow_rank(rates: Mapping[IndexPair, float], share: float = SLOW["gpu"]) -> int | None:
    """The rank of which every pair is slower than each pair without it; None if there is none."""
    for rank in sorted({rank for pair in rates for rank in pair}):
        with_it, others = _split(rates, rank)
        if others and _stands_out(with_it, others, share):
            return rank
    return None


def slow_pairs(rates: Mapping[IndexPair, float], share: float = SLOW["gpu"]) -> list[IndexPair]:
    """The pairs below the widest gap in the figures, slowest first, if it is wide enough and they are the fewer."""
    ranked = sorted(rates, key=lambda pair: rates[pair])
    ratios = [rates[below] / rates[above] for below, above in itertools.pairwise(ranked)]
    if not ratios or min(ratios) > share:
        return []
    slow = ranked[: ratios.index(min(ratios)) + 1]
    return slow if len(slow) < len(ranked) / 2 else []


def _split(rates: Mapping[IndexPair, float], rank: int) -> tuple[list[float], list[float]]:
    """Of the pairs with a rank, and of those without it."""
    return [rates[pair] for pair in rates if rank in pair], [rates[pair] for pair in rates if rank not in pair]


def _span(rates: Iterable[float], size: int) -> str:
    """Bytes a second in words; of small messages, the time of one."""
    small = size < MiB
    return gigabytes((size / rate * 1e6 if small else rate / 1e9 for rate in rates), "us" if small else "GB/s")


def gigabytes(rates: Iterable[float], unit: str = "GB/s") -> str:
    """ "44.1 to 48.2 GB/s" """
    texts = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in sorted(rates)]
    return f"{texts[0]} {unit}" if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]} {unit}"


# By so much the slowest pair must differ from the fastest. Pairs of a healthy H200 board differ by 0.03 % in one
# direction, and by 0.14 % in both (three machines of 4, 2026-11-21).
DIFFER = 0.005


def who_slows_pairs(figures: Sequence[Mapping[Where, float]]) -> Fault:
    """Which GPU the slow pairs have in common: those nearer to the slowest than to the fastest of their kind."""
    slow, others = dict[Where, float](), dict[Where, float]()
    for values in figures:
        numbers = [value for value in values.values() if not math.isnan(value)] or [0.0]
        most, least = max(numbers), min(numbers)
        enough = (most + least) / 2 if least < (1 - DIFFER) * most else least
        for place, value in values.items():
            (others if value >= enough else slow)[place] = value
    if not slow:
        return unclear("no single GPU: all pairs are about equally slow")
    common = sorted(set.intersection(*(set(place.parts) for place in slow)))
    slow_rates = f"{min(slow.values()):,.4g} to {max(slow.values()):,.4g} GB/s"
    rates = f"{slow_rates}, all others at least {min(others.values()):,.4g}"
    if not common:
        return unclear(f"no single GPU: {', '.join(map(str, slow))} are slow and have none in common ({rates})")
    if len(common) == 2:
        return Fault("link_slow", (Pair(*common),), f"only the way between these two is slow ({rates})")
    own = [place for place in (*slow, *others) if common[0] in place.parts]
    what = f"{len(slow)} of the {len(own)} measurements of pairs with it are slow ({rates})"
    return Fault("links_slow", (common[0],), what)


SHOWN = 3


def who_corrupts(world: World, deliveries: Sequence[Delivery], collective: str, operation: str, **how: Any) -> Fault:
    """Who corrupted what `exchange` delivered. Leaves out one rank after the other, or one node of several: if the data
    are right without one only, it is that one."""
    lines = []
    faults = grouped((delivery.wrong, index) for index, delivery in enumerate(deliveries) if delivery.wrong)
    for wrong, ranks in faults.items():
        names = [world.name_of(index) for index in ranks]
        lines.append("all ranks alike:" if len(names) == world.size > 1 else f"{'; '.join(names)}:")
        lines += [f"  {fault}" for fault in wrong[:SHOWN]]
        if len(wrong) > SHOWN:
            lines.append(f"  and {len(wrong) - SHOWN} more exchanges; {deliveries[ranks[0]].right} were right")
    subjects, what = _corrupting_part(world, deliveries, collective, operation, how)
    return Fault("collective_wrong", subjects, what, "\n".join(lines))


def _corrupting_part(
    world: World, deliveries: Sequence[Delivery], collective: str, operation: str, how: Mapping[str, Any]
) -> tuple[tuple[Where, ...], str]:
    if world.size == 2:
        seen = tuple(place for place, delivery in zip(world.places, deliveries, strict=True) if delivery.wrong)
        return (
            (seen, "has wrong data") if len(seen) == 1 else ((), "both ranks have wrong data: either may be at fault")
        )
    left, clean, several = deadline(), list[Where](), len(world.nodes) > 1
    parts = grouped((Place(at.node, "node") if several else at, index) for index, at in enumerate(world.places))
    try:
        for where, ranks in parts.items():
            rest = world.subset([other for other in range(world.size) if other not in ranks])
            again = rest.run(exchange, collective, operation, timeout=left(), **how)
            if not any(delivery.wrong for delivery in again):
                clean.append(where)
    except Exception as error:  # whatever it is, the wrong data come first
        return (), failed(error)
    if len(clean) == 1:
        return (clean[0],), "corrupts data: only without it everything is right"
    if len(clean) == 2:
        return (
            Pair(*(at.parts[0] for at in clean)),
        ), "the link between them corrupts data: without either all are right"
    if clean:
        return (), f"it did not happen again in groups without {', '.join(map(str, clean))}"
    return (), "wrong data, each left out in turn: more than one corrupts them, or what lies between them"

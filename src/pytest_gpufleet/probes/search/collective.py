"""Who makes a collective slow, or its data wrong: what the suite looks for by itself after one was."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from pytest_gpufleet.machine import software
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.language import some
from pytest_gpufleet.model.metric import GiB, MiB
from pytest_gpufleet.model.place import GpuTopology, Pair, Place, Where, grouped
from pytest_gpufleet.probes.collectives.exactness import Delivery, exchange
from pytest_gpufleet.probes.collectives.speed import bus_bandwidth
from pytest_gpufleet.probes.collectives.table import COLLECTIVES
from pytest_gpufleet.probes.links.copies import IndexPair, Samples, schedule
from pytest_gpufleet.probes.timing import agree, line_up, seconds, synchronize, timing, wait
from pytest_gpufleet.world.world import Rank, World

SECONDS = 60.0
LAUNCHES = 10
SAMPLES = 3
LONGEST = 0.5  # seconds of a sample, about: the search is to be over soon on a broken machine too
# Slow is what reaches less than this share of the others: GPUs, and CPU ranks, whose machine does other things too.
SLOW = {"gpu": 0.95, "cpu": 0.8}
# The same of copies. Pairs of healthy H200 differ by 0.03 % one way, by 0.14 % both ways (3 machines of 4, 2026-11-21).
SLOW_COPIES = 0.997
CLEARLY = 0.8  # what reaches less is slow, however much the others differ among themselves
LATE_SECONDS = 100e-6  # beyond what the others need; a launch takes 20 to 50 us
LATE_SHARE = 0.3  # of the time of the whole operation: what comes late matters only from there on
# NCCL sends at the full rate of an NVLink in large messages only: 8x H200 reached 81 GB/s with 64 MiB, 301 with 256.
PAIR_BYTES = 256 * MiB
SHOWN = 3

unclear = partial(Fault, "cause_unclear", ())


def deadline() -> Callable[[], float]:
    """The seconds that are left of a search that begins now. TimeoutError before: a call cut short ends all ranks."""
    until = time.monotonic() + SECONDS

    def left() -> float:
        if (seconds := until - time.monotonic()) < SECONDS / 10:
            raise TimeoutError(f"it was not done within {SECONDS:g} s")
        return seconds

    return left


def failed(error: Exception) -> str:
    first_line = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"the search for the cause failed: {first_line}"


def swaps(rank: Rank, rounds: Sequence[Sequence[IndexPair]], nbytes: int, longest: float) -> dict[IndexPair, Samples]:
    """Seconds, by sample, in which this rank and its partner of each round swap `nbytes`, all pairs at once."""
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
        for _ in range(agree(rank, max(3, min(LAUNCHES, int(LONGEST / seconds(rank, run, 1)))))):
            line_up(rank)
            began = time.perf_counter()
            works = collective.launch(rank.group, output, input)
            launched = time.perf_counter()
            wait(works)
            synchronize(rank)
            times.append((launched - began, time.perf_counter() - began))
    launching, done = map(median, zip(*times, strict=True))
    return launching, done


def who_is_slow(world: World, topology: GpuTopology, collective: str, nbytes: int) -> list[Fault]:
    """Who made a collective slow at S = `nbytes`: by launches, then all pairs, then leaving out each rank in turn."""
    share, left, clues = SLOW["gpu" if world.gpus else "cpu"], deadline(), list[Fault]()
    # A root has more to launch than others, by design.
    launched = "all_reduce" if COLLECTIVES[collective].rooted else collective
    steps: tuple[Callable[[], Fault | None], ...] = (
        lambda: _late_rank(world, launched, min(nbytes, GiB), left()),
        lambda: _slow_links(world, topology, nbytes, share, left()),
        lambda: _left_out(world, collective, min(nbytes, 64 * MiB), share, left),
    )
    try:
        for step in steps:
            if (found := step()) and found.subjects:
                return [found]
            clues += [found] if found else []
    except Exception as error:  # whatever it is, the miss comes first
        clues.append(unclear(failed(error)))
    if steering := [f"{name}={value}" for name, value in software.relevant().items() if name.startswith("NCCL_")]:
        clues.append(unclear(f"variables that steer NCCL are set: {', '.join(steering)}"))
    return clues


def _late_rank(world: World, collective: str, nbytes: int, seconds: float) -> Fault | None:
    times: list[tuple[float, float]] = world.run(launch_seconds, collective, nbytes, timeout=seconds)
    launched = [launch for launch, _ in times]
    latest = max(range(world.size), key=lambda index: launched[index])
    usual = median(launched[:latest] + launched[latest + 1 :])
    late = launched[latest] - usual
    if late < max(LATE_SECONDS, 2 * usual) or late < LATE_SHARE * times[latest][1]:
        return None
    what = (
        f"it comes {late * 1e3:.2g} ms late to every {collective}, and all others wait for it: its process needs "
        f"{launched[latest] * 1e3:.2g} ms to launch one, theirs {usual * 1e3:.2g} ms"
    )
    return Fault("straggler", (world.places[latest],), what)


def _slow_links(world: World, topology: GpuTopology, nbytes: int, share: float, seconds: float) -> Fault:
    size = PAIR_BYTES if world.gpus and nbytes >= MiB else nbytes
    by_rank = world.run(swaps, schedule(world.size, topology), size, LONGEST, timeout=seconds)
    taken = grouped(item for one in by_rank for item in one.items())
    # Of its samples the best counts, since a bad link is never fast, and of its two ranks the slower one.
    rates = {Pair(world.places[a], world.places[b]): size / max(map(min, took)) for (a, b), took in taken.items()}

    def shown(rates: Iterable[float]) -> str:
        """In GB/s; of small messages the time of one."""
        return span((size / rate * 1e6 for rate in rates), "us") if size < MiB else span(rate / 1e9 for rate in rates)

    if len(rates) == 1:
        return unclear(f"with two ranks it can be either: their link has {shown(rates.values())}")
    # Only without a switch do pairs differ by design in the number of their NVLinks.
    link = topology.link if topology.fabric == "nvlink" else lambda pair: topology.kind(pair)[-1]
    kinds = grouped((link(pair), (pair, rate)) for pair, rate in rates.items())
    return who_slows_pairs([dict(kind) for kind in kinds.values()], share, shown)


def _left_out(world: World, collective: str, nbytes: int, share: float, left: Callable[[], float]) -> Fault | None:
    """By the bus bandwidth of the collective without each rank."""
    if world.size < 3:
        return None
    without = []
    for index in range(world.size):
        others = world.subset([other for other in range(world.size) if other != index])
        readings = others.run(bus_bandwidth, collective, nbytes, timeout=left())
        without.append(min(max(reading.samples) for reading in readings))  # noise only makes slower
    best = max(without)
    rest = sorted(without)[:-1]
    # The others must agree: with the culprit in the group, it matters little who else is.
    if _stands_out(rest, [best], share) and rest[0] > share * rest[-1]:
        what = f"without it {collective} reaches {span([best])}, without any other {span(rest)}"
        return Fault("slows_collectives", (world.places[without.index(best)],), what)
    return unclear(f"without any one rank {collective} reaches {span(without)}")


def _stands_out(slow: Sequence[float], others: Sequence[float], share: float) -> bool:
    """Whether all of these are slower than each of the others: by more than the others differ, if not by far."""
    most, least = max(slow), min(others)
    return most < CLEARLY * least or (most < share * least and least - most > max(others) - least)


def span(rates: Iterable[float], unit: str = "GB/s") -> str:
    """ "44.1 to 48.23 GB/s" """
    texts = [f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for value in sorted(rates)]
    return f"{texts[0]} {unit}" if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]} {unit}"


def who_slows_pairs(
    kinds: Iterable[Mapping[Where, float]], share: float = SLOW_COPIES, shown: Callable[[Iterable[float]], str] = span
) -> Fault:
    """Which GPU the slow pairs have in common, or which pair it is: those nearer to the slowest than to the fastest, if
    less than `share` of all others. `kinds`: the rates of pairs with one kind of link each, whose fastest is usual."""
    rates, shares = dict[Where, float](), dict[Where, float]()
    for kind in kinds:
        known = {pair: 0.0 if math.isnan(rate) else rate for pair, rate in kind.items()}
        usual = max(known.values()) or 1.0
        rates |= known
        shares |= {pair: rate / usual for pair, rate in known.items()}
    enough = (min(shares.values()) + max(shares.values())) / 2
    slow = [pair for pair in shares if shares[pair] < enough]
    others = [pair for pair in shares if pair not in slow]
    if not slow or not _stands_out([shares[pair] for pair in slow], [shares[pair] for pair in others], share):
        return unclear(f"no single GPU: all pairs are about equally slow ({shown(rates.values())})")
    reached = f"{shown(rates[pair] for pair in slow)}, all others {shown(rates[pair] for pair in others)}"
    if not (common := sorted(set.intersection(*({*pair.parts} for pair in slow)))):
        return unclear(f"no single GPU: {some([*map(str, slow)], SHOWN)} are slow and have none in common ({reached})")
    if len(common) == 2:
        return Fault("link_slow", (Pair(*common),), f"only the way between these two is slow ({reached})")
    own = [pair for pair in shares if common[0] in pair.parts]
    what = f"{len(slow)} of the {len(own)} measurements of pairs with it are slow ({reached})"
    return Fault("links_slow", (common[0],), what)


def who_corrupts(world: World, deliveries: Sequence[Delivery], collective: str, operation: str, **how: Any) -> Fault:
    """Who corrupted what `exchange` delivered: without which rank, or node of several, alone the data are right."""
    lines = []
    faults = grouped((delivery.wrong, index) for index, delivery in enumerate(deliveries) if delivery.wrong)
    for wrong, ranks in faults.items():
        who = "all ranks alike" if len(ranks) == world.size > 1 else "; ".join(map(world.name_of, ranks))
        lines += [f"{who}:", *(f"  {fault}" for fault in wrong[:SHOWN])]
        if len(wrong) > SHOWN:
            lines.append(f"  and {len(wrong) - SHOWN} more exchanges; {deliveries[ranks[0]].right} were right")

    def fault(what: str, *subjects: Where) -> Fault:
        return Fault("collective_wrong", subjects, what, "\n".join(lines))

    if world.size == 2:
        seen = [place for place, delivery in zip(world.places, deliveries, strict=True) if delivery.wrong]
        both = "both ranks have wrong data: either may be at fault"
        return fault("has wrong data", *seen) if len(seen) == 1 else fault(both)
    left, clean, several = deadline(), list[Place](), len(world.nodes) > 1
    parts = grouped((Place(at.node, "node") if several else at, index) for index, at in enumerate(world.places))
    try:
        for where, ranks in parts.items():
            rest = world.subset([other for other in range(world.size) if other not in ranks])
            again = rest.run(exchange, collective, operation, timeout=left(), **how)
            clean += [] if any(delivery.wrong for delivery in again) else [where]
    except Exception as error:  # whatever it is, the wrong data come first
        return fault(failed(error))
    if len(clean) == 1:
        return fault("corrupts data: only without it everything is right", *clean)
    if len(clean) == 2:
        return fault("the link between them corrupts data: without either all are right", Pair(*clean))
    if clean:
        return fault(f"it did not happen again in groups without {', '.join(map(str, clean))}")
    return fault("wrong data, each left out in turn: more than one corrupts them, or what lies between them")

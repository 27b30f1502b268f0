"""Who makes a collective slow: what the suite looks for by itself after one was too slow."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from pytest_gpufleet.hardware import software
from pytest_gpufleet.model import place
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.metric import GiB, MiB
from pytest_gpufleet.probes.collectives.speed import bus_bandwidth
from pytest_gpufleet.probes.pairing import Pair
from pytest_gpufleet.probes.search.deadline import Deadline, failed
from pytest_gpufleet.probes.search.per_rank_times import launch_seconds, pair_seconds
from pytest_gpufleet.probes.search.topology_file import without_topology_file
from pytest_gpufleet.world.world import World

# Slow is what reaches less than this share of the others: GPUs, and CPU ranks, whose machine does other things too.
SLOW = {"gpu": 0.95, "cpu": 0.8}
CLEARLY = 0.8  # what reaches less is slow, however much the others differ among themselves
LATE_SECONDS = 100e-6  # beyond what the others need; a launch takes 20 to 50 us
LATE_SHARE = 0.3  # of the time of the whole operation: what comes late matters only from there on
# NCCL sends at the full rate of an NVLink in large messages only: 8x H200 reached 81 GB/s with 64 MiB, 301 with 256.
PAIR_BYTES = 256 * MiB
LAUNCH_BYTES = 1 * GiB
GROUP_BYTES = 64 * MiB


@dataclass(frozen=True)
class Slow:
    """The collective over `world` that is slow at S = `nbytes`, and how long its cause may be looked for."""

    world: World
    topology: GpuTopology
    collective: str
    nbytes: int
    deadline: Deadline = field(default_factory=Deadline)

    @property
    def share(self) -> float:
        return SLOW["gpu" if self.world.gpus else "cpu"]


Step = Fault | str  # who it is, or, if that is not known, what was seen


def who_is_slow(world: World, topology: GpuTopology, collective: str, nbytes: int) -> list[Fault]:
    """Who made a collective over `world` slow at S = `nbytes`: a rank that comes late, one with slow links, one link,
    or no single one.

    Looks at launches, then at all pairs, then leaves out one rank after the other and tries both halves, and stops as
    soon as it knows. Where it is no single one, the file that tells NCCL the topology is left out once.
    """
    slow, clues, ways = Slow(world, topology, collective, nbytes), list[str](), list[Fault]()
    try:
        for step in (_late_rank, _slow_links, _left_out):
            if isinstance(found := step(slow), Fault):
                return [found]
            clues.append(found)
        ways = without_topology_file(world, collective, min(nbytes, LAUNCH_BYTES), slow.deadline)
    except Exception as error:  # whatever it is, the miss comes first
        clues.append(failed(error))
    if steering := [f"{name}={value}" for name, value in software.relevant().items() if name.startswith("NCCL_")]:
        clues.append(f"variables that steer NCCL are set: {', '.join(steering)}")
    return [*ways, *(Fault("cause_unclear", (), clue) for clue in clues if clue)]


def _late_rank(slow: Slow) -> Step:
    world, nbytes = slow.world, min(slow.nbytes, LAUNCH_BYTES)
    times: list[tuple[float, float]] = slow.deadline.run(world, launch_seconds, slow.collective, nbytes)
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
    return Fault("rank_comes_late", (world.places[latest],), what)


def _slow_links(slow: Slow) -> Step:
    world = slow.world
    size = PAIR_BYTES if world.gpus and slow.nbytes >= MiB else slow.nbytes
    seconds: dict[Pair, float] = {}
    for one in slow.deadline.run(world, pair_seconds, slow.topology, size):
        for pair, took in one.items():
            seconds[pair] = max(took, seconds.get(pair, 0.0))
    rates = {pair: size / took for pair, took in seconds.items()}
    verb = "reaches" if size >= MiB else "takes"
    if len(rates) == 1:
        return f"with two ranks nobody can tell which one it is: their link {verb} {_span(rates.values(), size)}"
    shares = of_their_kind(rates, {(a, b): _link(slow, a, b) for a, b in rates})
    if (rank := slow_rank(shares, slow.share)) is not None:
        with_it, others = _split(rates, rank)
        theirs = _span(others, size)
        what = f"every pair with it {verb} {_span(with_it, size)}, all others {theirs}"
        return Fault("links_slow", (world.places[rank],), what)
    few = slow_pairs(shares, slow.share)
    if not few:
        return f"no single GPU: each of the {len(rates)} pairs {verb} {_span(rates.values(), size)}"
    fine = _span((rate for pair, rate in rates.items() if pair not in few), size)
    if len(few) == 1:
        ends = place.Pair(*(world.places[index] for index in few[0]))
        what = f"this pair {verb} {_span([rates[few[0]]], size)}, all others {fine}"
        return Fault("link_slow", (ends,), what)
    each = ", ".join(f"{world.places[a]}-{world.places[b]} {_span([rates[a, b]], size)}" for a, b in few)
    return f"no single GPU: {len(few)} of {len(rates)} pairs are slow ({each}), each other one {verb} {fine}"


def _left_out(slow: Slow) -> Step:
    """Bus bandwidth of the collective without each rank, and of both halves."""
    world, collective = slow.world, slow.collective
    if world.size < 3:
        return ""
    size, everyone = min(slow.nbytes, GROUP_BYTES), range(world.size)

    def rate(ranks: Iterable[int]) -> float:
        readings = slow.deadline.run(world.subset([*ranks]), bus_bandwidth, collective, size)
        return min(max(map(float, reading.samples)) for reading in readings)  # noise only makes slower

    without = {index: rate(set(everyone) - {index}) for index in everyone}
    best = max(without, key=lambda index: without[index])
    others = [value for index, value in without.items() if index != best]
    # The others must agree: with the culprit in the group, it matters little who else is.
    if _stands_out(others, [without[best]], slow.share) and min(others) > slow.share * max(others):
        reached = f"without it {collective} reaches {gigabytes([without[best]])}"
        what = f"{reached}, without any other rank {gigabytes(others)}"
        return Fault("slows_collectives", (world.places[best],), what)
    clue = f"without any one rank {collective} reaches {gigabytes(without.values())}"
    if world.size > 3:
        halves = [everyone[: world.size // 2], everyone[world.size // 2 :]]
        rates = [f"ranks {half[0]} to {half[-1]} {gigabytes([rate(half)])}" for half in halves]
        clue += f", among {' and among '.join(rates)}"
    return clue


def _link(slow: Slow, a: int, b: int) -> str:
    """The kind of link of two ranks. Only without a switch do pairs differ by design in the number of their NVLinks."""
    world, topology = slow.world, slow.topology
    if not world.gpus:
        return ""
    if topology.fabric == "nvlink":
        at = {gpu.place: position for position, gpu in enumerate(topology.gpus)}
        return topology.links[at[world.places[a]]][at[world.places[b]]]
    return topology.kind(place.Pair(world.places[a], world.places[b]))[-1]


def of_their_kind(rates: Mapping[Pair, float], links: Mapping[Pair, str]) -> dict[Pair, float]:
    """Each rate as a share of the median of the pairs with the same kind of link."""
    usual = {link: median(rate for pair, rate in rates.items() if links[pair] == link) for link in set(links.values())}
    return {pair: rate / usual[links[pair]] for pair, rate in rates.items()}


def _stands_out(slow: Sequence[float], others: Sequence[float], share: float) -> bool:
    """Whether all of these are slower than each of the others: by more than the others differ, if not by far."""
    most, least = max(slow), min(others)
    return most < CLEARLY * least or (most < share * least and least - most > max(others) - least)


def slow_rank(rates: Mapping[Pair, float], share: float = SLOW["gpu"]) -> int | None:
    """The rank of which every pair is slower than each pair without it; None if there is none."""
    for rank in sorted({rank for pair in rates for rank in pair}):
        with_it, others = _split(rates, rank)
        if others and _stands_out(with_it, others, share):
            return rank
    return None


def slow_pairs(rates: Mapping[Pair, float], share: float = SLOW["gpu"]) -> list[Pair]:
    """The pairs below the widest gap in the figures, slowest first, if it is wide enough and they are the fewer."""
    ranked = sorted(rates, key=lambda pair: rates[pair])
    ratios = [rates[below] / rates[above] for below, above in itertools.pairwise(ranked)]
    if not ratios or min(ratios) > share:
        return []
    slow = ranked[: ratios.index(min(ratios)) + 1]
    return slow if len(slow) < len(ranked) / 2 else []


def _split(rates: Mapping[Pair, float], rank: int) -> tuple[list[float], list[float]]:
    """The figures of the pairs with a rank, and of those without it."""
    return [rates[pair] for pair in rates if rank in pair], [rates[pair] for pair in rates if rank not in pair]


def _span(rates: Iterable[float], size: int) -> str:
    """Bytes a second in words; of small messages, the time of one."""
    values = [*rates]
    return gigabytes(rate / 1e9 for rate in values) if size >= MiB else _range((size / r * 1e6 for r in values), "us")


def gigabytes(rates: Iterable[float]) -> str:
    """ "44.1 to 48.2 GB/s" """
    return _range(rates, "GB/s")


def _range(values: Iterable[float], unit: str) -> str:
    texts = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in sorted(values)]
    return f"{texts[0]} {unit}" if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]} {unit}"

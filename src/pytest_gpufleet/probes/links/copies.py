"""The links of GPUs, to the host and between each other: how fast copies are, and whether data arrives unharmed.

Between GPUs the copies are those of nvbandwidth's device_to_device tests with copy engines. Behind an NVSwitch, pairs
that share no GPU copy at the same time: on 4x H200 each pair alone gave the same figures.

Both directions at once are two GPUs that write to each other: 2x H200 gave 391.8 + 391.9 GB/s, and nvbandwidth 391.9 +
391.8 (driver 580.159.04, 2026-11-22). Reads in both directions are no measure of the link: from memory that is mapped
into another process the driver reads faster alone (396.3 against nvbandwidth's 393.9, which has both GPUs in one
process) and slower both ways (373.4 against 389.6)."""

import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Literal

import torch

from pytest_gpufleet.model.conditions import LINED_UP, Condition
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.metric import MiB, Reading, metric_under
from pytest_gpufleet.model.place import GpuTopology, Pair, Where
from pytest_gpufleet.probes.links import copying
from pytest_gpufleet.probes.links.copying import Copied, Copy, Ends, Offer
from pytest_gpufleet.probes.measure import together, watched
from pytest_gpufleet.probes.timing import read_under_load
from pytest_gpufleet.world.world import Rank, World

IndexPair = tuple[int, int]  # of ranks, or of nodes
PairDirection = Literal["read", "write", "both"]
Samples = tuple[float, ...]
# What is made of copies: GB/s; the same of samples that last equally long, however fast each pair is, so that nobody's
# copies have the way to themselves; microseconds of a copy; or nothing, since they are made once.
Sampling = Literal["bandwidth", "lasting", "latency", "once"]

PAIR = "device to device"

HostDirection = Literal["host to device", "device to host", "both"]
ONE_WAY: tuple[HostDirection, ...] = ("host to device", "device to host")
BACK: dict[HostDirection, HostDirection] = dict(zip(ONE_WAY, reversed(ONE_WAY), strict=True))
WAYS: dict[HostDirection, tuple[HostDirection, ...]] = {**{way: (way,) for way in ONE_WAY}, "both": ONE_WAY}

COPIES = 20
# A way that has rested is slow at first: of two healthy H200 in a virtual machine one reached half its bandwidth for up
# to 0.5 s, at its full PCIe generation by NVML. Once for all directions of a GPU.
LEAD_IN_SECONDS = 1.0
# Of a second measurement, which are as long as those of all together: others use the memory and the links of the host
# for tenths of a second, and neither the fastest nor the median is to be theirs.
SAMPLES_AGAIN = 9


def pair_bandwidth(world: World, topology: GpuTopology, direction: PairDirection, nbytes: int) -> Copied:
    """Bandwidth in GB/s between the GPUs of every pair, with buffers of `nbytes`. "gpu0-gpu5" is what GPU 0 reads from
    the memory of GPU 5, or writes to it; with "both", what it writes while GPU 5 writes to it, lined up."""
    writes, both_ways = direction != "read", direction == "both"
    conditions = {"direction": "write both ways" if both_ways else direction}
    at_once = _each_pair(world.size, topology, both_ways)
    return _copied(world, topology, "pair_bandwidth", conditions, nbytes, at_once, "bandwidth", writes, both_ways)


def ring_bandwidth(world: World, topology: GpuTopology, nbytes: int) -> Copied:
    """Bandwidth in GB/s of every hop of a ring, all at once: each GPU writes to the next one, as in the rings of NCCL.
    Where hops share a PCIe switch, the way between sockets or host memory, it is this that bounds collectives."""
    ring = [(index, (index + 1) % world.size) for index in range(world.size)]
    return _copied(world, topology, "ring_bandwidth", {}, nbytes, [ring], "lasting", True, True)


def pair_latency(world: World, topology: GpuTopology) -> Copied:
    """Microseconds from one read of 16 bytes to the next, of 100, as p2pBandwidthLatencyTest of CUDA samples has it."""
    return _copied(world, topology, "pair_latency", {}, 16, _each_pair(world.size, topology), "latency")


def wrong_data(world: World, topology: GpuTopology, nbytes: int) -> list[Fault]:
    """What every GPU reads wrong from the memory of every other one."""
    at_once = _each_pair(world.size, topology, both_ways=True)
    return _copied(world, topology, "pair_bandwidth", {}, nbytes, at_once, "once", lined_up=True).faults


def host_bandwidth(
    world: World, directions: Sequence[HostDirection], at_once: Literal["one", "all"], nbytes: int, again: bool = False
) -> dict[HostDirection, Copied]:
    """Bandwidth in GB/s between pinned host memory and each GPU, in buffers of `nbytes`, by the method of nvbandwidth.
    "both" gives a figure for each direction while the other one is busy: it has twice as much to copy, so what is timed
    is never alone. `at_once`: each GPU alone, while the others rest, or all at the same time. The directions of a GPU
    follow each other, so that it hardly rests. Measured `again` there are more samples and longer ones."""
    groups = [world] if at_once == "all" else [world.subset([index]) for index in range(world.size)]
    offers = world.run(copying.prepare, nbytes, {way: way.split(" to ") for way in ONE_WAY})
    work = watched(_copy_to_host)
    by_rank = [each for group in groups for each in group.run(work, directions, at_once == "all", offers, again)]
    world.run(copying.free)
    # Of a link that copies alone the fastest sample, as of STREAM: whatever else uses the host only takes from it. On a
    # virtual machine with two H100 samples were 32 to 55 GB/s, the medians of nine up to 5 % apart (2026-11-28).
    fastest, details = median if at_once == "all" else max, {"bytes": nbytes}
    copied = {}
    for direction in directions:
        measurements = []
        for way in WAYS[direction]:
            conditions: dict[str, Condition] = {
                "direction": f"{way} both ways" if direction == "both" else way, "at_once": at_once,
                **({"method": LINED_UP} if at_once == "all" else {}),
            }  # fmt: skip
            metric = metric_under("host_bandwidth", conditions)
            of_rank = [
                [Reading(metric, fastest(each := crossed[direction][0][way]), conditions, each, None, details, state)]
                for crossed, state in by_rank
            ]
            measurements += together(world, of_rank)
        faults = world.faults("link_data_error", [crossed[direction][1] for crossed, _ in by_rank])
        copied[direction] = Copied(measurements, faults)
    return copied


def pcie_generation_under_load(rank: Rank) -> tuple[int, int] | None:
    """The highest generation of this GPU's PCIe link while copies are under way, and its maximum; None if unknown."""
    here = torch.empty(64 * MiB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device=rank.device, pin_memory=False)

    def copy() -> None:
        for _ in range(COPIES):
            there.copy_(here, non_blocking=True)

    seen = best = 0
    for now, most in read_under_load(rank, copy, ("pcie_generation", "pcie_generation_max"), 2.0):
        if now is None or most is None:
            return None
        seen, best = max(seen, now), most
        if seen >= best:
            break
    return seen, best


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
    """The first `most` rounds of these, mixed as `seed` says. Each pair has the lower number first."""
    mixed = sorted(among)
    random.Random(seed).shuffle(mixed)
    some = rounds(len(mixed))[:most]
    return [sorted((min(mixed[i], mixed[j]), max(mixed[i], mixed[j])) for i, j in each) for each in some]


def schedule(n: int, topology: GpuTopology) -> list[list[IndexPair]]:
    """Every pair of n ranks once: those of one entry may copy at the same time. Without an NVSwitch pairs can share a
    way (a PCIe switch, a socket, host memory), and what each gets would depend on who else copies."""
    at_once = rounds(n)
    return at_once if topology.fabric == "nvswitch" else [[pair] for pairs in at_once for pair in pairs]


def _each_pair(n: int, topology: GpuTopology, both_ways: bool = False) -> list[list[IndexPair]]:
    """The same in both directions, one after the other or at once."""
    both = [(pairs, [(j, i) for i, j in pairs]) for pairs in schedule(n, topology)]
    return [[*there, *back] for there, back in both] if both_ways else [pairs for each in both for pairs in each]


def _copied(
    world: World, topology: GpuTopology, metric: str, conditions: Mapping[str, Condition], nbytes: int,
    groups: Sequence[Sequence[IndexPair]], sampling: Sampling, writes: bool = False, lined_up: bool = False,
) -> Copied:  # fmt: skip
    """Copy between the pairs of each group at once: figures by `sampling`, and faults of the data. The first GPU of a
    pair reads from the other one, or `writes` to it. `lined_up`: those of a pair, or of a ring, begin together."""
    by_rank, faults = [list[Reading]() for _ in range(world.size)], list[Fault]()
    direct = world.run(_reach, world.run(copying.prepare, nbytes, {PAIR: ("device", "device")}, PAIR))
    for at_once in groups:
        found = world.run(watched(_copy), dict(at_once), sampling, writes, lined_up)
        differences = world.run(_difference, dict((j, i) if writes else (i, j) for i, j in at_once))
        for i, j in at_once:
            where = Pair(world.places[i], world.places[j])
            if text := differences[j if writes else i]:
                faults.append(Fault("link_data_error", (where,), text))
            samples, state = found[i]
            if samples:
                under = {**conditions, **_link(topology, where, direct[i][j])}
                by_rank[i].append(Reading(metric, median(samples), under, samples, where, {"bytes": nbytes}, state))
    world.run(_leave)
    world.run(copying.free)  # not before nobody reaches it any more
    return Copied(together(world, by_rank), faults)


def _link(topology: GpuTopology, where: Where, direct: bool) -> dict[str, Condition]:
    """The kind of link: "NVLink", or the PCIe ancestor in common; "host" where data goes through host memory. Where
    there is no NVSwitch also how many NVLinks: some pairs of one machine have more than others, by design. GPUs with
    NVLinks between them must use them: a pair that does not is still held against NVLink."""
    if (link := topology.kind(where)[-1]) != "NV":
        return {"link": link if direct else "host"}
    return {"link": "NVLink", **({"links": topology.nvlinks(where)} if topology.fabric == "nvlink" else {})}


def _reach(rank: Rank, offers: list[list[Offer]]) -> list[bool]:
    """Reach the memory of all others; for each, whether this is possible without a way through host memory."""
    ends: Ends = rank.kept[copying.ENDS]
    ends.line.draw(rank.index, offers)
    for index, (source, sink, _) in enumerate(offers):
        if index != rank.index:
            with rank.phase(f"reach the memory of rank {index}"):
                ends.others[index] = ends.copier.reach(source), ends.copier.reach(sink)
    return [index != rank.index and ends.copier.reaches_directly(source) for index, (source, *_) in enumerate(offers)]


def _copy(rank: Rank, pairs: dict[int, int], sampling: Sampling, writes: bool, lined_up: bool) -> Samples:
    if rank.index not in pairs:
        return ()
    ends: Ends = rank.kept[copying.ENDS]
    others = [pairs[rank.index]]  # on the way round to this rank: its partner, or all of a ring
    while lined_up and pairs[others[-1]] != rank.index:
        others.append(pairs[others[-1]])
    (own_source, own_sink), (source, sink) = ends.ways[PAIR], ends.others[others[0]]
    to, origin = (sink, own_source.data_ptr()) if writes else (own_sink.data_ptr(), source)
    copies, meet = [(to, origin, own_sink.nbytes)], partial(ends.line.meet, others) if lined_up else None
    with rank.phase(f"rank {rank.index} {'writes to' if writes else 'reads from'} rank {others[0]}"):
        if sampling in ("bandwidth", "lasting"):
            lasting = copying.LASTING[rank.device.type] if sampling == "lasting" else 0.0
            return copying.bandwidth(ends.copier, copies, meet, lasting)
        ends.copier.seconds(copies, 0, 1, meet)  # the first use of a way makes it
        count = 0 if sampling == "once" else copying.SAMPLES
        return tuple(1e6 * ends.copier.seconds(copies, copying.WARM_UP, 100) for _ in range(count))


def _difference(rank: Rank, filled: dict[int, int]) -> str:
    """What is wrong with the data that was copied here. `filled`: from which rank's memory, by the rank it came to."""
    if rank.index not in filled:
        return ""
    # Each rank's data differs from that of the others in every word, so what the copy before has left here is noticed.
    words = rank.kept[copying.ENDS].ways[PAIR][1]
    return copying.difference(words, copying.fill(torch.empty_like(words), filled[rank.index]))


def _leave(rank: Rank) -> None:
    rank.kept[copying.ENDS].copier.leave()


def _copy_to_host(
    rank: Rank, directions: Sequence[HostDirection], at_once: bool, offers: list[list[Offer]], again: bool
) -> dict[HostDirection, tuple[dict[HostDirection, Samples], str]]:
    """By direction the samples in GB/s of each way, while the others are busy, and what did not arrive, or ""."""
    ends: Ends = rank.kept[copying.ENDS]

    def copies(ways: Sequence[HostDirection]) -> list[Copy]:
        both = map(ends.ways.__getitem__, ways)
        return [(sink.data_ptr(), source.data_ptr(), sink.nbytes) for source, sink in both]

    if at_once:
        ends.line.draw(rank.index, offers)
    if rank.gpu is not None:
        until = time.monotonic() + LEAD_IN_SECONDS
        with rank.phase("copies between host and device: the first ones"):
            while time.monotonic() < until:
                ends.copier.seconds(copies(ONE_WAY), 0, copying.WARM_UP)  # both ways, so that neither has rested
    lasting = copying.LASTING[rank.device.type] if at_once or again else 0.0
    everyone = partial(ends.line.meet, [other for other in range(rank.size) if other != rank.index])
    count, found = SAMPLES_AGAIN if again else copying.SAMPLES, {}
    for direction in directions:
        ways, samples = WAYS[direction], {}
        for way in ways:
            ends.ways[way][1].fill_(copying.BLANK)
        for way in ways:
            with rank.phase(f"copies between host and device: {way}"):
                one_first = copies([way, *(other for other in ways if other != way)])
                samples[way] = copying.bandwidth(ends.copier, one_first, everyone if at_once else None, lasting, count)
        # What lies on the side of a sink was filled alike.
        texts = (copying.difference(ends.ways[way][1], ends.ways[BACK[way]][0]) for way in ways)
        found[direction] = samples, "; ".join(filter(None, texts))
    return found

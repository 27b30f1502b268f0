"""The links between GPU and host."""

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Literal

import torch

from pytest_gpufleet.model.conditions import LINED_UP, Condition
from pytest_gpufleet.model.measurement import Reading
from pytest_gpufleet.model.metric import MiB, metric_under
from pytest_gpufleet.probes.links import copying
from pytest_gpufleet.probes.links.copying import Copied, Copy, Ends
from pytest_gpufleet.probes.measure import together, watched
from pytest_gpufleet.probes.timing import read_under_load
from pytest_gpufleet.world.rank import Rank
from pytest_gpufleet.world.world import World

COPIES = 20
SPEED_UP_SECONDS = 2.0

# A way that has rested is slow at first: of two healthy H200 in a virtual machine one reached half its bandwidth for up
# to 0.5 s, at its full PCIe generation by NVML. Once for all directions of a GPU.
LEAD_IN_SECONDS = 1.0

# Of a second measurement, which are as long as those of all together: others use the memory and the links of the host
# for tenths of a second, and neither the fastest nor the median is to be theirs.
SAMPLES_AGAIN = 9

HostDirection = Literal["host to device", "device to host", "both"]
ONE_WAY: tuple[HostDirection, ...] = ("host to device", "device to host")
BACK: dict[HostDirection, HostDirection] = dict(zip(ONE_WAY, reversed(ONE_WAY), strict=True))
WAYS: dict[HostDirection, tuple[HostDirection, ...]] = {**{way: (way,) for way in ONE_WAY}, "both": ONE_WAY}


def pcie_generation_under_load(rank: Rank) -> tuple[int, int] | None:
    """The highest generation at which this GPU's PCIe link was seen to run while copies are under way, and the highest
    it can; None where NVML does not know. A link that rests takes a moment to speed up."""
    here = torch.empty(64 * MiB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device=rank.device, pin_memory=False)

    def copy() -> None:
        for _ in range(COPIES):
            there.copy_(here, non_blocking=True)

    seen = best = 0
    for now, most in read_under_load(rank, copy, ("pcie_generation", "pcie_generation_max"), SPEED_UP_SECONDS):
        if now is None or most is None:
            return None
        seen, best = max(seen, now), most
        if seen >= best:
            break
    return seen, best


def host_bandwidth(
    world: World, directions: Sequence[HostDirection], at_once: Literal["one", "all"], nbytes: int, again: bool = False
) -> dict[HostDirection, Copied]:
    """Bandwidth in GB/s between pinned host memory and each GPU, in buffers of `nbytes`, by the method of nvbandwidth.

    "both" gives a figure for each direction while the other one is busy: it has twice as much to copy, so what is timed
    is never alone. `at_once`: each GPU alone, while the others rest, or all at the same time. GPUs are held against
    their peers where they copy alone and in one direction, and where all copy against those at the same NUMA node:
    otherwise some share a path to the host. The directions of a GPU follow each other: between them it rests only while
    what arrived is compared. Measured `again` there are more samples and longer ones.
    """
    groups = [world] if at_once == "all" else [world.subset([index]) for index in range(world.size)]
    lines = world.run(_prepare, nbytes)
    work = watched(_copied)
    by_rank = [each for group in groups for each in group.run(work, directions, at_once == "all", lines, again)]
    world.run(copying.free)
    # Of a link that copies alone the fastest sample, as of STREAM: whatever else uses the host only takes from it. On a
    # virtual machine with two H100 samples were 32 to 55 GB/s, the medians of nine up to 5 % apart (2026-11-28).
    fastest, details = median if at_once == "all" else max, {"bytes": nbytes}
    copied = {}
    for direction in directions:
        measurements = []
        for way in WAYS[direction]:
            conditions: dict[str, Condition] = {
                "direction": f"{way} both ways" if direction == "both" else way,
                "at_once": at_once,
                **({"method": LINED_UP} if at_once == "all" else {}),
            }
            metric = metric_under("host_bandwidth", conditions)
            of_rank = [
                [Reading(metric, fastest(each := crossed[direction][0][way]), conditions, each, None, details, state)]
                for crossed, state in by_rank
            ]
            measurements += together(world, of_rank)
        faults = world.faults("link_data_error", [crossed[direction][1] for crossed, _ in by_rank])
        copied[direction] = Copied(measurements, faults)
    return copied


def _prepare(rank: Rank, nbytes: int) -> copying.Offer:
    return copying.prepare(rank, nbytes, {way: way.split(" to ") for way in ONE_WAY}).line.offer


def _copied(
    rank: Rank, directions: Sequence[HostDirection], at_once: bool, lines: list[copying.Offer], again: bool
) -> dict[HostDirection, tuple[dict[HostDirection, tuple[float, ...]], str]]:
    """By direction the samples in GB/s of each way, while this rank's others are busy, and what did not arrive; "" if
    all did."""
    ends: Ends = rank.kept[copying.ENDS]
    if at_once:
        ends.line.draw(rank.index, lines)
    if rank.gpu is not None:
        until = time.monotonic() + LEAD_IN_SECONDS
        with rank.phase("copies between host and device: the first ones"):
            while time.monotonic() < until:
                ends.copier.seconds(_copies(ends, ONE_WAY), 0, copying.WARM_UP)  # both ways, so that neither has rested
    lasting = copying.LASTING[rank.device.type] if at_once or again else 0.0
    everyone = partial(ends.line.meet, [other for other in range(rank.size) if other != rank.index])
    count, found = SAMPLES_AGAIN if again else copying.SAMPLES, {}
    for direction in directions:
        ways, samples = WAYS[direction], {}
        for way in ways:
            ends.ways[way][1].fill_(copying.BLANK)
        for way in ways:
            with rank.phase(f"copies between host and device: {way}"):
                copies = _copies(ends, [way, *(other for other in ways if other != way)])
                samples[way] = copying.bandwidth(ends.copier, copies, everyone if at_once else None, lasting, count)
        # What lies on the side of a sink was filled alike.
        texts = (copying.difference(ends.ways[way][1], ends.ways[BACK[way]][0]) for way in ways)
        found[direction] = samples, "; ".join(filter(None, texts))
    return found


def _copies(ends: Ends, ways: Sequence[HostDirection]) -> list[Copy]:
    return [Copy(sink.data_ptr(), source.data_ptr(), sink.nbytes) for source, sink in map(ends.ways.__getitem__, ways)]

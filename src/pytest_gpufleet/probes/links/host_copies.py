"""The links between GPU and host."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from pytest_gpufleet.machine import nvml
from pytest_gpufleet.model.conditions import LINED_UP, Condition
from pytest_gpufleet.model.measurement import Reading
from pytest_gpufleet.model.metric import MiB, metric_under
from pytest_gpufleet.probes.links import copying
from pytest_gpufleet.probes.links.copying import Copied, Copier, Copy, StartingLine
from pytest_gpufleet.probes.measure import together, watched
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
    assert rank.gpu is not None
    here = torch.empty(64 * MiB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device=rank.device, pin_memory=False)
    with nvml.session() as pynvml, suppress(pynvml.NVMLError_NotSupported):
        handle = pynvml.nvmlDeviceGetHandleByUUID(rank.gpu.uuid)
        best, seen = int(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)), 0
        until = time.monotonic() + SPEED_UP_SECONDS
        while True:
            for _ in range(COPIES):
                there.copy_(here, non_blocking=True)
            seen = max(seen, int(pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)))
            torch.cuda.synchronize()
            if seen >= best or time.monotonic() > until:
                return seen, best
    return None


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
    world.run(copying.free, LINK)
    # Of a link that copies alone the fastest sample, as of STREAM: whatever else uses the host only takes from it. On a
    # virtual machine with two H100 samples were 32 to 55 GB/s, the medians of nine up to 5 % apart (2026-11-28).
    fastest = median if at_once == "all" else max
    copied = {}
    for direction in directions:
        crossed = [each[direction] for each, _ in by_rank]
        measurements = []
        for way in WAYS[direction]:
            conditions: dict[str, Condition] = {
                "direction": f"{way} both ways" if direction == "both" else way,
                "at_once": at_once,
                **({"method": LINED_UP} if at_once == "all" else {}),
            }
            metric, samples = metric_under("host_bandwidth", conditions), [each.samples[way] for each in crossed]
            of_rank = [
                [Reading(metric, fastest(each), conditions, each, None, {"bytes": nbytes}, state)]
                for each, (_, state) in zip(samples, by_rank, strict=True)
            ]
            measurements += together(world, of_rank)
        copied[direction] = Copied(measurements, world.faults("link_data_error", [each.wrong for each in crossed]))
    return copied


@dataclass
class _Link:
    """What a rank copies between: a source and a sink for each way; and where it meets the other ranks."""

    copier: Copier
    ways: dict[HostDirection, tuple[Tensor, Tensor]]
    line: StartingLine


@dataclass(frozen=True)
class _Crossed:
    """What a rank saw of a direction: samples in GB/s of each way, and what did not arrive; "" if all did."""

    samples: dict[HostDirection, tuple[float, ...]]
    wrong: str


LINK = "the link to the host"  # of a rank, which it keeps from `_prepare` to `copying.free`


def _prepare(rank: Rank, nbytes: int) -> str:
    copier = copying.copier(rank)
    memory = {"host": copier.host_memory, "device": copier.device_memory}
    link = rank.kept[LINK] = _Link(copier, {}, StartingLine(rank.size))
    for way in ONE_WAY:
        source, sink = (memory[side](nbytes) for side in way.split(" to "))
        copying.fill(source, rank.index)
        link.ways[way] = source, sink
    return link.line.address


def _copied(
    rank: Rank, directions: Sequence[HostDirection], at_once: bool, lines: list[str], again: bool
) -> dict[HostDirection, _Crossed]:
    """In each direction, while this rank's others are busy."""
    link: _Link = rank.kept[LINK]
    if at_once:
        link.line.draw(rank.index, lines)
    if rank.gpu is not None:
        until = time.monotonic() + LEAD_IN_SECONDS
        with rank.phase("copies between host and device: the first ones"):
            while time.monotonic() < until:
                link.copier.seconds(_copies(link, ONE_WAY), 0, copying.WARM_UP)  # both ways, so that neither has rested
    return {direction: _crossed(rank, link, direction, at_once, again) for direction in directions}


def _crossed(rank: Rank, link: _Link, direction: HostDirection, at_once: bool, again: bool) -> _Crossed:
    sinks = [link.ways[way][1] for way in WAYS[direction]]
    for words in sinks:
        words.fill_(copying.BLANK)
    lasting = copying.LASTING[rank.device.type] if at_once or again else 0.0
    everyone = partial(link.line.meet, [other for other in range(rank.size) if other != rank.index])
    several = partial(copying.bandwidth, lasting=lasting, samples=SAMPLES_AGAIN if again else copying.SAMPLES)
    samples = {}
    for way in WAYS[direction]:
        with rank.phase(f"copies between host and device: {way}"):
            copies = _copies(link, [way, *(other for other in WAYS[direction] if other != way)])
            samples[way] = several(link.copier, copies, everyone if at_once else None)
    expected = [link.ways[BACK[way]][0] for way in WAYS[direction]]  # what lies on that side was filled alike
    texts = map(copying.difference, sinks, expected)
    return _Crossed(samples, "; ".join(filter(None, texts)))


def _copies(link: _Link, ways: Sequence[HostDirection]) -> list[Copy]:
    ends = [link.ways[way] for way in ways]
    return [Copy(sink.data_ptr(), source.data_ptr(), sink.nbytes) for source, sink in ends]

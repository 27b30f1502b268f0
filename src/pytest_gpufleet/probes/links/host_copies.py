"""The links between GPU and host."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal

import torch

from pytest_gpufleet.model.conditions import LINED_UP
from pytest_gpufleet.model.measurement import Reading
from pytest_gpufleet.model.metric import MiB, metric_under
from pytest_gpufleet.probes.links import copying
from pytest_gpufleet.probes.links.copier import Copier, Copy, Memory
from pytest_gpufleet.probes.links.copying import Copied
from pytest_gpufleet.probes.links.starting_line import StartingLine
from pytest_gpufleet.probes.measure import together
from pytest_gpufleet.world.rank import Rank
from pytest_gpufleet.world.world import World

COPIES = 20
SPEED_UP_SECONDS = 2.0

# A way that has rested is slow at first: of two healthy H200 in a virtual machine one reached half its bandwidth for up
# to 0.5 s, at its full PCIe generation by NVML.
LEAD_IN_SECONDS = 1.0

# All together: the three samples last more than a second.
LASTING = {"cuda": 0.35, "cpu": 0.002}

HostDirection = Literal["host to device", "device to host", "both"]
ONE_WAY: tuple[HostDirection, ...] = ("host to device", "device to host")
WAYS: dict[HostDirection, tuple[HostDirection, ...]] = {**{way: (way,) for way in ONE_WAY}, "both": ONE_WAY}


def pcie_generation_under_load(rank: Rank) -> tuple[int, int] | None:
    """The highest generation at which this GPU's PCIe link was seen to run while copies are under way, and the highest
    it can; None where NVML does not tell. A link that rests takes a moment to speed up."""
    import pynvml

    assert rank.gpu is not None
    here = torch.empty(64 * MiB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device=rank.device, pin_memory=False)
    pynvml.nvmlInit()
    try:
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
    except pynvml.NVMLError_NotSupported:
        return None
    finally:
        pynvml.nvmlShutdown()


def host_bandwidth(world: World, direction: HostDirection, at_once: Literal["one", "all"], nbytes: int) -> Copied:
    """Bandwidth in GB/s between pinned host memory and each GPU, in buffers of `nbytes`, by the method of nvbandwidth.

    "both" gives a figure for each direction while the other one is busy: it has twice as much to copy, so what is timed
    is never alone. `at_once`: each GPU alone, while the others rest, or all at the same time; then all begin together,
    and their samples last more than a second in all. GPUs are held against their peers where they copy alone and in one
    direction, and where all copy against those at the same NUMA node: otherwise some share a path to the host, and
    which ones differs from machine to machine.
    """
    together_they = at_once == "all"
    turns = [list(range(world.size))] if together_they else [[index] for index in range(world.size)]
    lines = world.run(_prepare, direction, nbytes)
    measurements = []
    for way in WAYS[direction]:
        conditions = {"direction": f"{way} both ways" if direction == "both" else way, "at_once": at_once}
        if together_they:
            conditions["method"] = LINED_UP
        metric = metric_under("host_bandwidth", conditions)
        samples = [each for turn in turns for each in world.subset(turn).run(_samples, way, together_they, lines)]
        readings = [[Reading(metric, median(each), conditions, each, details={"bytes": nbytes})] for each in samples]
        measurements += together(world, readings)
    wrong = world.run(_wrong)
    world.run(_free)
    return Copied(measurements, world.faults("copy_wrong", wrong))


@dataclass
class _Link:
    """What a rank copies between: a source and a sink for each direction; and where it meets the other ranks."""

    copier: Copier
    ways: dict[HostDirection, tuple[Memory, Memory]]
    line: StartingLine


LINK = "the link to the host"  # of a rank, which it keeps from `_prepare` to `_free`


def _prepare(rank: Rank, direction: HostDirection, nbytes: int) -> str:
    copier = copying.copier(rank)
    memory = {"host": copier.host_memory, "device": copier.device_memory}
    link = rank.kept[LINK] = _Link(copier, {}, StartingLine(rank.size))
    for way in WAYS[direction]:
        source, sink = (memory[side](nbytes) for side in way.split(" to "))
        copying.fill(source.words, rank.index)
        sink.words.fill_(copying.BLANK)
        link.ways[way] = (source, sink)
    return link.line.address


def _samples(rank: Rank, way: HostDirection, at_once: bool, lines: list[str]) -> tuple[float, ...]:
    """Of one direction, while this rank's others are busy."""
    link: _Link = rank.kept[LINK]
    ends = [link.ways[way], *(others for other, others in link.ways.items() if other != way)]
    copies = [Copy(sink.address, source.address, sink.words.nbytes) for source, sink in ends]
    with rank.phase(f"copies between host and device: {way}"):
        if rank.gpu is not None and way == next(iter(link.ways)):
            _lead_in(link.copier, copies)
        if not at_once:
            return copying.bandwidth(link.copier, copies)
        link.line.draw(rank.index, lines)
        everyone = partial(link.line.meet, [other for other in range(rank.size) if other != rank.index])
        return copying.bandwidth(link.copier, copies, everyone, LASTING[rank.device.type])


def _lead_in(copier: Copier, copies: list[Copy]) -> None:
    until = time.monotonic() + LEAD_IN_SECONDS
    while time.monotonic() < until:
        copier.seconds(copies, 0, copying.WARM_UP)


def _wrong(rank: Rank) -> str:
    """What did not arrive, in either direction."""
    sinks = [sink.words for _, sink in rank.kept[LINK].ways.values()]
    texts = [copying.difference(words, copying.fill(torch.empty_like(words), rank.index)) for words in sinks]
    return "; ".join(filter(None, texts))


def _free(rank: Rank) -> None:
    link: _Link = rank.kept.pop(LINK)
    link.line.remove()
    link.copier.free()

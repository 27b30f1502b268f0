"""Steps of training in a row, timed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pytest_gpufleet.hardware import nvml
from pytest_gpufleet.hardware.nvml import Nvml
from pytest_gpufleet.model.gpu import Unavailable
from pytest_gpufleet.model.measurement import Reading
from pytest_gpufleet.model.metric import Condition
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.probes.timing import everyones, line_up
from pytest_gpufleet.world.rank import Rank

SAMPLES = 3

Step = Callable[[], Tensor]  # one step of training; returns the loss


@dataclass(frozen=True)
class Lap:
    """Some steps in a row: seconds of all, and of each; the loss of the last; seconds that the processor computed."""

    seconds: float
    steps: tuple[float, ...]
    loss: float
    processor_seconds: float

    @property
    def mean(self) -> float:
        return self.seconds / len(self.steps)


def lap(rank: Rank, step: Step, count: int, *, together: bool = True) -> Lap:
    """Do `count` steps, on ranks that are `together` from the same moment on.

    Raises FloatingPointError if the loss is not finite: a throughput of wrong arithmetic is none.
    """
    on_gpu = rank.device.type == "cuda"
    if together and rank.size > 1:
        line_up(rank)
    if on_gpu:
        torch.cuda.synchronize()
    loss = torch.zeros(())
    marks: list[Any] = [_mark(on_gpu)]
    began, computed = time.perf_counter(), time.process_time()
    for _ in range(count):
        loss = step()
        marks.append(_mark(on_gpu))
    if on_gpu:
        torch.cuda.synchronize()
    seconds, processor_seconds = time.perf_counter() - began, time.process_time() - computed
    if not loss.isfinite():
        raise FloatingPointError(f"the loss became {loss.item()}")
    times = tuple(a.elapsed_time(b) / 1e3 if on_gpu else b - a for a, b in itertools.pairwise(marks))
    return Lap(seconds, times, loss.item(), processor_seconds)


def record_losses(rank: Rank, training: Mapping[str, Condition], course: Sequence[Lap], *, together: bool) -> None:
    """Put the loss at the end of each lap on record, by the steps done in all laps of the course up to it. Ranks that
    train one model together have one curve, the mean of theirs: each sees its own data."""
    steps, losses = itertools.accumulate(len(each.steps) for each in course), [each.loss for each in course]
    if together:
        losses = [fmean(column) for column in zip(*everyones(rank, losses), strict=True)]
    if not together or rank.index == 0:
        rank.record_losses(training, dict(zip(steps, losses, strict=True)), WORLD if together else None)


def _mark(on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


READING = "utilization_percent"


def utilization(rank: Rank, just_done: Lap) -> float | None:
    """The share of the time in which the GPU ran anything, as NVML has it right after a lap: of its last sample period,
    a sixth of a second to a second (nvml.h, nvmlUtilization_t). None where NVML does not tell.

    Of a CPU rank the share of a core that it used in the lap.
    """
    if rank.gpu is None:
        return min(1.0, just_done.processor_seconds / just_done.seconds)
    with nvml.session() as driver:
        gpu = Nvml(driver, [driver.nvmlDeviceGetHandleByUUID(rank.gpu.uuid)])
        percent = nvml.read(gpu, 0, [READING])[READING]
    return None if isinstance(percent, Unavailable) else float(percent) / 100


def without_communication(module: nn.Module, step: Step) -> Step:
    """The same step without communication, after which ranks differ; itself where ranks do not train together."""
    if not isinstance(module, DistributedDataParallel):
        return step

    def alone() -> Tensor:
        with module.no_sync():
            return step()

    return alone


def communication_share(
    rank: Rank, conditions: Mapping[str, Condition], usual: Sequence[Lap], quiet: Sequence[Lap]
) -> Reading:
    """What the slowest rank's step is longer with communication than without, as a part of it, lap by lap."""
    every = everyones(rank, [each.mean for each in (*usual, *quiet)])
    slowest = [max(column) for column in zip(*every, strict=True)]
    with_it, without = slowest[: len(usual)], slowest[len(usual) :]
    shares = tuple(max(0.0, 1 - alone / all_in) for all_in, alone in zip(with_it, without, strict=True))
    details = {"step": f"{ms(median(with_it))} with communication, {ms(median(without))} without"}
    return Reading("communication_share", median(shares), conditions, shares, WORLD, details)


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"

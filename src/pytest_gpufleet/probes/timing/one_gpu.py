"""How long work on one device takes."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import torch

SAMPLES = 3
SAMPLE_SECONDS = {"cuda": 0.2, "cpu": 0.002}


def seconds_each(device: torch.device, work: Callable[[], object], repeats: int) -> float:
    """Seconds that one of `repeats` calls takes, back to back: by CUDA events on a GPU, by the clock on a CPU."""
    if device.type == "cpu":
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - began) / repeats
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(repeats):
        work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / repeats


def warm_up(device: torch.device, work: Callable[[], object], seconds: float) -> None:
    """Do the work for so long that clock and power have settled."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        seconds_each(device, work, 10)


def samples(device: torch.device, work: Callable[[], object]) -> tuple[float, ...]:
    """Seconds that one call takes, SAMPLES times, each the mean over as many calls as fill SAMPLE_SECONDS."""
    work()  # the first call may load or choose a kernel
    repeats = max(1, math.ceil(SAMPLE_SECONDS[device.type] / seconds_each(device, work, 3)))
    return tuple(seconds_each(device, work, repeats) for _ in range(SAMPLES))


def parts(device: torch.device, work: Callable[[], object], seconds: float, count: int) -> list[float]:
    """Seconds that one call takes in each of `count` equal parts of about `seconds` of work without a gap."""
    repeats = max(1, math.ceil(seconds / count / seconds_each(device, work, 3)))
    if device.type == "cpu":
        return [seconds_each(device, work, repeats) for _ in range(count)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        for _ in range(repeats):
            work()
        mark.record()
    marks[-1].synchronize()
    return [float(a.elapsed_time(b)) / 1e3 / repeats for a, b in itertools.pairwise(marks)]

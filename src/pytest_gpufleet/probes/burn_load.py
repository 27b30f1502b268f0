"""Sustained load: matrix products, reductions, memory patterns and training take turns for as long as wanted.

Every result is compared, bit for bit, with what it must be or with the first one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pytest_gpufleet.probes.collectives.repeated import stays_exact
from pytest_gpufleet.probes.compute import corruption
from pytest_gpufleet.probes.compute.rate import lacking
from pytest_gpufleet.probes.memory import patterns
from pytest_gpufleet.probes.timing.all_ranks import agree
from pytest_gpufleet.probes.training.loop import ddp_of, eager, lap, module_of, precision, release, synthetic_batch
from pytest_gpufleet.probes.training.recipes import Workload, plan
from pytest_gpufleet.probes.training.replicas import differences
from pytest_gpufleet.world.rank import Rank

PRODUCTS = ("bf16", "fp16", "fp32")  # the first that a device has: tensor cores draw the most power
RECIPE = "amp"
SHOWN = 3


@dataclass(frozen=True)
class Turn:
    """What one rank did in one turn. `trouble` says what was wrong, "" if nothing was."""

    rate: float  # in the unit of its load
    trouble: str
    resident_bytes: int  # host memory of the process


# The matrix product that is repeated: its operands and its first result stay on the device between the turns.
_repeated: list[corruption.Repeated] = []


def prepare(rank: Rank) -> corruption.Repetition:
    """Make the matrix product ready; what its first result was, for comparison with that of the other ranks."""
    with rank.phase("burn-in: preparing"):
        _repeated[:] = [corruption.Repeated(rank.device, product_precision(rank.device))]
        work = _repeated[0]
        return corruption.Repetition(corruption.kind(rank.device), work.products, 0.0, work.trouble, *work.sums)


def product_precision(device: torch.device) -> str:
    return next(name for name in PRODUCTS if not lacking(name, device))


def turn(rank: Rank, name: str, seconds: float) -> Turn:
    """One turn of a load of LOADS, for about so many seconds, after `prepare`."""
    with rank.phase(f"burn-in: {name}"):
        rate, trouble = LOADS[name].run(rank, seconds)
    return Turn(rate, trouble, resident_bytes())


def put_away(rank: Rank) -> None:
    """Give back the memory that `prepare` has taken."""
    _repeated.clear()
    release(rank.device)


def _products(rank: Rank, seconds: float) -> tuple[float, str]:
    """TFLOP/s."""
    return _repeated[0].run(seconds), _repeated[0].trouble


def _reductions(rank: Rank, seconds: float) -> tuple[float, str]:
    """Reductions a second."""
    if rank.size == 1:
        return 0.0, ""
    began = time.perf_counter()
    times, trouble = stays_exact(rank, seconds)
    return times / (time.perf_counter() - began), trouble


def _memory(rank: Rank, seconds: float) -> tuple[float, str]:
    """Bytes a second, of all memory that is free."""
    began = time.perf_counter()
    seen = patterns.hold_patterns(rank, seconds)
    return seen.tested * seen.sweeps / (time.perf_counter() - began), seen.trouble


def _training(rank: Rank, seconds: float) -> tuple[float, str]:
    """Images a second, all ranks together: ResNet-50, begun anew; in the end all ranks must have the same bits."""
    rate, unlike = _train(rank, seconds)
    release(rank.device)
    return rate, f"parameters differ from the other ranks': {'; '.join(unlike[:SHOWN])}" if unlike else ""


def _train(rank: Rank, seconds: float) -> tuple[float, list[str]]:
    training = plan(RECIPE, Workload(), rank.device)
    together = rank.size > 1
    module = ddp_of(rank, training) if together else module_of(rank, training)
    images, labels = synthetic_batch(rank, training)
    train = eager(module, training, rank.device)
    with precision(training.recipe):
        trial = lap(rank, lambda: train(images, labels), training.recipe.warm_up)
        count = agree(rank, max(2, int(seconds / trial.mean))) if together else max(2, int(seconds / trial.mean))
        measured = lap(rank, lambda: train(images, labels), count)
    rate = count * training.recipe.batch * rank.size / measured.seconds
    return rate, differences(rank, dict(module.named_parameters())) if together else []


@dataclass(frozen=True)
class Load:
    share: float  # of the time
    run: Callable[[Rank, float], tuple[float, str]]  # about so many seconds: the rate, and what was wrong


# Products on the tensor cores draw the most power.
LOADS = {
    "matrix products": Load(0.6, _products),
    "all_reduce": Load(0.1, _reductions),
    "memory patterns": Load(0.1, _memory),
    "training": Load(0.2, _training),
}


def resident_bytes() -> int:
    """Host memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

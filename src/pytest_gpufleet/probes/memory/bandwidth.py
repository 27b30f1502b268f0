"""How fast the memory of a GPU is."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from pytest_gpufleet.hardware.telemetry import state_of
from pytest_gpufleet.model.measurement import Reading
from pytest_gpufleet.model.metric import GiB, MiB
from pytest_gpufleet.probes.timing.one_gpu import samples, warm_up
from pytest_gpufleet.world.rank import Rank

ARRAY_BYTES = {"cuda": 2 * GiB, "cpu": MiB}  # far larger than any cache
WARM_UP_SECONDS = {"cuda": 0.5, "cpu": 0.0}
SCALAR = 0.4


def memory_bandwidth(rank: Rank) -> list[Reading]:
    """GB/s of copy (c = a) and triad (a = b + scalar * c) on arrays of float64, counted as BabelStream does: copy moves
    2, triad 3 arrays. Median of three samples. With what the GPU was like before: heavy load may have left it hot."""
    kind, before = rank.device.type, state_of(rank.gpu)
    a, b, c = (torch.rand(ARRAY_BYTES[kind] // 8, dtype=torch.float64, device=rank.device) for _ in range(3))
    operations: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2, lambda: c.copy_(a)),
        "triad": (3, lambda: torch.add(b, c, alpha=SCALAR, out=a)),
    }
    readings = []
    warm_up(rank.device, operations["copy"][1], WARM_UP_SECONDS[kind])  # and the triad follows without a rest
    for name, (arrays, work) in operations.items():
        with rank.phase(f"memory {name}"):
            rates = tuple(arrays * a.nbytes / seconds / 1e9 for seconds in samples(rank.device, work))
        conditions = {"operation": name, "at_once": "all" if rank.size > 1 else "one"}
        details = {"dtype": "float64"}
        readings.append(Reading("memory_bandwidth", median(rates), conditions, rates, None, details, before))
    return readings

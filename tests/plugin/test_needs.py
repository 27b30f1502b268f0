"""What the marker `needs` says of machines that lack something."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_gpufleet import Faults, Gpu, GpuTopology
from pytest_gpufleet.plugin.needs import lacking
from pytest_gpufleet.run.ground import Ground
from tests import runs

REHEARSAL = Ground(GpuTopology(), rehearsal_ranks=2)


def gpus(count: int, capability: tuple[int, int] | None = (9, 0)) -> Ground:
    topology = runs.topology("node7", runs.H200).first(count)
    able = tuple(Gpu(gpu.index, {**gpu.facts, "compute_capability": capability}) for gpu in topology.gpus)
    return Ground(replace(topology, gpus=able), rehearsal_ranks=0)


@pytest.mark.parametrize(
    ("ground", "needs", "words"),
    [
        (REHEARSAL, {"gpus": True}, "a rehearsal has no GPUs"),
        (REHEARSAL, {"ranks": 4}, "needs 4 ranks, this run has 2"),
        (REHEARSAL, {"ranks": 2, "capability": (8, 0)}, ""),
        (gpus(1), {"gpus": True}, ""),
        (gpus(1), {"ranks": 2}, "needs 2 ranks, this run has 1"),
        (gpus(2), {"ranks": 2, "capability": (9, 0)}, ""),
        (gpus(2, (7, 5)), {"capability": (8, 0)}, "needs compute capability 8.0, GPU 0 has 7.5"),
        (gpus(2, None), {"capability": (8, 0)}, ""),
    ],
)
def test_what_is_lacking(ground: Ground, needs: dict[str, Any], words: str) -> None:
    assert lacking(ground, **needs) == words


def test_a_machine_without_the_gpus_that_were_asked_for_fails() -> None:
    dead = Ground(GpuTopology(problems=("the driver is not loaded",)), rehearsal_ranks=0)
    with pytest.raises(Faults) as raised:
        lacking(dead, gpus=True)
    assert [fault.code for fault in raised.value.faults] == ["gpu_missing"]

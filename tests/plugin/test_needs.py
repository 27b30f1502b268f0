"""What the marker `needs` says of machines that lack something."""

from dataclasses import replace

import pytest

from pytest_gpufleet import Gpu, GpuTopology
from pytest_gpufleet.plugin.markers import lacking
from tests import runs
from tests.machines import first_gpus

REHEARSAL = GpuTopology(), 2, 1


def gpus(count, capability=(9, 0)):
    topology = first_gpus(runs.topology("node7", runs.H200), count)
    able = tuple(Gpu(gpu.index, {**gpu.facts, "compute_capability": capability}) for gpu in topology.gpus)
    return replace(topology, gpus=able), count, 1


@pytest.mark.parametrize(("here", "needs", "words"), [
    (REHEARSAL, {"gpus": True}, "a rehearsal has no GPUs"),
    (REHEARSAL, {"ranks": 4}, "needs 4 ranks, this run has 2"),
    (REHEARSAL, {"ranks": 2, "capability": (8, 0)}, ""),
    (gpus(1), {"gpus": True}, ""),
    (gpus(1), {"ranks": 2}, "needs 2 ranks, this run has 1"),
    (gpus(2), {"ranks": 2, "capability": (9, 0)}, ""),
    (gpus(2, (7, 5)), {"capability": (8, 0)}, "needs compute capability 8.0, GPU 0 has 7.5"),
    (gpus(2, None), {"capability": (8, 0)}, ""),
    (REHEARSAL, {"nodes": 2}, "needs 2 nodes, this run has 1"),
    ((GpuTopology(), 6, 3), {"nodes": 3, "ranks": 6}, ""),
])  # fmt: skip
def test_what_is_lacking(here, needs, words):
    assert lacking(*here, **needs) == words

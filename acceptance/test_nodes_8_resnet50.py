"""ResNet-50 trains on many nodes as fast as on one, for each GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpufleet import Judge, Measurement, Size, World, measure, measure_all, scaling_efficiency
from pytest_gpufleet.probes.between_nodes import doubling
from pytest_gpufleet.probes.training.loop import train_throughput
from pytest_gpufleet.probes.training.recipes import Workload

pytestmark = [
    pytest.mark.chapter("Between nodes: ResNet-50", "How fast is real training on 1, 2, 4 ... nodes?"),
    pytest.mark.level("standard"),
    pytest.mark.needs(nodes=2),
]

RECIPE = "amp"
WORK = Size(Workload(), rehearsal=Workload(batch=2, steps=1))


@pytest.mark.figures(
    "solo_train_throughput",
    "train_throughput",
    "scaling_efficiency",
    "communication_share",
    peers="of each GPU alone, which are all GPUs of that model on all nodes",
)
def test_throughput_over_nodes(nccl_group: World, judge: Judge) -> None:
    """ResNet-50 throughput by number of nodes, and scaling

    Each GPU trains alone first: one that is slower than those of all nodes is hot, power-capped or used by another
    process. Scaling is the throughput of nodes together, of the sum of what each GPU reaches alone, so a slow GPU does
    not lower it. Low on many nodes only: communication; see rails and pairs. There are no published limits.
    """
    *fewer, nodes = doubling(nccl_group)

    def measured() -> list[Measurement]:
        alone = measure(nccl_group, train_throughput, RECIPE, WORK, together=False)
        every, share, *_ = measure_all(nodes, train_throughput, RECIPE, WORK, closely=True)
        together = [*(measure(some, train_throughput, RECIPE, WORK) for some in fewer), every]
        # Some nodes are not always the first ones: those of an NVLink domain come before others.
        own = [replace(alone, values={at: alone.values[at] for at in some.places}) for some in (*fewer, nodes)]
        return [alone, *together, *map(scaling_efficiency, own, together), share]

    judge(measured, required=False)

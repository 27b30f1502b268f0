"""GPUs compute and communicate at once, as they do in training: what that costs, and that both stay exact."""

from __future__ import annotations

from functools import partial

import pytest

from pytest_gpufleet import Judge, MiB, Size, World, expect_none, measure_all
from pytest_gpufleet.probes.collectives import under_load
from pytest_gpufleet.probes.compute.rate import usual_precision

pytestmark = [
    pytest.mark.chapter("Under load", "Do matmuls and collectives stay exact and fast while both run?"),
    pytest.mark.level("standard"),
    pytest.mark.needs(ranks=2),
]

NBYTES = Size(256 * MiB, rehearsal=256 * 1024)  # as large as what training reduces at a time


@pytest.fixture(scope="module")
def precision(nccl_group: World) -> str:
    """The one that training uses."""
    return usual_precision(nccl_group.gpus)


def test_both_stay_exact(nccl_group: World, precision: str) -> None:
    """Matmuls and all_reduce at the same time are exact

    Both together draw more power than either, and a weak power supply or a link beside a hot chip fails then. A wrong
    matmul: replace the named GPU. A wrong sum: check NVLink and ECC errors of the named GPUs; if all are named, one of
    them corrupts the sum of all.
    """
    every = nccl_group.run(under_load.wrong_under_load, precision, NBYTES)
    matmuls = [f"elements of matmuls: {wrong:,}" if wrong else "" for wrong, _ in every]
    sums = [f"elements of sums: {wrong:,}" if wrong else "" for _, wrong in every]
    expect_none([*nccl_group.faults("matmul_nondeterministic", matmuls), *nccl_group.faults("collective_wrong", sums)])


@pytest.mark.figures("product_retention", "reduction_retention")
def test_what_each_keeps(nccl_group: World, judge: Judge, precision: str) -> None:
    """Matmuls and all_reduce at the same time: share of their speed alone

    Both slow down on a healthy machine, since they share SMs, memory bandwidth and power; so GPUs are compared with
    their peers only. A GPU that is slower than they are gets less power, draws more for the same work, or has slow
    links. Compare `nvidia-smi -q -d CLOCK,POWER,PERFORMANCE` with its peers, and check its NVLinks.
    """
    judge(partial(measure_all, nccl_group, under_load.retention_under_load, precision, NBYTES), required=False)

"""GPUs compute and communicate at once, as they do in training: what that costs, and that both stay exact."""

from __future__ import annotations

import pytest

from pytest_gpufleet import Judge, MiB, Size, World, expect_none, measure_all
from pytest_gpufleet.probes.collectives import under_load
from pytest_gpufleet.probes.compute.rate import usual_precision

pytestmark = [
    pytest.mark.chapter("Under load", "What becomes of products and collectives that run at the same time?"),
    pytest.mark.level("standard"),
    pytest.mark.needs(ranks=2),
]

NBYTES = Size(256 * MiB, rehearsal=256 * 1024)  # as large as what training reduces at a time


@pytest.fixture(scope="module")
def precision(nccl_group: World) -> str:
    """The one that training uses."""
    return usual_precision(nccl_group.gpus)


def test_both_stay_exact(nccl_group: World, precision: str) -> None:
    """Products and an all_reduce that run at the same time give the bits that each gives alone

    Both together draw more power than either, and a GPU whose supply is weak, or a link beside a hot chip, makes its
    mistakes then. A product that is wrong: replace the GPU that is named. A sum that is wrong: look for NVLink and ECC
    errors of the GPUs that are named; if all are, one of them spoils everybody's sum.
    """
    every = nccl_group.run(under_load.wrong_under_load, precision, NBYTES)
    matmuls = [f"elements of matmuls: {wrong:,}" if wrong else "" for wrong, _ in every]
    sums = [f"elements of sums: {wrong:,}" if wrong else "" for _, wrong in every]
    expect_none([*nccl_group.faults("matmul_nondeterministic", matmuls), *nccl_group.faults("collective_wrong", sums)])


@pytest.mark.figures("product_retention", "reduction_retention")
def test_what_each_keeps(nccl_group: World, judge: Judge, precision: str) -> None:
    """What matrix products and an all_reduce of 256 MiB keep of their speed while both run

    Each is measured alone and beside the other, in turns. Both slow down on a healthy machine, since NCCL takes SMs and
    memory bandwidth from the products, and both share the GPU's power; so no limit says how much may be left, and GPUs
    are held against their peers. One that keeps less than they do draws more power for the same work or gets less of
    it, or its links keep the SMs busy for longer: compare `nvidia-smi -q -d CLOCK,POWER,PERFORMANCE` of that GPU with
    the others' in this check, and look at its NVLinks.
    """
    judge(*measure_all(nccl_group, under_load.retention_under_load, precision, NBYTES), required=False)

"""The GPUs compute the same bits from the same data, and the hashes of them are kept for comparison with others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pytest_gpufleet import World, expect_none, not_applicable
from pytest_gpufleet.probes.compute.fixed_work import fingerprints
from pytest_gpufleet.verdict.fleet import equality

pytestmark = [
    pytest.mark.chapter("Fingerprint", "Do all GPUs compute the same bits from the same data?"),
    pytest.mark.level("standard"),
]

Record = Callable[[Sequence[object]], None]


def compute(world: World, record_fingerprints: Record, work: str) -> None:
    """Record what each GPU computes, and fail with those that differ."""
    found = fingerprints(world, work)
    record_fingerprints(found)
    if equality.nothing_repeats(found):
        not_applicable("with this software no GPU gives the same bits twice, so there is nothing to compare")
    expect_none(equality.gpus_apart(found))


@pytest.mark.parametrize("work", ["products", "reductions", "training"])
def test_gpus_compute_the_same_bits(world: World, record_fingerprints: Record, work: str) -> None:
    """All GPUs compute the same bits

    Runs fixed work on fixed data twice on each GPU: matmuls at all precisions, sums and softmax, training steps, all
    with deterministic algorithms. GPUs of one model with the same libraries must agree in every bit; one that does not
    corrupts data silently. Run again and replace the named GPU if it is the same one. With two GPUs, or with one,
    compare with the run of another machine of the same model and versions: `gpufleet compare`.
    """
    compute(world, record_fingerprints, work)


@pytest.mark.needs(ranks=2)
def test_all_gpus_get_the_same_sum(nccl_group: World, record_fingerprints: Record) -> None:
    """all_reduce leaves the same bits on all GPUs

    The sums are exact in any order, so no choice of NCCL changes them, and machines with the same number of GPUs must
    agree. The named GPU received or added other data than the others. Check NVLink and ECC errors (`nvidia-smi nvlink
    -e`, `nvidia-smi -q`) and the checks of exactness.
    """
    compute(nccl_group, record_fingerprints, "all_reduce")

"""The GPUs compute the same bits from the same data, and the hashes of them are kept for comparison with others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pytest_gpufleet import World, expect_none, not_applicable
from pytest_gpufleet.probes.compute.fixed_work import fingerprints
from pytest_gpufleet.verdict import fingerprint_rules

pytestmark = [
    pytest.mark.chapter("Fingerprint", "Do all GPUs compute the same bits from the same data?"),
    pytest.mark.level("standard"),
]

Record = Callable[[Sequence[object]], None]


def compute(world: World, record_fingerprints: Record, work: str) -> None:
    """Record what each GPU computes, and fail with those that differ."""
    found = fingerprints(world, work)
    record_fingerprints(found)
    if fingerprint_rules.nothing_repeats(found):
        not_applicable("with this software no GPU gives the same bits twice, so there is nothing to compare")
    expect_none(fingerprint_rules.gpus_apart(found))


@pytest.mark.parametrize("work", ["products", "reductions", "training"])
def test_gpus_compute_the_same_bits(world: World, record_fingerprints: Record, work: str) -> None:
    """Fixed work on fixed data gives the same bits on every GPU, and the same a second time

    The work is matrix products at all precisions, sums and softmax, and some steps of training, each done twice with
    deterministic algorithms. GPUs of one model with the same libraries must agree in every bit: one that does not
    corrupts data silently. Run again, and replace the GPU that is named if it is the same one. If two GPUs differ from
    each other and there is no third, nobody can say which is wrong: `gpufleet compare` with the run of another machine
    of the same model and versions can. That also finds a machine on which all GPUs agree on wrong bits, and is all that
    a single GPU can be held against here.
    """
    compute(world, record_fingerprints, work)


@pytest.mark.needs(ranks=2)
def test_all_gpus_get_the_same_sum(nccl_group: World, record_fingerprints: Record) -> None:
    """An all_reduce of fixed data leaves the same bits on every GPU

    The sums are exact in whatever order they are made, so no choice of NCCL changes them, and machines with as many
    GPUs must have the same. A GPU that is named got, or added, something else than the others: look for NVLink and ECC
    errors (`nvidia-smi nvlink -e`, `nvidia-smi -q`), and at the checks of exactness.
    """
    compute(nccl_group, record_fingerprints, "all_reduce")

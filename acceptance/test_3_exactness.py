"""Collectives deliver exactly the right data."""

import pytest
import torch

from pytest_gpufleet import not_applicable
from pytest_gpufleet.probes.collectives import COLLECTIVES, exchange


@pytest.mark.spmd
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collective_is_exact(rank, nccl_group, collective, dtype):
    """Every element of a collective's result is exactly right

    The data is such that a swapped, lost, doubled or flipped element changes the result, and that every sum is exact in
    its type: a single wrong element means that a link, a switch or a GPU corrupts data, and training on this machine
    would go wrong silently. The rank that is named received wrong data. Run the pair tests of the GPU vendor on the
    links of that GPU and look for NVLink and ECC errors in `nvidia-smi nvlink -e` and `nvidia-smi -q`.
    """
    if rank.size == 1:
        not_applicable("one rank has nobody to talk to")
    for elements in (1 << 20, 1_000_003):  # a power of two, and a number that fits no block
        for root in (0, rank.size - 1):
            wrong = exchange(rank, collective, dtype, elements, root)
            assert wrong == "", f"{collective} with root {root}"

"""FP8 by a kernel of our own against torch's own steps, on a real GPU. Skipped without one."""

import os
import sys
from unittest.mock import patch

import pytest
import torch

from pytest_gpufleet.probes.training import compile_cache, fp8_linear, triton_needs
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.run.settings import Options
from pytest_gpufleet.world import shipping
from tests.gpu.present import GPUS, needs_gpus

HAVE_FP8 = all((gpu.compute_capability or (0, 0)) >= (8, 9) for gpu in GPUS)

pytestmark = [
    needs_gpus(1),
    pytest.mark.skipif(not HAVE_FP8, reason="needs GPUs that have FP8"),
    pytest.mark.skipif(triton_needs.missing() is not None, reason="needs Triton"),
]

SHAPES = ((128, 128), (1000, 1200), (16, 4096), (4096, 16), (3072, 1024))


def unlike(rank):
    """Which matrices are scaled otherwise than torch does; of 16 bits, which Triton's kernel must scale, also where
    torch does it instead."""
    found = []
    for dtype in (fp8_linear.NUMBERS, fp8_linear.GRADIENTS):
        for source in (torch.float32, torch.bfloat16, torch.float16):
            if source.itemsize == 2 and not fp8_linear._triton_agrees(rank.device, source, dtype):
                found.append(f"{source} to {dtype} by torch")
            for shape in SHAPES:
                matrix = torch.randn(shape, device=rank.device).to(source)
                ours = fp8_linear.scaled(matrix, dtype)
                with patch.object(fp8_linear, "_triton_agrees", lambda *_: False):
                    torchs = fp8_linear.scaled(matrix, dtype)
                if not all(map(torch.equal, (one.float() for one in ours), (one.float() for one in torchs))):
                    found.append(f"{source} to {dtype}, {shape}")
    if compile_cache.TRITON not in os.environ:
        found.append("compiled where Triton keeps it by itself")
    return found


def test_the_kernel_scales_as_torch_does():
    shipping.ship_by_value(sys.modules[__name__])
    run = Run(Options(gpus="all"))
    try:
        assert run.ranks.world(with_group=False).run(unlike) == [[] for _ in GPUS]
    finally:
        run.close()

"""Whether matrix products of float32 are computed in TF32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def products_in_tf32(allowed: bool) -> Iterator[None]:
    """Whatever torch was told before, and is told again afterwards. Convolutions have a switch of their own."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before

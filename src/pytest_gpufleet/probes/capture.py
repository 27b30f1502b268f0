"""Work as a CUDA graph: launched once as a whole, so that the host has no part in how long it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(
    do: Callable[[], object], stream: torch.cuda.Stream | None = None, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """`do` as a CUDA graph. It must have run before, on `stream` if one is given: what is set up at a first use cannot
    be captured. RuntimeError if something in it cannot."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog, which asks for events in a thread of its own, must not break the capture.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        do()
    return graph

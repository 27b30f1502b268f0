"""Work as a CUDA graph: launched once as a whole, so that the host has no part in how long it takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

# How the allocator of torch is told that a capture is over: from torch 2.8 on, and before.
END_OF_CAPTURE = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")


def _let_go_of_random_numbers(device: torch.device) -> None:
    """A capture that failed leaves the generator of the GPU as if it went on (torch 2.11): nobody gets another random
    number of it. A copy of its state has nothing of that."""
    generator = torch.cuda.default_generators[device.index]
    with suppress(RuntimeError):  # then whoever wants a random number is told
        generator.graphsafe_set_state(generator.clone_state())


def captured(
    do: Callable[[], object], stream: torch.cuda.Stream | None = None, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """`do` as a CUDA graph. It must have run before, on `stream` if one is given: what is set up at a first use cannot
    be captured. RuntimeError if something in it cannot; the stream of before is current again then."""
    graph, before, pool = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), pool or torch.cuda.graph_pool_handle()
    try:
        # thread_local: NCCL's watchdog, which asks for events in a thread of its own, must not break the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            do()
    except BaseException:
        # Until torch 2.12 its allocator takes a capture that failed for one that goes on, and frees no memory any more
        # (pytorch/pytorch#180395).
        torch.cuda.set_stream(before)
        _let_go_of_random_numbers(before.device)
        for end in filter(None, (getattr(torch._C, name, None) for name in END_OF_CAPTURE)):
            with suppress(RuntimeError):  # it was told
                end(before.device_index, pool)
        raise
    return graph

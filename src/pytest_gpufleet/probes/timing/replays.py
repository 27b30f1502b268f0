"""How long operations of all ranks take that come from a CUDA graph, as with `nccl-tests -G`: what the GPUs and the
links between them need, whatever the host needs to launch them.

On two H200 this is what nccl-tests shows, to 3 % (docs/results). A graph must not be launched on the default stream for
that: NCCL puts an event between collectives, so that graphs and launches may use one communicator, and there each took
10 us and not 1."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from pytest_gpufleet.probes.capture import captured
from pytest_gpufleet.probes.timing.all_ranks import WARM_UP, Timing, agree, seconds
from pytest_gpufleet.world.rank import Rank

# Two H200 need 0.25 to 0.35 ms for a graph of 50 collectives of up to 32 KiB. From one of 20 each took 2 % more.
OPERATIONS = 50
REPLAYS = 5  # of a run
AHEAD = 3  # replays before those that are timed
RUNS = 3  # of a sample. What disturbs a machine now and then spoils some of them, and not their median


def replayed(rank: Rank, launch: Callable[[], object], samples: int) -> Timing | None:
    """Time an operation of all ranks, which `launch` starts on the current stream: many of them in a row in one CUDA
    graph. Every rank calls it.

    None, on all ranks, on CPU ranks and where a GPU cannot capture the operation, as with TORCH_NCCL_BLOCKING_WAIT=1.
    """
    if rank.device.type != "cuda":
        return None
    seconds(rank, launch, WARM_UP["cuda"])  # connects the ranks and loads the kernels: no capture can
    graph = _captured_everywhere(rank, launch)
    if graph is None:
        return None
    try:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            taken = [
                median(seconds(rank, graph.replay, REPLAYS, AHEAD) for _ in range(RUNS)) / OPERATIONS
                for _ in range(samples)
            ]
    finally:
        graph.reset()  # a graph that holds a communicator keeps it from ending
    return Timing(tuple(taken), OPERATIONS * REPLAYS, RUNS)


def _captured_everywhere(rank: Rank, launch: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    """A graph of the operations if every rank could make one: ranks that launch otherwise would wait for ever."""

    def operations() -> None:
        for _ in range(OPERATIONS):
            launch()

    graph = None
    try:
        graph = captured(operations)
    except RuntimeError as error:
        print(f"collectives are launched one by one, since they cannot be captured in a CUDA graph: {error}")
    if agree(rank, graph is not None):
        return graph
    if graph is not None:
        graph.reset()
    return None

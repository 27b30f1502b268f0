"""How long work takes on one device, and on all ranks: launched as nccl-tests does, or from a CUDA graph."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pytest_gpufleet.machine import nvml
from pytest_gpufleet.model.place import Missing
from pytest_gpufleet.world.world import Rank

Stream = torch.cuda.Stream | None  # None of a CPU
Mark = Any  # an event of a stream; of a CPU a moment
Work = Callable[[], object]


def mark(stream: Stream) -> Mark:
    """When what was launched on a stream is done; without a stream, now."""
    if stream is None:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def between(first: Mark, last: Mark) -> float:
    """Seconds from one mark to another one. The work before them is done."""
    return last - first if isinstance(first, float) else float(first.elapsed_time(last)) / 1e3


def current_stream(device: torch.device) -> Stream:
    return torch.cuda.current_stream() if device.type == "cuda" else None


def own_stream(device: torch.device) -> Stream:
    return torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def marks(stream: Stream, work: Work, repeats: int, count: int) -> list[Mark]:
    """Launch `count` rows of `repeats` calls, with a mark before the first row and after each."""
    made = [mark(stream)]
    for _ in range(count):
        for _ in range(repeats):
            work()
        made.append(mark(stream))
    return made


def parts(device: torch.device, work: Work, repeats: int, count: int) -> list[float]:
    """Seconds that one call takes in each of `count` rows of `repeats` calls, without a gap."""
    taken = marks(current_stream(device), work, repeats, count)
    if device.type == "cuda":
        taken[-1].synchronize()
    return [between(*ends) / repeats for ends in itertools.pairwise(taken)]


def seconds_each(device: torch.device, work: Work, repeats: int) -> float:
    return parts(device, work, repeats, 1)[0]


def calls_in(device: torch.device, work: Work, seconds: float) -> int:
    return max(1, math.ceil(seconds / seconds_each(device, work, 3)))


def warm_up(device: torch.device, work: Work, seconds: float) -> None:
    """Do the work until clock and power have settled."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        seconds_each(device, work, 10)


def read_under_load(rank: Rank, load: Work, facts: Sequence[str], seconds: float) -> Iterator[list[Any]]:
    """Facts of this rank's GPU, again and again for so many seconds, each time while a `load` is under way. None where
    NVML does not know one; RuntimeError if it cannot be read."""
    assert rank.gpu is not None
    with nvml.of_gpu(rank.gpu) as driver:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            load()
            read = nvml.read(driver, 0, facts)
            if unreadable := [fact for fact in facts if isinstance(read[fact], Missing) and not read[fact].absent]:
                raise RuntimeError(f"{unreadable[0]} cannot be read: {read[unreadable[0]]}")
            yield [None if isinstance(read[fact], Missing) else read[fact] for fact in facts]
            torch.cuda.synchronize(rank.device)


# nccl-tests launches 20 times. Less often what takes long: on a broken machine an operation can take a hundred times as
# long, and of large messages a few tell as much. Figures of CPU ranks are not judged.
ITERATIONS = {"cuda": 20, "cpu": 2}
RUN_SECONDS = 0.06
# A sample is the median of several runs. A host holds up a launch now and then for one to five milliseconds (it may be
# torch's watchdog), and all ranks wait for the one that was held up. On eight H200 every third sample of one or two
# runs of 15 to 25 ms was off, by up to 14 %.
MIN_RUNS = {"cuda": 3, "cpu": 1}
MIN_SECONDS = {"cuda": 0.05, "cpu": 0.001}  # of a sample
# So operations go ahead of those that are timed, and the GPUs have work for this long while the host is held up.
AHEAD_SECONDS = 0.005
LONG_SECONDS = 0.15  # of an operation: what disturbs for milliseconds is nothing beside that
WARM_UP = {"cuda": 5, "cpu": 1}
WARM_UP_SECONDS = 0.5
TICK = 0.5e-6  # seconds, of the clock of a GPU: ranks that only keep step with others launch nothing


class Timing(NamedTuple):
    seconds: tuple[float, ...]  # of one operation, by sample: the median of `runs` of `iterations` operations
    iterations: int
    runs: int


def timing(rank: Rank, launch: Work, samples: int, before: Work = lambda: None, longest: float = RUN_SECONDS) -> Timing:
    """Time an operation of all ranks, which `launch` starts on the current stream (a CPU rank waits for it). `before`
    is called ahead of each run, outside its time; a run takes `longest` seconds at most, or two operations."""
    device, ahead = rank.device.type, 0

    def run(iterations: int) -> float:
        before()
        return seconds(rank, launch, iterations, ahead)

    run(1)  # connects the ranks and loads the kernels
    warm_up = agree(rank, min(WARM_UP[device], max(1, int(WARM_UP_SECONDS / run(1)))))
    iterations, runs, ahead = (agree(rank, number) for number in plan(device, run(warm_up), longest))
    return Timing(tuple(median(run(iterations) for _ in range(runs)) for _ in range(samples)), iterations, runs)


def plan(device: str, each: float, longest: float = RUN_SECONDS) -> tuple[int, int, int]:
    """Operations of a run, runs of a sample, and operations ahead of each run, where one takes `each` seconds."""
    iterations = max(2, min(ITERATIONS[device], int(longest / each)))
    if each > LONG_SECONDS:
        return iterations, 1, 0
    fill = math.ceil(MIN_SECONDS[device] / (iterations * each))
    runs = min(7, max(MIN_RUNS[device], fill // 2 * 2 + 1))  # odd: one of them is the median
    return iterations, runs, min(50, math.ceil(AHEAD_SECONDS / each))


def seconds(rank: Rank, launch: Work, iterations: int, ahead: int = 0) -> float:
    """Seconds that one operation takes, of `iterations` in a row behind `ahead` untimed ones, as this rank sees it."""
    line_up(rank)
    if rank.device.type != "cuda":
        return seconds_each(rank.device, launch, iterations)
    for _ in range(ahead):
        launch()
    each = seconds_each(rank.device, launch, iterations)
    torch.cuda.synchronize()
    return max(TICK / iterations, each)


def wait(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()


def line_up(rank: Rank) -> None:
    """All ranks go on from here together."""
    dist.all_reduce(torch.zeros(1, device=rank.device), group=rank.group)
    synchronize(rank)


def synchronize(rank: Rank) -> None:
    """Wait for all work of this rank's GPU; a CPU rank has done its work."""
    if rank.device.type == "cuda":
        torch.cuda.synchronize()


def agree(rank: Rank, number: int) -> int:
    """The smallest number any rank came with: all must launch equally often."""
    smallest = torch.tensor(number, device=rank.device)
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=rank.group)
    return int(smallest.item())


def everyones(rank: Rank, values: Sequence[float]) -> list[list[float]]:
    """The values of all ranks, by rank."""
    mine = torch.tensor(values, dtype=torch.float64, device=rank.device)
    copies = mine.new_empty(rank.size * len(values))
    dist.all_gather_into_tensor(copies, mine, group=rank.group)
    return [list(map(float, row)) for row in copies.cpu().view(rank.size, -1)]


# Operations from a CUDA graph, as with `nccl-tests -G`: what the GPUs and the links between them need, whatever the
# host needs to launch them. On two H200 this is what nccl-tests shows, to 3 % (docs/results). A graph must not be
# launched on the default stream for that: NCCL puts an event between collectives, so that graphs and launches may use
# one communicator, and there each took 10 us and not 1.

# Two H200 need 0.25 to 0.35 ms for a graph of 50 collectives of up to 32 KiB. From one of 20 each took 2 % more.
OPERATIONS = 50
REPLAYS = 5  # of a run
AHEAD = 3  # replays before those that are timed
RUNS = 3  # of a sample. What disturbs a machine now and then spoils some of them, and not their median


def replayed(rank: Rank, launch: Work, samples: int) -> Timing | None:
    """As `timing`, of many operations in one CUDA graph. None, on all ranks, on CPU ranks and where a GPU cannot
    capture the operation, as with TORCH_NCCL_BLOCKING_WAIT=1: ranks that launch otherwise would wait for ever."""
    if rank.device.type != "cuda":
        return None
    seconds(rank, launch, WARM_UP["cuda"])  # connects the ranks and loads the kernels: no capture can
    graph = None
    try:
        graph = captured(lambda: [launch() for _ in range(OPERATIONS)])
    except RuntimeError as error:
        print(f"collectives are launched one by one, since they cannot be captured in a CUDA graph: {error}")
    try:
        if not agree(rank, graph is not None) or graph is None:
            return None
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            taken = [median(seconds(rank, graph.replay, REPLAYS, AHEAD) for _ in range(RUNS)) for _ in range(samples)]
    finally:
        if graph is not None:
            graph.reset()  # a graph that holds a communicator keeps it from ending
    return Timing(tuple(each / OPERATIONS for each in taken), OPERATIONS * REPLAYS, RUNS)


# How torch's allocator learns that a capture is over: from torch 2.8 on, and before.
END_OF_CAPTURE = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")


def captured(do: Work, runs: int = 0, pool: Any = None) -> torch.cuda.CUDAGraph:
    """`do` as a CUDA graph, captured on a stream of its own after so many runs there: what is set up at a first use
    cannot be captured. RuntimeError if something in it cannot; the stream of before is current again then."""
    graph, before, pool = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), pool or torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        for _ in range(runs):
            do()
    torch.cuda.synchronize()
    try:
        # thread_local: NCCL's watchdog, which asks for events in a thread of its own, must not break the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            do()
    except BaseException:
        torch.cuda.set_stream(before)
        # A capture that failed leaves the generator of the GPU as if it went on (torch 2.11): nobody gets another
        # random number of it. A copy of its state has nothing of that.
        generator = torch.cuda.default_generators[before.device_index]
        with suppress(RuntimeError):  # who wants a random number gets the error
            generator.graphsafe_set_state(generator.clone_state())
        # Until torch 2.12 so does its allocator, which frees no memory any more (pytorch/pytorch#180395).
        for end in filter(None, (getattr(torch._C, name, None) for name in END_OF_CAPTURE)):
            with suppress(RuntimeError):  # it knows already
                end(before.device_index, pool)
        raise
    return graph

"""Copies on a GPU: by its copy engines, to and from host memory and the memory of other ranks' GPUs.

Another rank's memory is reached by CUDA IPC, mapped into this rank's own context: a context on every GPU in every
process would take seconds to make and gigabytes of memory. The GPU whose stream a copy is put on drives it. With the
destination there it reads from its peer, with the source there it writes to it, as in nvbandwidth's CE tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator, Sequence

import torch

from pytest_gpufleet.hardware import nvml
from pytest_gpufleet.model.metric import MiB
from pytest_gpufleet.probes.links import cuda_driver
from pytest_gpufleet.probes.links.copier import WORD, WORD_BYTES, Copy, Meet, Memory, Offer
from pytest_gpufleet.probes.links.cuda_driver import call
from pytest_gpufleet.world.rank import Rank

# A stream that is held goes on after this, whatever happens: queuing a sample takes less than a millisecond.
HOLD_SECONDS = 2.0
# What is shared with other processes are whole blocks: CUDA's guide advises to allocate nothing else in them.
BLOCK_BYTES = 2 * MiB
AT_ONCE = 2  # copies that run at the same time: one in each direction


class CudaCopier:
    """See `Copier`. Memory comes from the driver: what torch's allocator gives cannot always be shared."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._lanes = [_Lane(rank.device) for _ in range(AT_ONCE)]
        self._allocated: list[int] = []
        self._pinned: list[int] = []
        self._mapped: list[int] = []
        # Addresses on GPUs that this one cannot reach, with the contexts they are mapped in.
        self._staged: dict[int, int | None] = {}
        self._contexts: dict[int, int | None] = {}

    def device_memory(self, nbytes: int) -> Memory:
        address = cuda_driver.allocate(-(-nbytes // BLOCK_BYTES) * BLOCK_BYTES)
        self._allocated.append(address)
        return Memory(address, torch.as_tensor(_Array(address, nbytes), device=self._rank.device))

    def host_memory(self, nbytes: int) -> Memory:
        with _near(self._rank):
            address = cuda_driver.allocate_host(nbytes)
        self._pinned.append(address)
        content = (ctypes.c_byte * nbytes).from_address(address)
        return Memory(address, torch.frombuffer(content, dtype=WORD))

    def offer(self, memory: Memory) -> Offer:
        # What was put there is on its way on a stream of this process, which no other process waits for.
        torch.cuda.synchronize()
        return Offer(cuda_driver.ipc_handle(memory.address), self._rank.device.index)

    def reaches_directly(self, offer: Offer) -> bool:
        return cuda_driver.can_access_peer(self._rank.device.index, offer.device)

    def reach(self, offer: Offer) -> int:
        if self.reaches_directly(offer):
            address = cuda_driver.map_ipc(offer.handle)
            self._mapped.append(address)
            return address
        # Only a context on that GPU can map it. The driver then takes copies through host memory.
        if offer.device not in self._contexts:
            self._contexts[offer.device] = cuda_driver.retain_context(offer.device)
        context = self._contexts[offer.device]
        with _current(context):
            address = cuda_driver.map_ipc(offer.handle)
        self._staged[address] = context
        return address

    def seconds(self, copies: Sequence[Copy], warm_up: int, timed: int, meet: Meet | None = None) -> float:
        lanes = self._lanes[: len(copies)]
        first, behind = lanes[0], warm_up if meet else 0
        torch.cuda.synchronize()
        if meet:
            meet()  # nobody holds a stream for longer than it takes to queue a sample
        with contextlib.nullcontext() if any(map(self._is_staged, copies)) else _held(lanes):
            for copy, lane in zip(copies, lanes, strict=True):
                self._queue(copy, lane, warm_up)
            first.start.record(first.stream)
            for copy, lane in zip(copies[1:], lanes[1:], strict=True):
                lane.stream.wait_event(first.start)  # all begin together
                self._queue(copy, lane, 2 * timed)
            self._queue(copies[0], first, timed)
            first.end.record(first.stream)
            self._queue(copies[0], first, behind)
            if meet:
                meet()  # and now all of them begin
        torch.cuda.synchronize()
        return float(first.start.elapsed_time(first.end)) / 1e3 / timed

    def leave(self) -> None:
        for address in self._mapped:
            call("cuIpcCloseMemHandle", address)
        for address, context in self._staged.items():
            with _current(context):
                call("cuIpcCloseMemHandle", address)
        for device in self._contexts:
            call("cuDevicePrimaryCtxRelease_v2", device)
        self._mapped, self._staged, self._contexts = [], {}, {}

    def free(self) -> None:
        for address in self._allocated:
            call("cuMemFree_v2", address)
        for address in self._pinned:
            call("cuMemFreeHost", address)
        self._allocated, self._pinned = [], []
        torch.cuda.empty_cache()  # what verifying took

    def _queue(self, copy: Copy, lane: _Lane, times: int) -> None:
        to, origin, stream = copy.destination, copy.source, lane.stream.cuda_stream
        own = cuda_driver.current_context()
        for _ in range(times):
            if self._is_staged(copy):
                contexts = self._staged.get(to, own), self._staged.get(origin, own)
                call("cuMemcpyPeerAsync", to, contexts[0], origin, contexts[1], copy.nbytes, stream)
            else:
                call("cuMemcpyAsync", to, origin, copy.nbytes, stream)

    def _is_staged(self, copy: Copy) -> bool:
        return copy.destination in self._staged or copy.source in self._staged


class _Lane:
    """A stream with the events that time it."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        # The first record makes the event: not while the stream is held.
        self.start.record(self.stream)
        self.end.record(self.stream)


class _Array:
    """Memory of a GPU, in the way that torch makes a tensor of without copying."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes // WORD_BYTES,),
            "typestr": "<i8",
            "data": (address, False),
            "version": 2,
        }


@contextlib.contextmanager
def _held(lanes: Sequence[_Lane]) -> Iterator[None]:
    """Let streams do nothing until all is queued: what is timed then is copies, and not how fast they are launched.

    A function of the host holds each of them. Not for copies through host memory: they can fill the queue of a stream,
    and then the launch waits for the stream.
    """
    queued = threading.Event()
    wait = cuda_driver.HostFunction(lambda _: queued.wait(HOLD_SECONDS))
    try:
        for lane in lanes:
            call("cuLaunchHostFunc", lane.stream.cuda_stream, wait, None)
        yield
    finally:
        queued.set()
        # `wait` has to live until the driver has called it.
        for lane in lanes:
            call("cuStreamSynchronize", lane.stream.cuda_stream)


@contextlib.contextmanager
def _current(context: int | None) -> Iterator[None]:
    """Make another context the current one for a moment."""
    call("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@contextlib.contextmanager
def _near(rank: Rank) -> Iterator[None]:
    """Run on the processors next to the GPU: memory that is pinned there is the memory next to it."""
    assert rank.gpu is not None
    before = os.sched_getaffinity(0)
    # Virtual machines and containers may not tell; then the operating system chooses.
    with nvml.session() as pynvml, contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlDeviceSetCpuAffinity(pynvml.nvmlDeviceGetHandleByUUID(rank.gpu.uuid))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)

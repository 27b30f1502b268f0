"""Copies between memories, timed and verified as nvbandwidth does: 4 copies to warm up and 16 timed, three samples."""

import contextlib
import ctypes
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pytest_gpufleet.machine import nvml
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import MiB
from pytest_gpufleet.probes.compute.corruption import hexadecimal
from pytest_gpufleet.world.rank import Rank

WORD = torch.int64
WORD_BYTES = WORD.itemsize


class StartingLine:
    """For every rank of its world, how often this one came to meet it."""

    def __init__(self, ranks: int) -> None:
        self._file = os.memfd_create("starting line")
        os.ftruncate(self._file, ranks * 8)
        self.address = f"/proc/{os.getpid()}/fd/{self._file}"  # by which other ranks of this machine find it
        self._lines: list[memoryview] = []
        self._me = -1

    def draw(self, me: int, addresses: Sequence[str]) -> None:
        """Learn the number of this rank, and where the lines of all ranks are."""
        self._me, self._lines = me, list(map(_mapped, addresses))

    def meet(self, others: Collection[int]) -> None:
        """Go on when each of these ranks has come here to meet this one: to within about 0.1 ms at the same time."""
        mine = self._lines[self._me]
        for other in others:
            mine[other] += 1
        for other in others:
            while self._lines[other][self._me] < mine[other]:
                time.sleep(0)  # lets the other threads of this process run, which hold and release streams

    def remove(self) -> None:
        self._lines.clear()
        os.close(self._file)


def _mapped(address: str) -> memoryview:
    with open(address, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")


@dataclass(frozen=True)
class Offer:
    """What another rank needs to reach a memory: a handle, and the CUDA number of the GPU that it is on, if any."""

    handle: bytes
    device: int = -1


@dataclass(frozen=True)
class Copy:
    """A copy from one address to another. They may be of other ranks, where these were reached."""

    destination: int
    source: int
    nbytes: int


# Waits until all ranks that copy at the same time have come so far.
Meet = Callable[[], None]


class HostCopier:
    """Stands in for a GPU in rehearsals: its memory is shared memory, which other ranks map, and copies are memmove.
    Memory is a tensor of int64, which belongs to the copier."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._files: dict[int, int] = {}  # by address

    def device_memory(self, nbytes: int) -> Tensor:
        file = os.memfd_create("device memory")
        os.ftruncate(file, nbytes)
        words = self._mapped(f"/proc/self/fd/{file}", nbytes)
        self._files[words.data_ptr()] = file
        return words

    def host_memory(self, nbytes: int) -> Tensor:
        """On a GPU pinned, and near to it."""
        return torch.empty(nbytes // WORD_BYTES, dtype=WORD)

    def offer(self, words: Tensor) -> Offer:
        """Let other ranks reach device memory."""
        return Offer(f"/proc/{os.getpid()}/fd/{self._files[words.data_ptr()]}".encode())

    def reaches_directly(self, offer: Offer) -> bool:
        """Whether copies go straight from device to device, and not through host memory."""
        return False

    def reach(self, offer: Offer) -> int:
        """The address of another rank's memory in this process."""
        path = offer.handle.decode()
        return self._mapped(path, os.stat(path).st_size).data_ptr()

    def seconds(self, copies: Sequence[Copy], warm_up: int, timed: int, meet: Meet | None = None) -> float:
        """Seconds of the first of these copies, made `timed` times one behind the other.

        The others keep the way busy meanwhile: they begin with it, and are made twice as often. Where other ranks
        copy at the same time, all `meet` before they begin, and copy on for a while behind what is timed: so nobody's
        timed copies have the way to themselves. Here one copy is made after the other: a rehearsal of what is copied,
        and not of how fast.
        """
        if meet:
            meet()
        for copy in copies[1:]:
            _move(copy, 1)
        _move(copies[0], warm_up)
        began = time.perf_counter()
        _move(copies[0], timed)
        return (time.perf_counter() - began) / timed

    def leave(self) -> None:
        """Reach no other rank's memory any more. Before anybody frees what others reach."""

    def free(self) -> None:
        """Free all memory."""
        self._kept.clear()
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _mapped(self, path: str, nbytes: int) -> Tensor:
        self._kept.append(torch.from_file(path, shared=True, size=nbytes // WORD_BYTES, dtype=WORD))
        return self._kept[-1]


def _move(copy: Copy, times: int) -> None:
    for _ in range(times):
        ctypes.memmove(copy.destination, copy.source, copy.nbytes)


# What torch does not offer of the CUDA driver, through ctypes: copies that one side drives, memory to share. Types and
# constants are those of cuda.h. A function works on the context of the calling thread, which is the one torch uses on
# this rank's GPU.

HostFunction = ctypes.CFUNCTYPE(None, c_void_p)
LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


# cuda.h gives some functions a new version under a new name; these names are in every driver since CUDA 11.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpyPeerAsync": (c_uint64, c_void_p, c_uint64, c_void_p, c_size_t, c_void_p),
    "cuStreamSynchronize": (c_void_p,),
    "cuLaunchHostFunc": (c_void_p, HostFunction, c_void_p),
}


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    for name, types in _SIGNATURES.items():
        function = getattr(driver, name)
        function.argtypes, function.restype = types, c_int
    return driver


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver by its name. RuntimeError, which says what it means, if it fails."""
    if status := getattr(_driver(), name)(*arguments):
        raise RuntimeError(f"{name}: {_text('cuGetErrorName', status)} ({status}): {_text('cuGetErrorString', status)}")


def _text(function: str, status: int) -> str:
    text = c_char_p()
    getattr(_driver(), function)(status, ctypes.byref(text))
    return (text.value or b"unknown error").decode()


def result_of(name: str, kind: Any, *arguments: Any) -> Any:
    """What a function of the driver gives by its first argument, a pointer to this C type."""
    result = kind()
    call(name, ctypes.byref(result), *arguments)
    return result.value


def can_access_peer(device: int, peer: int) -> bool:
    """Whether one GPU reads and writes the memory of another directly. CUDA's numbers of both."""
    return bool(result_of("cuDeviceCanAccessPeer", c_int, device, peer))


# Copies on a GPU: by its copy engines, to and from host memory and the memory of other ranks' GPUs. Another rank's
# memory is reached by CUDA IPC, mapped into this rank's own context: a context on every GPU in every process would take
# seconds to make and gigabytes of memory. The GPU whose stream a copy is put on drives it. With the destination there
# it reads from its peer, with the source there it writes to it, as in nvbandwidth's CE tests.

# A stream that is held goes on after this, whatever happens: queuing a sample takes less than a millisecond.
HOLD_SECONDS = 2.0
# What is shared with other processes are whole blocks: CUDA's guide advises to allocate nothing else in them.
BLOCK_BYTES = 2 * MiB
AT_ONCE = 2  # copies that run at the same time: one in each direction


class CudaCopier:
    """See `HostCopier`. Memory comes from the driver: what torch's allocator gives cannot always be shared."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._lanes = [_Lane(rank.device) for _ in range(AT_ONCE)]
        self._allocated: list[int] = []
        self._pinned: list[int] = []
        self._mapped: list[int] = []
        # Addresses on GPUs that this one cannot reach, with the contexts they are mapped in.
        self._staged: dict[int, int | None] = {}
        self._contexts: dict[int, int | None] = {}

    def device_memory(self, nbytes: int) -> Tensor:
        address = int(result_of("cuMemAlloc_v2", c_uint64, -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES))
        self._allocated.append(address)
        # In the way that torch makes a tensor of memory without copying.
        array = {"shape": (nbytes // WORD_BYTES,), "typestr": "<i8", "data": (address, False), "version": 2}
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=array), device=self._rank.device)

    def host_memory(self, nbytes: int) -> Tensor:
        with _near(self._rank):
            address = int(result_of("cuMemHostAlloc", c_void_p, nbytes, 0))
        self._pinned.append(address)
        return torch.frombuffer((ctypes.c_byte * nbytes).from_address(address), dtype=WORD)

    def offer(self, words: Tensor) -> Offer:
        # What was put there is on its way on a stream of this process, which no other process waits for.
        torch.cuda.synchronize()
        handle = IpcHandle()
        call("cuIpcGetMemHandle", ctypes.byref(handle), words.data_ptr())
        return Offer(bytes(handle), self._rank.device.index)

    def reaches_directly(self, offer: Offer) -> bool:
        return can_access_peer(self._rank.device.index, offer.device)

    def reach(self, offer: Offer) -> int:
        handle = IpcHandle.from_buffer_copy(offer.handle)
        mapped = partial(result_of, "cuIpcOpenMemHandle_v2", c_uint64, handle, LAZY_ENABLE_PEER_ACCESS)
        if self.reaches_directly(offer):
            self._mapped.append(int(mapped()))
            return self._mapped[-1]
        # Only a context on that GPU can map it. The driver then takes copies through host memory. It is made if this
        # process has none there, which takes about 0.5 GB of that GPU.
        if offer.device not in self._contexts:
            self._contexts[offer.device] = result_of("cuDevicePrimaryCtxRetain", c_void_p, offer.device)
        with _current(context := self._contexts[offer.device]):
            address = int(mapped())
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

    def _queue(self, copy: Copy, lane: "_Lane", times: int) -> None:
        to, origin, stream = copy.destination, copy.source, lane.stream.cuda_stream
        own = result_of("cuCtxGetCurrent", c_void_p)
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


@contextlib.contextmanager
def _held(lanes: Sequence[_Lane]) -> Iterator[None]:
    """Let streams do nothing until all is queued: what is timed then is copies, and not how fast they are launched.
    Not for copies through host memory: they can fill the queue of a stream, and then the launch waits for it."""
    queued = threading.Event()
    wait = HostFunction(lambda _: queued.wait(HOLD_SECONDS))
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
    # Not known in some virtual machines and containers; then the operating system chooses.
    with nvml.session() as pynvml, contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlDeviceSetCpuAffinity(pynvml.nvmlDeviceGetHandleByUUID(rank.gpu.uuid))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# For a rank of either kind.
Copier = HostCopier | CudaCopier

WARM_UP = 4
COPIES = 16
SAMPLES = 3
# A stream takes about a thousand in advance; of those that keep the way busy there are twice as many.
MOST_COPIES = 300
# Fewer copies where they would take longer than this: a broken link can be a hundred times as slow.
SAMPLE_SECONDS = 0.5
# Seconds of a sample where all copy together: the three last more than a second.
LASTING = {"cuda": 0.35, "cpu": 0.002}
# What memory holds that nothing was copied to.
BLANK = -1


@dataclass(frozen=True)
class Copied:
    """What copies over links gave: their figures, and faults of the data that arrived."""

    measurements: list[Measurement]
    faults: list[Fault]


def copier(rank: Rank) -> Copier:
    """The one for this rank's device."""
    return HostCopier() if rank.device.type == "cpu" else CudaCopier(rank)


def free(rank: Rank, name: str) -> None:
    """Give back what a rank keeps by this name: a copier, and its line."""
    kept = rank.kept.pop(name)
    kept.line.remove()
    kept.copier.free()


def bandwidth(
    copier: Copier, copies: Sequence[Copy], meet: Meet | None = None, lasting: float = 0.0, samples: int = SAMPLES
) -> tuple[float, ...]:
    """`samples` in GB/s of the first of these copies, each of at least `lasting` seconds (see HostCopier.seconds)."""
    copier.seconds(copies, 0, 1)  # the first use of a way makes it
    one = copier.seconds(copies, 0, 1, meet)
    enough = max(COPIES, math.ceil(lasting / one))
    timed = max(1, min(enough, int(SAMPLE_SECONDS / one), MOST_COPIES))
    warm_up = min(WARM_UP, timed)
    nbytes = copies[0].nbytes
    return tuple(nbytes / copier.seconds(copies, warm_up, timed, meet) / 1e9 for _ in range(samples))


def fill(words: Tensor, seed: int) -> Tensor:
    """Put data into memory of which no two words are alike, and none is like that at its place with another seed."""
    # Both hold for a step that is odd and whose change with the seed is even: tensors of int64 wrap around.
    torch.arange(len(words), out=words)
    return words.mul_(-7046029254386353131 + 2 * seed).add_(seed)


def difference(words: Tensor, expected: Tensor) -> str:
    """ "" if all words arrived, else how many did not, and the first of those."""
    wrong = words != expected
    if not (count := int(wrong.sum())):
        return ""
    first = int(wrong.int().argmax())
    found, right = (hexadecimal(int(each[first]), WORD_BYTES) for each in (words, expected))
    return f"{count:,} of {len(words):,} words of 8 bytes are wrong: word {first:,} is {found}, expected {right}"

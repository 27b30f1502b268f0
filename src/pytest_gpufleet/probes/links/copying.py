"""Copies between memories, timed and verified as nvbandwidth does: 4 copies to warm up and 16 timed, three samples."""

import contextlib
import ctypes
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_gpufleet.machine import nvml
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.metric import Measurement, MiB
from pytest_gpufleet.probes.comparison import hexadecimal, wrong_elements
from pytest_gpufleet.world.world import Rank

WORD = torch.int64
WORD_BYTES = WORD.itemsize


class Offer(NamedTuple):
    """What another rank needs to reach a memory: a handle, and the CUDA number of the GPU that it is on, if any."""

    handle: bytes
    device: int = -1


# Of a destination, from a source, and how many bytes: addresses may be of other ranks, where these were reached.
Copy = tuple[int, int, int]
# Waits until all ranks that copy at the same time have come so far.
Meet = Callable[[], None]


class HostCopier:
    """A GPU of rehearsals: its memory, tensors of int64 that belong to it, is shared memory, and copies are memmove."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._files: dict[int, int] = {}  # by address

    def device_memory(self, nbytes: int) -> Tensor:
        file = os.memfd_create("device memory")
        os.ftruncate(file, nbytes)
        words = self.mapped(Offer(f"/proc/self/fd/{file}".encode()))
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
        return self.mapped(offer).data_ptr()

    def mapped(self, offer: Offer) -> Tensor:
        words = os.stat(offer.handle).st_size // WORD_BYTES
        self._kept.append(torch.from_file(offer.handle.decode(), shared=True, size=words, dtype=WORD))
        return self._kept[-1]

    def seconds(self, copies: Sequence[Copy], warm_up: int, timed: int, meet: Meet | None = None) -> float:
        """Seconds of the first of these copies, made `timed` times one behind the other. The others keep the way busy
        meanwhile: they begin with it, and are made twice as often. Where other ranks copy too, all `meet` before they
        begin, and copy on for a while: nobody's timed copies have the way to themselves. Here they take turns."""
        if meet:
            meet()
        for copy in [*copies[1:], *[copies[0]] * warm_up]:
            ctypes.memmove(*copy)
        began = time.perf_counter()
        for _ in range(timed):
            ctypes.memmove(*copies[0])
        return (time.perf_counter() - began) / timed

    def leave(self) -> None:
        """Reach no other rank's memory any more. Before anybody frees what others reach."""

    def free(self) -> None:
        self._kept.clear()
        for file in self._files.values():
            os.close(file)
        self._files.clear()


class StartingLine:
    """For every rank of its world, how often this one came to meet it: in memory that the others map."""

    def __init__(self, ranks: int) -> None:
        self.memory = HostCopier()
        self.offer = self.memory.offer(self.memory.device_memory(ranks * WORD_BYTES))

    def draw(self, me: int, offers: Iterable[Sequence[Offer]]) -> None:
        """Learn the number of this rank, and where the lines of all ranks are, by what each got of `prepare`."""
        self._me, self._lines = me, [self.memory.mapped(line).numpy() for *_, line in offers]

    def meet(self, others: Collection[int]) -> None:
        """Go on when each of these ranks has come here to meet this one: to within about 0.1 ms at the same time."""
        mine = self._lines[self._me]
        for other in others:
            mine[other] += 1
        for other in others:
            while self._lines[other][self._me] < mine[other]:
                time.sleep(0)  # lets the other threads of this process run, which hold and release streams


# What torch does not offer of the CUDA driver, through ctypes: copies that one side drives, memory to share. Types and
# constants are those of cuda.h. A function works on the context of the calling thread, which is torch's on this GPU.
HostFunction = ctypes.CFUNCTYPE(None, c_void_p)
LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class IpcHandle(ctypes.Structure):  # CUipcMemHandle
    _fields_ = (("reserved", ctypes.c_char * 64),)


# cuda.h gives some functions a new version under a new name; these names are in every driver since CUDA 11.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (c_int, POINTER(c_char_p)), "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxPushCurrent_v2": (c_void_p,), "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int), "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t), "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint), "cuMemFreeHost": (c_void_p,),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), IpcHandle, c_uint), "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpyPeerAsync": (c_uint64, c_void_p, c_uint64, c_void_p, c_size_t, c_void_p),
    "cuLaunchHostFunc": (c_void_p, HostFunction, c_void_p),
}  # fmt: skip


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
        error, text = c_char_p(), c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(error))
        _driver().cuGetErrorString(status, ctypes.byref(text))
        known = [(each.value or b"unknown error").decode() for each in (error, text)]
        raise RuntimeError(f"{name}: {known[0]} ({status}): {known[1]}")


def result_of(name: str, *arguments: Any) -> Any:
    """What a function of the driver gives by its first argument, a pointer."""
    result = _SIGNATURES[name][0]._type_()
    call(name, ctypes.byref(result), *arguments)
    return result.value


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
        self._streams = [torch.cuda.Stream(rank.device) for _ in range(AT_ONCE)]  # type: ignore[no-untyped-call]
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for event in (self._start, self._end):
            event.record(self._streams[0])  # which makes the event: not while the stream is held
        self._memory, self._reached = contextlib.ExitStack(), contextlib.ExitStack()  # what gives it back
        # Addresses on GPUs that this one cannot reach, with the contexts they are mapped in.
        self._staged: dict[int, int] = {}

    def device_memory(self, nbytes: int) -> Tensor:
        address = int(result_of("cuMemAlloc_v2", -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES))
        self._memory.callback(call, "cuMemFree_v2", address)
        # In the way that torch makes a tensor of memory without copying.
        array = {"shape": (nbytes // WORD_BYTES,), "typestr": "<i8", "data": (address, False), "version": 2}
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=array), device=self._rank.device)

    def host_memory(self, nbytes: int) -> Tensor:
        # Pinned by a thread on the processors next to the GPU, it lies in the memory next to it. These are not known in
        # some virtual machines and containers; then the operating system chooses.
        before = os.sched_getaffinity(0)
        with nvml.session() as pynvml, contextlib.suppress(pynvml.NVMLError):
            assert self._rank.gpu is not None
            pynvml.nvmlDeviceSetCpuAffinity(pynvml.nvmlDeviceGetHandleByUUID(self._rank.gpu.uuid))
        try:
            address = int(result_of("cuMemHostAlloc", nbytes, 0))
        finally:
            os.sched_setaffinity(0, before)
        self._memory.callback(call, "cuMemFreeHost", address)
        return torch.frombuffer((ctypes.c_byte * nbytes).from_address(address), dtype=WORD)

    def offer(self, words: Tensor) -> Offer:
        # What was put there is on its way on a stream of this process, which no other process waits for.
        torch.cuda.synchronize()
        handle = IpcHandle()
        call("cuIpcGetMemHandle", ctypes.byref(handle), words.data_ptr())
        return Offer(bytes(handle), self._rank.device.index)

    def reaches_directly(self, offer: Offer) -> bool:
        return torch.cuda.can_device_access_peer(self._rank.device, offer.device)

    def reach(self, offer: Offer) -> int:
        context = None
        if not self.reaches_directly(offer):
            # Only a context on that GPU, of about 0.5 GB, can map it. The driver takes copies through host memory then.
            context = result_of("cuDevicePrimaryCtxRetain", offer.device)
            self._reached.callback(call, "cuDevicePrimaryCtxRelease_v2", offer.device)
        handle = IpcHandle.from_buffer_copy(offer.handle)
        with _current(context):
            address = int(result_of("cuIpcOpenMemHandle_v2", handle, LAZY_ENABLE_PEER_ACCESS))

        @self._reached.callback
        def close() -> None:
            with _current(context):
                call("cuIpcCloseMemHandle", address)

        if context is not None:
            self._staged[address] = context
        return address

    def seconds(self, copies: Sequence[Copy], warm_up: int, timed: int, meet: Meet | None = None) -> float:
        (copy, *others), first = copies, self._streams[0]
        held = self._streams[: len(copies)]
        torch.cuda.synchronize()
        if meet:
            meet()  # nobody holds a stream for longer than it takes to queue a sample
        with contextlib.nullcontext() if any(map(self._is_staged, copies)) else _held(held):
            for each, stream in zip(copies, held, strict=True):
                self._queue(each, stream, warm_up)
            self._start.record(first)
            for each, stream in zip(others, held[1:], strict=True):
                stream.wait_event(self._start)  # all begin together
                self._queue(each, stream, 2 * timed)
            self._queue(copy, first, timed)
            self._end.record(first)
            self._queue(copy, first, warm_up if meet else 0)
            if meet:
                meet()  # and now all of them begin
        torch.cuda.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3 / timed

    def leave(self) -> None:
        self._reached.close()
        self._staged.clear()

    def free(self) -> None:
        self._memory.close()
        torch.cuda.empty_cache()  # what verifying took

    def _queue(self, copy: Copy, stream: torch.cuda.Stream, times: int) -> None:
        to, origin, nbytes = copy
        own = result_of("cuCtxGetCurrent")
        contexts = self._staged.get(to, own), self._staged.get(origin, own)
        for _ in range(times):
            if self._is_staged(copy):
                call("cuMemcpyPeerAsync", to, contexts[0], origin, contexts[1], nbytes, stream.cuda_stream)
            else:
                call("cuMemcpyAsync", to, origin, nbytes, stream.cuda_stream)

    def _is_staged(self, copy: Copy) -> bool:
        return not self._staged.keys().isdisjoint(copy[:2])


@contextlib.contextmanager
def _held(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Let streams do nothing until all is queued: what is timed then is copies, and not how fast they are launched.
    Not for copies through host memory: they can fill the queue of a stream, and then the launch waits for it."""
    queued = threading.Event()
    wait = HostFunction(lambda _: queued.wait(HOLD_SECONDS))
    try:
        for stream in streams:
            call("cuLaunchHostFunc", stream.cuda_stream, wait, None)
        yield
    finally:
        queued.set()
        for stream in streams:  # `wait` has to live until the driver has called it
            stream.synchronize()


@contextlib.contextmanager
def _current(context: int | None) -> Iterator[None]:
    """Make another context the current one for a moment; None leaves it."""
    if context is None:
        yield
        return
    call("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


Copier = HostCopier | CudaCopier

WARM_UP = 4
COPIES = 16
SAMPLES = 3
# A stream takes about a thousand in advance; of those that keep the way busy there are twice as many.
MOST_COPIES = 300
# Fewer copies where they would take longer than this: a broken link can be a hundred times as slow.
SAMPLE_SECONDS = 0.5
LASTING = {"cuda": 0.35, "cpu": 0.002}  # seconds of a sample where all copy together: three last more than a second
BLANK = -1  # what memory holds that nothing was copied to


class Copied(NamedTuple):
    """What copies over links gave: their figures, and faults of the data that arrived."""

    measurements: list[Measurement]
    faults: list[Fault]


@dataclass
class Ends:
    """What a rank copies between, by way a source and a sink; its starting line; both addresses of each other rank."""

    copier: Copier
    ways: dict[str, tuple[Tensor, Tensor]]
    line: StartingLine
    others: dict[int, tuple[int, int]] = field(default_factory=dict)


ENDS = "the ends of links"  # of a rank, which it keeps from `prepare` to `free`


def prepare(rank: Rank, nbytes: int, ways: Mapping[str, Sequence[str]], shared: str = "") -> list[Offer]:
    """`ways`: where source and sink lie, "device" or "host". Offers those of the `shared` way and its starting line."""
    copier: Copier = HostCopier() if rank.device.type == "cpu" else CudaCopier(rank)
    memory = {"host": copier.host_memory, "device": copier.device_memory}
    ends = rank.kept[ENDS] = Ends(copier, {}, StartingLine(rank.size))
    for way, sides in ways.items():
        source, sink = (memory[side](nbytes) for side in sides)
        ends.ways[way] = fill(source, rank.index), sink.fill_(BLANK)
    return [*map(copier.offer, ends.ways.get(shared, ())), ends.line.offer]


def free(rank: Rank) -> None:
    ends: Ends = rank.kept.pop(ENDS)
    ends.line.memory.free()
    ends.copier.free()


def bandwidth(
    copier: Copier, copies: Sequence[Copy], meet: Meet | None = None, lasting: float = 0.0, samples: int = SAMPLES
) -> tuple[float, ...]:
    """`samples` in GB/s of the first of these copies, each of at least `lasting` seconds (see HostCopier.seconds)."""
    copier.seconds(copies, 0, 1)  # the first use of a way makes it
    one = copier.seconds(copies, 0, 1, meet)
    enough = max(COPIES, math.ceil(lasting / one))
    timed = max(1, min(enough, int(SAMPLE_SECONDS / one), MOST_COPIES))
    warm_up = min(WARM_UP, timed)
    return tuple(copies[0][2] / copier.seconds(copies, warm_up, timed, meet) / 1e9 for _ in range(samples))


def fill(words: Tensor, seed: int) -> Tensor:
    """Put data into memory of which no two words are alike, and none is like that at its place with another seed."""
    # Both hold for a step that is odd and whose change with the seed is even: tensors of int64 wrap around.
    torch.arange(len(words), out=words)
    return words.mul_(-7046029254386353131 + 2 * seed).add_(seed)


def difference(words: Tensor, expected: Tensor) -> str:
    """ "" if all words arrived, else how many did not, and the first of those."""
    return wrong_elements(words, expected, "words of 8 bytes", "word {:,}", shown=hexadecimal)

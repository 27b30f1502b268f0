"""Ways in which one rank of a world can fail, each really caused. `benchmarks/faults.py` runs the same table."""

import collections
import contextlib
import ctypes
import itertools
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pytest_gpufleet.world.engines import channel

CULPRIT = 2
RANKS = 4
HANG_SECONDS = 1.0


@dataclass(frozen=True)
class Fault:
    """What rank CULPRIT does (`act`) while the others do `others`; the report must be of `kind` and contain `says`."""

    act: Callable[[object], object]
    kind: str
    says: tuple[str, ...]
    others: str = "collective"  # or "sleep", "return", "same"
    needs_gpu: bool = False


def all_reduce(rank):
    x = torch.full((1 << 16,), rank.index + 1, device=rank.device)
    dist.all_reduce(x, group=rank.group)
    return int(x[0].item())


def sleep(rank):
    with rank.phase("asleep"):
        time.sleep(3600)


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("I cannot travel")
        self.handle = open("/dev/null")  # noqa: SIM115

    def __reduce__(self):
        raise TypeError("no")


def raises(error):
    def act(rank):
        raise error

    return act


def fails_deep_down(rank):
    with rank.phase("the risky part"):
        try:
            return {}["missing"]
        except KeyError as error:
            raise ValueError("the outer one") from error


def kills_itself(number):
    def act(rank):
        print("a last word", flush=True)
        with rank.phase("about to die"):
            os.kill(os.getpid(), number)
            time.sleep(3600)

    return act


def python_loop(rank):
    while True:
        pass


def c_loop_with_the_gil(rank):
    collections.deque(itertools.repeat(None), maxlen=0)


def never_joins(rank):
    with rank.phase("too lazy to join"):
        time.sleep(3600)


def joins_with_another_shape(rank):
    dist.all_reduce(torch.ones(7, device=rank.device), group=rank.group)
    time.sleep(3600)


def host_out_of_memory(rank):
    resource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34))
    return bytearray(1 << 36)


def closes_its_pipe(rank):
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
            if end.family == socket.AF_UNIX:  # Gloo's own are of another family
                os.close(descriptor)
    time.sleep(3600)


def prints_100_megabytes(rank):
    line = "flood " * 20
    for _ in range(100 * 1000 * 1000 // len(line)):
        print(line)
    print("the last line")
    sys.stdout.flush()
    raise RuntimeError("after the flood")


def cannot_return(rank):
    return threading.Lock()


def answers(garbage, then):
    """In the place of its answer the rank sends this, and does `then`."""

    def act(rank):
        def send(message, end):
            if garbage:
                end.sendall(garbage)
            then()

        channel.Message.send = send

    return act


def freeze():
    os.kill(os.getpid(), signal.SIGSTOP)


class OnlyForRanks:
    """Can be unpickled in the process that pickled it, and nowhere else."""

    def __reduce__(self):
        return refuse_outside, (os.getpid(),)


def refuse_outside(pid):
    if os.getpid() != pid:
        raise SystemExit("not here")


class ExitsWhenRead(Exception):
    def __str__(self):
        raise SystemExit(3)


def comes_back_twice(rank):
    """As two processes: the rank, and a child of it that must not answer in its place."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    raise ValueError("parent" if child else "child")


def crashes_in_c(rank):
    ctypes.string_at(0)


def gpu_out_of_memory(rank):
    return torch.empty(1 << 45, dtype=torch.uint8, device=rank.device)


def illegal_memory_access(rank):
    """The sticky kind of CUDA error: every later call of this process fails too."""
    x = torch.ones(1 << 20, device=rank.device)
    x.untyped_storage().resize_(0)  # what x points to is gone
    x.add_(1)  # nobody waits for it here


def device_side_assert(rank):
    index = torch.full((1 << 20,), 1 << 40, device=rank.device)
    torch.zeros(1 << 20, device=rank.device).scatter_(0, index, 1.0)


FAULTS = {
    "an exception on one rank": Fault(raises(ValueError("boom")), "exception", ("ValueError: boom",)),
    "an exception that comes of another one": Fault(
        fails_deep_down, "exception", ('the outer one in phase "the risky part"', "KeyError: 'missing'", "direct cause")
    ),
    "an exception that takes arguments": Fault(lambda rank: b"\xff".decode(), "exception", ("UnicodeDecodeError",)),
    "an exception on all ranks": Fault(raises(ValueError("boom")), "exception", ("ValueError: boom",), "same"),
    "an exception that cannot be pickled": Fault(raises(Unpicklable), "exception", ("I cannot travel",)),
    "an exception with 50 MB of text": Fault(
        lambda rank: raises(ValueError("x" * 50_000_000))(rank), "exception", ("ValueError: xxx", "left out")
    ),
    "SystemExit": Fault(raises(SystemExit(3)), "exception", ("SystemExit: 3",)),
    "KeyboardInterrupt": Fault(raises(KeyboardInterrupt), "exception", ("KeyboardInterrupt",)),
    "SIGKILL in a collective": Fault(kills_itself(signal.SIGKILL), "crash", ("SIGKILL", "about to die", "a last word")),
    "SIGSEGV in a collective": Fault(crashes_in_c, "crash", ("SIGSEGV", "in crashes_in_c")),
    "abort in a collective": Fault(lambda rank: os.abort(), "crash", ("by SIGABRT (Aborted)", "Fatal Python error: A")),
    "SIGKILL while the others sleep": Fault(kills_itself(signal.SIGKILL), "crash", ("SIGKILL", "asleep"), "sleep"),
    "SIGSEGV while the others sleep": Fault(crashes_in_c, "crash", ("SIGSEGV", "asleep"), "sleep"),
    "abort while the others sleep": Fault(lambda rank: os.abort(), "crash", ("SIGABRT", "asleep"), "sleep"),
    "os._exit": Fault(lambda rank: os._exit(7), "crash", ("exit status 7",)),
    "SIGSTOP": Fault(kills_itself(signal.SIGSTOP), "hang", ("stopped by a signal", "about to die"), "return"),
    "an endless loop in Python": Fault(python_loop, "hang", ("in python_loop",), "return"),
    "an endless C call that holds the GIL": Fault(c_loop_with_the_gil, "hang", ("in c_loop_with_the_gil",), "return"),
    "a collective that one rank never joins": Fault(
        never_joins, "hang", ("too lazy to join", "rank 2 did not", "ranks 0, 1, 3 arrived at", "all_reduce")
    ),
    "shapes that differ between ranks": Fault(joins_with_another_shape, "", ()),
    "out of host memory": Fault(host_out_of_memory, "exception", ("MemoryError",)),
    "a rank that closes its pipe": Fault(closes_its_pipe, "crash", ("closed its connection",)),
    "100 MB of output": Fault(prints_100_megabytes, "exception", ("after the flood", "the last line"), "return"),
    "out of GPU memory": Fault(gpu_out_of_memory, "exception", ("OutOfMemoryError",), needs_gpu=True),
    "an illegal memory access on the GPU": Fault(
        illegal_memory_access, "exception", ("CUDA error: an illegal memory access",), needs_gpu=True
    ),
    "an assertion that fails on the GPU": Fault(device_side_assert, "exception", ("CUDA error",), needs_gpu=True),
    "frozen before its answer": Fault(answers(b"", freeze), "hang", ("stopped by a signal",), "return"),
    "garbage instead of an answer": Fault(
        answers(b"\xff" * 4096, lambda: time.sleep(3600)), "crash", ("is no message",), "return"
    ),
    "an exception whose text exits": Fault(raises(ExitsWhenRead), "exception", ("SystemExit: 3",), "return"),
    "a child that comes back as well": Fault(comes_back_twice, "exception", ("ValueError: parent",), "return"),
    "a result that cannot be unpickled": Fault(
        lambda rank: OnlyForRanks(), "exception", ("cannot be unpickled here", "not here"), "return"
    ),
    "a result that cannot be pickled": Fault(cannot_return, "exception", ("cannot pickle",), "return"),
}


def cause(rank, name):
    fault = FAULTS[name]
    if rank.index == CULPRIT or fault.others == "same":
        return fault.act(rank)
    return {"collective": all_reduce, "sleep": sleep, "return": lambda rank: None}[fault.others](rank)

"""Pythons that are not started, but forked: in the place of Popen.

One that runs pytest, or what this package gives a Python to do, is forked from a process that has imported what all of
them need (tests/zygote.py). It is a child of whoever starts it, with its own folder, environment, session and end, and
so is each that it starts itself: the worker that runs tests, a run that they start, the fork server of its ranks, the
agent of a node, the run of a node alone. A fresh Python imports torch for longer than most of these live, and what is
ours for longer than the rest of them does. That nothing is imported before it is needed, and that it can be,
`run_fresh` shows.
"""

import ctypes
import inspect
import os
import pickle
import resource
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import cloudpickle

NAME = "nursery"  # of a process that only waits to be forked, as /proc names it
NUMBER = struct.Struct("=q")
PR_SET_NAME, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 15, 36, 37  # linux/prctl.h
Started = subprocess.Popen  # a fresh Python, whatever takes its place


@dataclass(frozen=True)
class Birth:
    """What a Python is made of. `arguments`: after the interpreter. `numbers`: those by which it knows the descriptors
    that come along, after the one of its folder. `before`: what it calls before anything else, pickled."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    numbers: tuple[int, ...]
    own_session: bool
    before: bytes
    open_files: tuple[int, int]
    parent: int


class Nursery:
    """The other end of `serve`, for one who starts Pythons."""

    def __init__(self, control):
        self._control = control
        self._one_at_a_time = threading.Lock()

    def born(self, birth, descriptors):
        """The process id of a new child of this process. OSError if there is nobody to fork it from."""
        with self._one_at_a_time:
            prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before := ctypes.c_int()))
            prctl(PR_SET_CHILD_SUBREAPER, 1)  # it loses the parent that it was forked from, and becomes ours
            try:
                socket.send_fds(self._control, [pickle.dumps(birth)], descriptors)
                answer = self._control.recv(NUMBER.size)
            except BaseException:  # of a test that was ended by its timeout
                self.close()
                raise
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, before.value)
        if not answer:
            raise EOFError
        (pid,) = NUMBER.unpack(answer)
        if not pid:
            raise ChildProcessError("it is nobody's child")
        return int(pid)

    def close(self):
        self._control.close()


class Forked(subprocess.Popen[bytes]):
    """In the place of Popen. A Python that runs pytest, or what this package gives a Python to do, is forked, if there
    is a nursery; all else is started."""

    nursery: ClassVar[Callable[[], Nursery | None]] = staticmethod(lambda: None)

    def _execute_child(self, *parts):
        given = inspect.signature(super()._execute_child).bind(*parts).arguments
        with suppress(OSError, EOFError):
            if (arguments := of_ours(given["args"])) and (nursery := Forked.nursery()):
                self._be_born(nursery, arguments, given)
                return
        super()._execute_child(*parts)

    def _be_born(self, nursery, arguments, given):
        ends = ("p2cread", "c2pwrite", "errwrite")
        numbers = (0, 1, 2, *given["pass_fds"])
        descriptors = [
            number if end is None or given[end] == -1 else given[end]
            for number, end in zip(numbers, (*ends, *(None for _ in given["pass_fds"])), strict=True)
        ]
        birth = Birth(
            arguments=tuple(map(os.fsdecode, arguments)),
            environment=dict(os.environ if given["env"] is None else given["env"]),
            numbers=numbers,
            own_session=bool(given["start_new_session"]),
            before=cloudpickle.dumps(given["preexec_fn"]),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
            parent=os.getpid(),
        )
        folder = os.open(given["cwd"] or ".", os.O_PATH)
        try:
            self.pid, self._child_created = nursery.born(birth, [folder, *descriptors]), True
        finally:
            os.close(folder)
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[pipe] for pipe in pipes))


def is_nursery(pid):
    """Not one of the processes that a test is about."""
    try:
        return Path(f"/proc/{pid}/comm").read_text() == f"{NAME}\n"
    except OSError:
        return False


def of_ours(command):
    """The arguments of a Python that can be forked; of all else none."""
    from execnet import gateway_io

    from pytest_gpufleet.nodes import launchers
    from pytest_gpufleet.world.engines import forkserver

    if not isinstance(command, list):
        return ()
    # Which say that no bytecode is kept, and no output; execnet keeps none by itself.
    interpreter, *arguments = (part for part in command if part not in ("-B", "-u"))
    match interpreter, *arguments:
        case (sys.executable, "-m", "pytest", *_) | (
            sys.executable,
            "-c",
            forkserver.BOOT | launchers.BOOT | gateway_io.popen_bootstrapline,
            *_,
        ):
            return arguments
    return ()


class Zygote:
    """The first nursery, a child of this process, from the first time that it is wanted."""

    def __init__(self):
        self._process = None

    def nursery(self):
        if self._process is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = Started(
                    [sys.executable, "-c", f"from tests.zygote import begin; begin({theirs.fileno()})"],
                    cwd=Path(__file__).parents[1],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            self._nursery = Nursery(ours)
        return self._nursery

    def end(self):
        if self._process is not None:
            self._nursery.close()
            self._process.wait()


def prctl(option, value):
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)

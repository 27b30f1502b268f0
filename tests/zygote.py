"""Where the tests fork each Python from that they, and what they start, would start anew: a process that has imported
the libraries which all of them need.

Such a Python is a child of whoever starts it, with its own folder, environment, session and end, and so is each that it
starts itself: the worker that runs tests, a run that they start, the fork server of its ranks, the agent of a node, the
run of a node alone. A fresh Python imports torch for longer than most of these live, and what is ours for longer than
the rest of them does. That nothing is imported before it is needed, and that it can be, `run_fresh` shows.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import inspect
import os
import pickle
import pkgutil
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import cloudpickle
import pytest

# What a run imports from elsewhere, besides the plugins of pytest.
IMPORTED = (
    "cloudpickle",
    "jinja2",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "msgspec",
    "pynvml",
    "rich",
    "torch",
    "torch._dynamo",  # every optimizer imports it
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torchvision",
)
NAME = "nursery"  # of a process that only waits to be forked, as /proc tells it
NUMBER = struct.Struct("=q")
MOST_BYTES, MOST_DESCRIPTORS = 1 << 17, 16  # of a request: less than the kernel lets a datagram have
PR_SET_NAME, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 15, 36, 37  # linux/prctl.h
HUGE_PAGE, MADV_COLLAPSE = 2 << 20, 25  # linux/mman.h, from 6.1 on
Started = subprocess.Popen  # a fresh Python, whatever takes its place


@dataclass(frozen=True)
class Birth:
    """What is told of a Python. `arguments`: after the interpreter. `numbers`: those by which it knows the descriptors
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

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._one_at_a_time = threading.Lock()

    def born(self, birth: Birth, descriptors: Sequence[int]) -> int:
        """The process id of a new child of this process. OSError if there is nobody to fork it from."""
        with self._one_at_a_time:
            _prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before := ctypes.c_int()))
            _prctl(PR_SET_CHILD_SUBREAPER, 1)  # it loses the parent that it was forked from, and becomes ours
            try:
                socket.send_fds(self._control, [pickle.dumps(birth)], descriptors)
                told = self._control.recv(NUMBER.size)
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, before.value)
        if not told:
            raise EOFError
        (pid,) = NUMBER.unpack(told)
        if not pid:
            raise ChildProcessError("it is nobody's child")
        return int(pid)

    def close(self) -> None:
        self._control.close()


class Forked(subprocess.Popen[bytes]):
    """In the place of Popen. A Python that runs pytest, or what this package gives a Python to do, is forked, if there
    is a nursery; all else is started."""

    nursery: ClassVar[Callable[[], Nursery | None]] = staticmethod(lambda: None)

    def _execute_child(self, *parts: Any) -> None:
        told = inspect.signature(super()._execute_child).bind(*parts).arguments
        with suppress(OSError, EOFError):
            if (arguments := of_ours(told["args"])) and (nursery := Forked.nursery()):
                self._be_born(nursery, arguments, told)
                return
        super()._execute_child(*parts)

    def _be_born(self, nursery: Nursery, arguments: Sequence[str], told: dict[str, Any]) -> None:
        ends = ("p2cread", "c2pwrite", "errwrite")
        numbers = (0, 1, 2, *told["pass_fds"])
        descriptors = [
            number if end is None or told[end] == -1 else told[end]
            for number, end in zip(numbers, (*ends, *(None for _ in told["pass_fds"])), strict=True)
        ]
        birth = Birth(
            arguments=tuple(map(os.fsdecode, arguments)),
            environment=dict(os.environ if told["env"] is None else told["env"]),
            numbers=numbers,
            own_session=bool(told["start_new_session"]),
            before=cloudpickle.dumps(told["preexec_fn"]),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
            parent=os.getpid(),
        )
        folder = os.open(told["cwd"] or ".", os.O_PATH)
        try:
            self.pid, self._child_created = nursery.born(birth, [folder, *descriptors]), True
        finally:
            os.close(folder)
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(told[pipe] for pipe in pipes))


def is_nursery(pid: int) -> bool:
    """Not one of the processes that a test is about."""
    try:
        return Path(f"/proc/{pid}/comm").read_text() == f"{NAME}\n"
    except OSError:
        return False


def of_ours(command: Any) -> Sequence[str]:
    """The arguments of a Python that can be forked; of all else none."""
    from execnet import gateway_io

    from pytest_gpufleet.nodes import agent_process
    from pytest_gpufleet.world.engines import forkserver

    if not isinstance(command, list):
        return ()
    # Which say that no bytecode is kept, and no output; execnet keeps none by itself.
    interpreter, *arguments = (part for part in command if part not in ("-B", "-u"))
    match interpreter, *arguments:
        case (sys.executable, "-m", "pytest", *_) | (
            sys.executable,
            "-c",
            forkserver.BOOT | agent_process.BOOT | gateway_io.popen_bootstrapline,
            *_,
        ):
            return arguments
    return ()


class Zygote:
    """The first nursery, a child of this process, from the first time that it is wanted."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def nursery(self) -> Nursery:
        if self._process is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = Started(
                    [sys.executable, "-c", f"from {__name__} import begin; begin({theirs.fileno()})"],
                    cwd=Path(__file__).parents[1],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            self._nursery = Nursery(ours)
        return self._nursery

    def end(self) -> None:
        if self._process is not None:
            self._nursery.close()
            self._process.wait()


# ---------------------------------------------------------------- on the other end


def begin(control: int) -> NoReturn:
    """The life of the zygote."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests in the background has it ignored
    with tempfile.TemporaryDirectory() as empty:
        pytest.main([empty, f"--rootdir={empty}", "-p", "no:cacheprovider"], plugins=[Imports()])
    gc.collect()
    gc.freeze()
    _collapse()
    serve(socket.socket(fileno=control))


class Imports:
    """All that a run imports, and reads of files that never change. A run of pytest imports it, and so its plugins with
    their assertions rewritten: the runs that are forked later would complain of any others."""

    def pytest_configure(self) -> None:
        import pytest_gpufleet
        from pytest_gpufleet.hardware import software
        from pytest_gpufleet.report.page import rendering
        from pytest_gpufleet.verdict.profiles import profile

        ours = (each.name for each in pkgutil.walk_packages(pytest_gpufleet.__path__, "pytest_gpufleet."))
        for name in (*IMPORTED, *ours):
            importlib.import_module(name)
        templates = rendering.templates("en")
        for name in templates.list_templates(extensions=["jinja"]):
            templates.get_template(name)
        profile.shipped()
        software.software()  # loads cuDNN to ask it


def serve(control: socket.socket) -> NoReturn:
    """Fork Pythons until nobody is left who could want one."""
    _prctl(PR_SET_NAME, NAME.encode())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        request, descriptors, *_ = socket.recv_fds(control, MOST_BYTES, MOST_DESCRIPTORS)
        if not request:
            os._exit(0)
        first = os.fork()
        if first == 0:
            first = os.getpid()
            if os.fork():
                os._exit(0)  # and whoever asked becomes the parent
            live(control, first, pickle.loads(request), descriptors)
        os.waitpid(first, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def live(control: socket.socket, first: int, birth: Birth, descriptors: Sequence[int]) -> NoReturn:
    """The life of a Python that was forked. `first`: its first parent, which ends at once."""
    while (parent := os.getppid()) == first:
        os.sched_yield()
    if parent != birth.parent:  # which is gone, or was forked from the one whose nursery this is
        control.send(NUMBER.pack(0))
        os._exit(1)
    _prctl(PR_SET_NAME, b"python")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    control.send(NUMBER.pack(os.getpid()))
    control.close()
    _take_over(birth, descriptors)
    os.environ.clear()
    os.environ.update(birth.environment)
    resource.setrlimit(resource.RLIMIT_NOFILE, birth.open_files)
    tempfile.tempdir = None  # known since some import asked for it
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__  # a pytest may have captured them
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    if birth.own_session:
        os.setsid()
    if before := pickle.loads(birth.before):
        before()
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as a Python begins
    try:
        status = _run(birth.arguments)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    _end(status)


def _take_over(birth: Birth, descriptors: Sequence[int]) -> None:
    """The descriptors that came along, by the numbers that they are to have."""
    folder, *others = descriptors
    os.fchdir(folder)
    os.close(folder)
    above = max(birth.numbers) + 1
    raised = [os.dup2(descriptor, above + max(others) + place) for place, descriptor in enumerate(others)]
    for descriptor in others:
        os.close(descriptor)
    for descriptor, number in zip(raised, birth.numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _run(arguments: Sequence[str]) -> int:
    """What a Python does with these arguments."""
    from pytest_gpufleet.world.engines import forkserver

    kind, what, *others = arguments
    if what != forkserver.BOOT:
        have_nursery()
    if kind == "-m":
        heir = Heir()
        os.register_at_fork(before=heir.before, after_in_child=heir.after_in_child)
        added = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.path[:1] = [os.getcwd(), *map(os.path.abspath, added)]
        sys.argv = [str(Path(pytest.__file__).with_name("__main__.py")), *others]
        return int(pytest.main(others))
    sys.argv = ["-c", *others]
    exec(what, {"__name__": "__main__"})
    return 0


def have_nursery() -> None:
    """One of this process's own, as it is now."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        os.closerange(3, theirs.fileno())
        os.closerange(theirs.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.close(nothing)
        serve(theirs)
    theirs.close()
    nursery = Nursery(ours)
    Forked.nursery = staticmethod(lambda: nursery)
    subprocess.Popen = Forked


class Heir:
    """A run that forks itself, as one with --fleet-deadline does, leaves it to its child to start Pythons: its nursery
    has no children for another, and would be one more process to wait for."""

    had = False

    def before(self) -> None:
        nursery, Forked.nursery = Forked.nursery(), staticmethod(lambda: None)
        self.had = nursery is not None
        if nursery:
            nursery.close()

    def after_in_child(self) -> None:
        if self.had:
            self.had = False
            have_nursery()


def _end(status: int) -> NoReturn:
    """As a Python ends, but for taking to pieces all that was imported."""
    threading._shutdown()  # waits for threads, as multiprocessing does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _collapse() -> None:
    """Put what was imported on huge pages, if the kernel can: a fork copies a table of all its pages, 445 MB of them,
    in 28 ms, and on huge pages in 9 ms."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, file, *_ = line.split()
        if rights == "rw-p" and file == "0":  # of no file
            begins, ends = (int(address, 16) for address in addresses.split("-"))
            for page in range(-(-begins // HUGE_PAGE) * HUGE_PAGE, ends - HUGE_PAGE + 1, HUGE_PAGE):
                madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE)


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)

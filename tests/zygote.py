"""The process that Pythons are forked from (tests/forked.py), with all imported that a run imports, and their lives."""

import atexit
import ctypes
import gc
import importlib
import os
import pickle
import pkgutil
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import pytest

from tests.forked import NAME, NUMBER, PR_SET_NAME, Forked, Nursery, prctl

# What a run imports from elsewhere, besides the plugins of pytest.
IMPORTED = (
    "cloudpickle", "jinja2", "matplotlib.backends.backend_svg", "matplotlib.figure", "msgspec", "pynvml", "rich",
    "torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torchvision",
)  # fmt: skip
MOST_BYTES, MOST_DESCRIPTORS = 1 << 17, 16  # of a request: less than the kernel lets a datagram have
HUGE_PAGE, MADV_COLLAPSE = 2 << 20, 25  # linux/mman.h, from 6.1 on
OWN_PATH = set()  # what PYTHONPATH was for the zygote


def begin(control):
    """The life of the zygote."""
    OWN_PATH.update(python_path())
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

    def pytest_configure(self):
        import pytest_gpufleet
        from pytest_gpufleet.machine import software
        from pytest_gpufleet.report import rendering
        from pytest_gpufleet.verdict import profile

        ours = (each.name for each in pkgutil.walk_packages(pytest_gpufleet.__path__, "pytest_gpufleet."))
        for name in (*IMPORTED, *ours):
            importlib.import_module(name)
        templates = rendering.templates()
        for name in templates.list_templates(extensions=["jinja"]):
            templates.get_template(name)
        profile.shipped()
        software.software()  # loads cuDNN to ask it


def serve(control):
    """Fork Pythons until nobody is left who could want one."""
    prctl(PR_SET_NAME, NAME.encode())
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


def live(control, first, birth, descriptors):
    """The life of a Python that was forked. `first`: its first parent, which ends at once."""
    while (parent := os.getppid()) == first:
        os.sched_yield()
    if parent != birth.parent:  # which is gone, or was forked from the one whose nursery this is
        control.send(NUMBER.pack(0))
        os._exit(1)
    prctl(PR_SET_NAME, b"python")
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


def _take_over(birth, descriptors):
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


def _run(arguments):
    """What a Python does with these arguments."""
    from pytest_gpufleet.world.engines import forkserver

    kind, what, *others = arguments
    if what != forkserver.BOOT:
        have_nursery()
    if kind == "-m":
        heir = Heir()
        os.register_at_fork(before=heir.before, after_in_child=heir.after_in_child)
        sys.path[:] = [os.getcwd(), *python_path(), *(each for each in sys.path[1:] if each not in OWN_PATH)]
        sys.argv = [str(Path(pytest.__file__).with_name("__main__.py")), *others]
        return int(pytest.main(others))
    sys.argv = ["-c", *others]
    exec(what, {"__name__": "__main__"})
    return 0


def python_path():
    return [os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]


def have_nursery():
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

    def before(self):
        nursery, Forked.nursery = Forked.nursery(), staticmethod(lambda: None)
        self.had = nursery is not None
        if nursery:
            nursery.close()

    def after_in_child(self):
        if self.had:
            self.had = False
            have_nursery()


def _end(status):
    """As a Python ends, but for taking to pieces all that was imported."""
    threading._shutdown()  # waits for threads, as multiprocessing does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _collapse():
    """Put what was imported on huge pages, if the kernel can: a fork copies a table of all its pages, 445 MB of them,
    in 28 ms, and on huge pages in 9 ms."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, file, *_ = line.split()
        if rights == "rw-p" and file == "0":  # of no file
            begins, ends = (int(address, 16) for address in addresses.split("-"))
            for page in range(-(-begins // HUGE_PAGE) * HUGE_PAGE, ends - HUGE_PAGE + 1, HUGE_PAGE):
                madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE)

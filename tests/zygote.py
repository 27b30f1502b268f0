"""Where the tests fork each pytest of their own from: a process that has imported the libraries which all of them need.

Such a pytest is a process of its own in every other respect, with its own folder, environment, session and end. So is
the fork server of its ranks. A fresh Python imports torch for longer than most of these runs take, and what is ours for
longer than the rest of them does. That nothing is imported before it is needed, and that it can be, `run_fresh` shows.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import pkgutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

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
NUMBER = struct.Struct("=q")
MOST_BYTES = 1 << 17  # of a request: less than the kernel lets a datagram have


class Zygote:
    """The process, from the first run on, which takes its children one after the other."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def pytest(
        self, folder: Path, arguments: Sequence[str], environment: Mapping[str, str], seconds: float
    ) -> tuple[int, str]:
        """Run pytest in this folder. Its exit status, and what it and all that it has left printed; it is killed after
        these seconds."""
        read, write = os.pipe()
        try:
            socket.send_fds(self._control, [pickle.dumps((folder, arguments, environment))], [write])
        finally:
            os.close(write)
        killer = threading.Timer(seconds, os.kill, (self._number(), signal.SIGKILL))
        killer.start()
        with open(read) as output:
            text = output.read()
        status = self._number()
        killer.cancel()
        return status, text

    def _number(self) -> int:
        (number,) = NUMBER.unpack(self._control.recv(NUMBER.size))
        return int(number)

    def end(self) -> None:
        self._control.close()
        self._process.wait()


class ForkServer(subprocess.Popen[bytes]):
    """A process that is forked before its parent becomes a pytest, and becomes the fork server of that one's ranks
    when it is started."""

    def __init__(self) -> None:
        self._started = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._forked = os.fork()
        if self._forked == 0:
            self._control.close()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            serve_ranks(theirs)
        theirs.close()

    def pytest_load_initial_conftests(self) -> None:
        """Before any hook of the plugin itself can start ranks."""
        from pytest_gpufleet.world.engines import forkserver

        self._launch, forkserver.launch = forkserver.launch, self.launch

    def launch(self, control_descriptor: int, preload: Sequence[str], idle: Sequence[str]) -> subprocess.Popen[bytes]:
        """In the place of forkserver.launch, once: where one comes to harm, the next is started as it always is."""
        from pytest_gpufleet.world.engines import forkserver

        forkserver.launch = self._launch
        super().__init__([])
        folder = os.open(".", os.O_PATH)
        told = pickle.dumps((preload, idle, sys.path, dict(os.environ)))
        socket.send_fds(self._control, [told], [control_descriptor, 1, 2, folder])
        os.close(folder)
        return self

    def _execute_child(self, *parts: Any) -> None:
        self.pid, self._child_created = self._forked, True


def serve_ranks(control: socket.socket) -> None:
    """The life of the fork server, from before it is wanted."""
    told, descriptors, *_ = socket.recv_fds(control, MOST_BYTES, 4)
    control.close()
    if not told:  # it never was
        os._exit(0)
    serves, output, errors, folder = descriptors
    os.fchdir(folder)
    for ours, theirs in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (errors, 2)):
        os.dup2(ours, theirs)
        os.close(ours)
    os.close(folder)
    os.setsid()
    preload, idle, sys.path[:], environment = pickle.loads(told)
    live_in(environment)
    from pytest_gpufleet.world.engines import forkserver

    forkserver.serve(serves, preload, idle)


def live_in(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # known since some import asked for it


def become_pytest(output: int, folder: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """What `python -m pytest` does in this folder, with this environment."""
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.chdir(folder)
    live_in(environment)
    added = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = [str(folder), *map(os.path.abspath, added)]
    sys.argv = [str(Path(pytest.__file__).with_name("__main__.py")), *arguments]
    return int(pytest.main(list(arguments), plugins=[ForkServer()]))


def end(status: int) -> NoReturn:
    """As a Python ends, but for taking to pieces all that was imported."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as multiprocessing does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Imports:
    """All that a run imports, and reads of files that never change. A run of pytest imports it, and so its plugins with
    their assertions rewritten: the runs that are forked later would complain of any others."""

    def pytest_configure(self) -> None:
        import pytest_gpufleet
        from pytest_gpufleet.report.page import rendering
        from pytest_gpufleet.verdict.profiles import profile

        ours = (each.name for each in pkgutil.walk_packages(pytest_gpufleet.__path__, "pytest_gpufleet."))
        for name in (*IMPORTED, *ours):
            importlib.import_module(name)
        templates = rendering.templates("en")
        for name in templates.list_templates(extensions=["jinja"]):
            templates.get_template(name)
        profile.shipped()


def serve(control: socket.socket) -> NoReturn:
    with tempfile.TemporaryDirectory() as empty:
        pytest.main([empty, f"--rootdir={empty}", "-p", "no:cacheprovider"], plugins=[Imports()])
    gc.collect()
    gc.freeze()
    while True:
        request, descriptors, *_ = socket.recv_fds(control, MOST_BYTES, 1)
        if not request:
            end(0)
        (output,) = descriptors
        pid = os.fork()
        if pid == 0:
            control.close()
            end(become_pytest(output, *pickle.loads(request)))
        os.close(output)
        control.send(NUMBER.pack(pid))
        _, status = os.waitpid(pid, 0)
        control.send(NUMBER.pack(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))

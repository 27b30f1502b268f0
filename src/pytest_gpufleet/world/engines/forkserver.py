"""The process that ranks are forked from. It has imported torch, so that no rank has to, and never touches a GPU.

Not multiprocessing's own, for three reasons. Nobody waits for it: requests and news are datagrams, so it may be stopped
or stuck. It has no socket with a path, which a long TMPDIR would break. And whatever a rank has started stays below it,
in whatever session or process group, so that it can be found and killed."""

import gc
import importlib
import itertools
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import NoReturn

from pytest_gpufleet.world.engines import channel, processes

REQUEST = struct.Struct("=q")  # a number, with a descriptor: the rank's end of the connection
KILL_SECONDS = 1.0
NEWS = struct.Struct("=qq?q")  # number of the request, process id, whether it has ended, its exit status
# The controller's sys.path first: the package may be importable by that alone.
BOOT = (
    "import sys; sys.path[:] = sys.argv[4:]; from pytest_gpufleet.world.engines import forkserver; "
    "forkserver.serve(int(sys.argv[1]), sys.argv[2].split(), sys.argv[3].split())"
)


# By which coverage counts every new Python from its start. It would slow what ranks measure, for nothing: they are
# killed before they could write what was counted.
NOT_FOR_RANKS = {"COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"}


class Forkserver:
    """The controller's handle of it, which waits for nothing but its end, for KILL_SECONDS. It imports the modules of
    `preload` before it forks the first rank, and those of `idle` as far as it comes until it is asked for one."""

    def __init__(self, preload: Sequence[str], idle: Sequence[str] = ()) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
        imports = [" ".join(modules) for modules in (preload, idle)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", BOOT, str(theirs.fileno()), *imports, *map(str, sys.path)],
                env={name: value for name, value in os.environ.items() if name not in NOT_FOR_RANKS},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # signals of the terminal are for the controller
            )
        self.pid = self._process.pid

    def exitcode(self) -> int | None:
        """Of the process whose end `news` has reported; None if it does not come to its end."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)
        return self._process.returncode

    def fileno(self) -> int:
        return self._control.fileno()

    def fork(self, request: int, connection: int) -> None:
        """Ask for a rank, of which news will bear this number. OSError if more requests are waiting than fit."""
        with suppress(ConnectionError):  # the process is gone, which `news` reports
            socket.send_fds(self._control, [REQUEST.pack(request)], [connection])

    def news(self) -> Iterator[tuple[int, int, int | None]]:
        """Which request has become which process since, and which of them has ended: with its exit code then, negative
        if by a signal. EOFError if the fork server is gone."""
        while True:
            try:
                datagram = self._control.recv(NEWS.size)
            except BlockingIOError:
                return
            except OSError:
                datagram = b""
            if not datagram:
                raise EOFError
            request, pid, ended, exitcode = NEWS.unpack(datagram)
            yield request, pid, exitcode if ended else None

    def let_go(self) -> None:
        """In a process that was forked from the controller: the fork server is not its own."""
        self._control.close()

    def kill(self) -> None:
        self._process.kill()
        self._control.close()
        self.exitcode()


def serve(control_descriptor: int, preload: Sequence[str], idle: Sequence[str]) -> NoReturn:
    """The whole life of the process: until its controller is gone, and with it all ranks and what they started."""
    control = socket.socket(fileno=control_descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # For ranks, which share it. It must outlive them, to remove what they leave in /dev/shm.
    resource_tracker.ensure_running()
    processes.adopt()
    processes.end_with(control_descriptor, os.getpgrp(), by=signal.SIGCONT)  # somebody may have stopped it
    looked_at = select.poll()  # and not select, which knows 1,024 descriptors: the controller has chosen ours
    looked_at.register(control, select.POLLIN)
    gc.disable()
    for name in itertools.chain(preload, itertools.takewhile(lambda name: not looked_at.poll(0), idle)):
        with suppress(Exception):  # a rank will fail in the same way, and tell it
            importlib.import_module(name)
    gc.freeze()  # ranks neither look at what was imported, nor copy its pages by doing so
    gc.enable()
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    requests: dict[int, int] = {}  # by process id
    looked_at.register(woken, select.POLLIN)

    def tell(news: bytes) -> None:
        with suppress(OSError):  # the controller is gone, which the next look at the socket shows
            control.send(news)

    while True:
        ready = {descriptor for descriptor, _ in looked_at.poll()}
        if woken in ready:
            os.read(woken, 4096)
            with suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    pid, status = ended
                    if (request := requests.pop(pid, None)) is not None:  # else somebody's orphan
                        tell(NEWS.pack(request, pid, True, os.waitstatus_to_exitcode(status)))
        if control.fileno() in ready:
            try:
                datagram, descriptors, _, _ = socket.recv_fds(control, REQUEST.size, 1)
            except OSError:  # the controller has gone without hearing all news
                break
            if not datagram:
                break
            own, pid = os.getpid(), os.fork()
            if pid == 0:
                for descriptor in (control.detach(), woken, wake):
                    os.close(descriptor)
                _become_rank(descriptors[0], own)
            for descriptor in descriptors:
                os.close(descriptor)
            (requests[pid],) = REQUEST.unpack(datagram)
            tell(NEWS.pack(requests[pid], pid, False, 0))
    processes.end(lambda: processes.started_by(os.getpid()), seconds=10.0)  # after the controller
    os._exit(0)


def _become_rank(connection: int, parent: int) -> NoReturn:
    status = 1
    try:
        processes.end_with_parent(parent)
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end = socket.socket(fileno=connection)
        # Before the function that it is to run is imported.
        sys.path[:], sys.argv, folder = pickle.loads(channel.receive(end))
        with suppress(OSError):  # it was removed, or this user may not enter it: the fork server's own then
            os.chdir(folder)
        main, *arguments = pickle.loads(channel.receive(end))
        main(end, *arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)

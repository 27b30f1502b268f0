"""One run a GPU: a lock on the GPU's device file, held until the process that took it is gone. The driver's device
files are what all who can use the GPUs of a host share, wherever their temporary folders are, and only root can replace
them. So no file is made for the lock, and none that another user has made is trusted."""

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

from pytest_gpufleet.machine.nvml import in_thread
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.gpu import Gpu

DEVICES = Path("/dev")


class GpuTaken(Refused):
    """Another process holds a GPU; the text says which GPU, and who."""


def lock(gpus: Iterable[Gpu]) -> ExitStack:
    """Without waiting; closing what is returned frees the GPUs, and so does the end of this process. One without a
    device file, as in WSL 2, is not locked, nor one that is too broken to open it. Raises GpuTaken."""
    with ExitStack() as taken:
        for gpu in (gpu for gpu in gpus if gpu.get("minor") is not None):
            if (descriptor := _opened(f"nvidia{gpu['minor']}")) is None:
                continue
            taken.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise GpuTaken(f"{gpu.identity} is in use by another run: {holder(descriptor)}") from None
        return taken.pop_all()


def _opened(device: str) -> int | None:
    with suppress(OSError):  # what that means for the machine is for the checks to find
        return os.open(DEVICES / device, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    return None


def holder(descriptor: int) -> str:
    """Who holds the lock on a file, as the kernel says it (proc_locks(5)): no other user has a say in the text."""
    file = os.fstat(descriptor)
    name = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    for line in Path("/proc/locks").read_text().splitlines():
        _, kind, _, _, pid, locked, *_ = line.split()
        if (kind, locked) == ("FLOCK", name):
            return _process(int(pid))
    return "a process that cannot be seen from here, as in another container: `lslocks` on the host shows it"


def _process(pid: int) -> str:
    folder = Path(f"/proc/{pid}")
    try:
        user = f"user {folder.stat().st_uid}"
        stat = (folder / "stat").read_text(errors="replace")  # with a name that anybody may choose
    except OSError:  # hidden from this user, or it has left the lock to a child of its own
        return f"process {pid}, of which nothing more can be seen: `fuser -v /dev/nvidia*` as root shows who is there"
    with suppress(KeyError, OSError):  # in a container, of a user that it does not know
        user = folder.owner()
    ticks = int(stat.rpartition(")")[2].split()[19])  # proc_pid_stat(5): starttime, since the machine started
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    since = datetime.fromtimestamp(booted + ticks / os.sysconf("SC_CLK_TCK"), timezone.utc)
    return f"process {pid} of {user}, since {since:%Y-%m-%dT%H:%M:%S} UTC"


# The driver's control device, held until the process that took it is gone. Whoever has GPUs of a host opens it: it is
# what runs on one host share, containers too where their runtime mounts the host's (libnvidia-container does).
CONTROL = "nvidiactl"


@contextmanager
def taken(wait: Callable[[str], None], most_seconds: float) -> Iterator[str]:
    """Have the host to oneself among all that take turns there. `wait` hears who else has it. Gives "", or who has it
    still after so many seconds. Without such a device, as in WSL 2, nobody takes turns."""
    if (descriptor := _opened(CONTROL)) is None:
        yield ""
        return
    try:
        yield _after_others(descriptor, wait, most_seconds)
    finally:
        os.close(descriptor)


def _after_others(descriptor: int, wait: Callable[[str], None], most_seconds: float) -> str:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        wait(holder(descriptor))
        try:  # not by asking again and again: a run of many turns would begin the next between two questions
            in_thread(_lock, os.dup(descriptor)).result(most_seconds)
        except FutureTimeout:
            return holder(descriptor)
    return ""


def _lock(descriptor: int) -> None:
    """Wait for the lock and close the descriptor: it is held as long as others of the same file are open."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)

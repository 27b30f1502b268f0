"""The node that this process runs on: its GPUs, in the order of the run, and the host around them. And one run a GPU: a
lock on the GPU's device file, held until the process that took it is gone. The driver's device files are what all who
can use the GPUs of a host share, and only root can replace them: no file is made for the lock, and none that another
user has made is trusted."""

import fcntl
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pytest_gpufleet.machine import host, nvml
from pytest_gpufleet.machine.gpu_facts import COUNTERS, READINGS, SLOW_COUNTERS
from pytest_gpufleet.machine.kernel_log import NVLINK_5, KernelLog, Logged, Xid, behind
from pytest_gpufleet.machine.nvml import Nvml
from pytest_gpufleet.machine.software import software
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.metric import Sample
from pytest_gpufleet.model.place import Gpu, GpuTopology, Missing


class LocalNode:
    """Data alone: no GPU context is needed. `topology`: with CONSTANTS. `driver`: None where there is no GPU."""

    def __init__(self, driver: Nvml | None, topology: GpuTopology, kernel_log: str = "/dev/kmsg") -> None:
        self.topology = topology
        self._driver = driver
        self._path = kernel_log
        self._log: KernelLog | None = None
        self._latest: tuple[Xid, ...] = ()  # what it had the last time
        self._absent: set[tuple[int, str]] = set()  # readings that a GPU does not have, so that it is asked once

    def facts(self, names: Sequence[str]) -> tuple[Gpu, ...]:
        if self._driver is None:
            return ()
        now = nvml.read_all(self._driver, names)
        return tuple(Gpu(gpu.index, {**gpu.facts, **facts}) for gpu, facts in zip(self.topology.gpus, now, strict=True))

    def host(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        return host.read(names)

    def sample(self) -> Sample:
        """The readings of all GPUs now. They are asked at the same time, for some calls block for a while."""
        assert self._driver is not None
        now, asked = round(time.time(), 3), []
        for gpu in range(self._driver.count()):
            names = [name for name in READINGS if (gpu, name) not in self._absent]
            asked.append(nvml.in_thread(nvml.read, self._driver, gpu, names))
        readings: list[dict[str, Any]] = []
        for gpu, found in enumerate(each.result() for each in asked):
            missing = {name: value for name, value in found.items() if isinstance(value, Missing)}
            self._absent.update((gpu, name) for name, value in missing.items() if value.absent)
            readings.append({**dict.fromkeys(READINGS), **found, **dict.fromkeys(missing)})
        return Sample(now, tuple(readings))

    def kernel_log(self) -> Logged:
        """Errors since the last call, first those from before. Most XIDs are reported by NVML and the kernel's log, one
        later than the other; SXids and the sub-codes of NVLink 5 by the log alone."""
        if self._driver is None:
            return Logged()
        self._log = self._log or KernelLog(self._path)
        reported, logged = self._driver.xids(), self._log.new()
        known, self._latest = (*self._latest, *logged.xids), logged.xids
        at = [gpu.pci_bus_id for gpu in self.topology.gpus]
        new = ((at[index], number) for index, number in reported if number not in NVLINK_5)
        xids = [Xid(*each, "") for each in new if not any(xid.number == each[1] and xid.of(each[0]) for xid in known)]
        undecoded = sorted({number for _, number in reported if number in NVLINK_5 and logged.trouble})
        unread = f"what XIDs {undecoded} of NVLinks mean stands in the kernel log alone" if undecoded else ""
        host = tuple(behind(message, at) for message in logged.host)
        return Logged((*logged.xids, *xids), logged.trouble, logged.unread or unread, host)

    def present(self) -> tuple[str, ...]:
        return self._driver.present() if self._driver is not None else ()

    def lock(self) -> ExitStack:
        """Make the GPUs this run's own, until what is returned is closed or its process is gone. Raises GpuTaken."""
        return lock(self.topology.gpus)


@dataclass(frozen=True)
class Machine:
    """As it is at one moment: its GPUs, in the order of the run, and its host. `present`: the PCI bus ids of all its
    GPUs, also of hidden ones; "" for one that does not answer. `node`: its number in the run."""

    gpus: tuple[Gpu, ...]
    host: Mapping[str, Any] = field(default_factory=dict)
    taken: str = ""
    logged: Logged = field(default_factory=Logged)
    present: tuple[str, ...] = ()
    node: int = 0
    _read_at: float = field(default_factory=time.monotonic, compare=False)

    @property
    def seconds_ago(self) -> float:
        """How long ago it was read, whatever was done to the clock since."""
        return time.monotonic() - self._read_at


def take(node: LocalNode) -> Machine:
    gpus = node.facts((*COUNTERS, *SLOW_COUNTERS))
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Machine(gpus, node.host(), now, node.kernel_log(), node.present())


@contextmanager
def opened(wanted: int | None = None, environment: Mapping[str, str] = os.environ) -> Iterator[LocalNode]:
    """This machine with the first `wanted` GPUs that the environment leaves visible, in its order. Raises NoGpus."""
    with nvml.session() as driver:
        yield LocalNode(*nvml.chosen(driver, wanted, environment))


def without_gpus(why: str, *problems: str) -> LocalNode:
    """This machine where it has no GPUs to use, and why; `problems`: if there should be some."""
    return LocalNode(None, GpuTopology(problems=problems, absent=why, **software()))


LONGEST_GAP = 10  # intervals, of a second at least: without samples for longer, what happened went unseen


class Sampler:
    """A daemon thread that hands a Sample to `on_sample` every `interval_seconds`. What fails costs one sample;
    `trouble`: what did last, or that there was no sample for LONGEST_GAP."""

    def __init__(self, node: LocalNode, interval_seconds: float, on_sample: Callable[[Sample], None]) -> None:
        self.trouble = ""
        self._node = node
        self._interval = interval_seconds
        self._on_sample = on_sample
        self._latest = 0.0  # monotonic time of the last sample, or of the start
        self._sampled = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpufleet-telemetry", daemon=True)

    def start(self) -> None:
        self._latest = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Take no more samples. Waits for one that is being taken, for one interval at the most."""
        running = self._thread.is_alive() and not self._stopped.is_set()
        self._stopped.set()
        if running:
            self._thread.join(self._interval)
            self._note_gap(self._thread.is_alive() and not self._sampled)

    def _note_gap(self, always: bool = False) -> None:
        gap = time.monotonic() - self._latest
        if always or gap > LONGEST_GAP * max(self._interval, 1.0):
            self.trouble = f"no answer from the driver for {gap:.1f} s"

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopped.wait(max(0.0, due - time.monotonic())):
            try:
                taken = self._node.sample()
                if not self._stopped.is_set():
                    self._note_gap()
                    self._latest, self._sampled = time.monotonic(), True
                    self._on_sample(taken)
            except Exception as error:
                self.trouble = f"{type(error).__name__}: {error}"
            # The next beat of a fixed rhythm; beats that were missed are left out, not made up for.
            due += self._interval * max(1, math.ceil((time.monotonic() - due) / self._interval))


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
    still = ""
    with ExitStack() as held:
        if (descriptor := _opened(CONTROL)) is not None:
            held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                wait(holder(descriptor))
                try:  # not by asking again and again: a run of many turns would begin the next between two questions
                    nvml.in_thread(_lock, os.dup(descriptor)).result(most_seconds)
                except FutureTimeout:
                    still = holder(descriptor)
        yield still


def _lock(descriptor: int) -> None:
    """Wait for the lock and close the descriptor: it is held as long as others of the same file are open."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)

"""The GPUs as NVML, the driver's management library, describes them. Creates no GPU context."""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.gpu_facts import CALLS, CONSTANTS, NOT_HERE, PAIRED, named, text
from pytest_gpufleet.machine.software import driver_problems, software
from pytest_gpufleet.model.language import some
from pytest_gpufleet.model.metric import GpuState
from pytest_gpufleet.model.place import Gpu, GpuTopology, Missing
from pytest_gpufleet.redaction import one_line, throughout

NVIDIA = "0x10de"
# linux/pci_ids.h: VGA, 3D controllers (most GPUs of data centres) and other display, and the bridges NVSwitches are.
CLASSES = {"0x0300": "GPU", "0x0302": "GPU", "0x0380": "GPU", "0x0680": "NVSwitch"}


def signs_of_nvidia(root: Path = Path("/")) -> list[str]:
    """A container without GPUs sees the PCI devices of its host, and often /proc/driver/nvidia too."""
    devices = [
        f"{kind} {device.name}"
        for device in sorted((root / "sys/bus/pci/devices").glob("*"))
        if (kind := CLASSES.get((tools.text(device / "class") or "")[:6])) and tools.text(device / "vendor") == NVIDIA
    ]
    files = {"device files": "dev/nvidia*", "a loaded driver": "proc/driver/nvidia"}
    found = {words: [f"/{path.relative_to(root)}" for path in sorted(root.glob(each))] for words, each in files.items()}
    return [f"{words}: {some(names, 3)}" for words, names in {"on the PCI bus": devices, **found}.items() if names]


# nvml.h: nvmlGpuTopologyLevel_t, in the words of `nvidia-smi topo -m`.
PCIE_ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
P2P = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3}
EVENT_XID = 0x8

NO_NVML = {
    "LibraryNotFound": "NVML (libnvidia-ml.so.1) was not found: no NVIDIA driver is installed, or a container was "
    "started without it (docker run --gpus all)",
    "DriverNotLoaded": "the NVIDIA driver is installed but not loaded: see `dmesg` and `nvidia-smi`",
    "NoPermission": "NVML refused access: this user may not open /dev/nvidia*",
    "LibRmVersionMismatch": "the NVIDIA library and the loaded kernel module are of different versions: reboot, or "
    "reload the module after the driver update",
}

ANSWER_SECONDS = 20.0
T = TypeVar("T")


class NoGpus(Exception):
    """A node has no GPU to run on: why. `signs`: what speaks for NVIDIA hardware all the same, in a few words each."""

    def __init__(self, why: str, driver: bool = False) -> None:
        super().__init__(why)
        self.signs = [*signs_of_nvidia(), *(["an installed driver"] if driver else [])]


SILENT = (
    "the NVIDIA driver has not answered for {seconds:g} s, and nothing goes on without it: look into the kernel log "
    "(`dmesg`) for XIDs; if `nvidia-smi` hangs too, restart the machine. `kill -9 {pid}` ends this process"
)


@contextmanager
def warn_if_silent() -> Iterator[None]:
    """A line on the terminal if the driver keeps this thread waiting. What it has begun in C nobody can take back."""

    def warn() -> None:
        with suppress(Exception):  # there may be no terminal
            print(SILENT.format(seconds=ANSWER_SECONDS, pid=os.getpid()), file=sys.stderr, flush=True)

    timer = threading.Timer(ANSWER_SECONDS, warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def session() -> Iterator[Any]:
    """The initialised pynvml module. Raises NoGpus if there is no working NVML."""
    import pynvml

    try:
        with warn_if_silent():
            pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        reason = type(error).__name__.removeprefix("NVMLError_")
        why = NO_NVML.get(reason, f"NVML could not be initialised: {error}")
        raise NoGpus(why, driver=reason != "LibraryNotFound") from None
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


class Nvml:
    """The driver of this machine. `handles` are the GPUs of the run, in their order."""

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml = nvml
        self._handles = handles
        self._events: list[Any] | None = None  # for each GPU a set of events, None where there are none

    def count(self) -> int:
        return len(self._handles)

    def ask(self, index: int, fact: str) -> Any:
        """One fact of one GPU as plain JSON values, Missing if it cannot be had."""
        try:
            answer = (self._p2p if fact == PAIRED else CALLS[fact])(self._nvml, self._handles[index])
            return throughout(text(answer), one_line)
        except self._nvml.NVMLError as error:
            return Missing(f"NVML: {error}", absent=named(error, *NOT_HERE))
        except AttributeError as error:
            return Missing(f"this version of nvidia-ml-py cannot ask: {error}", absent=True)
        except Exception as error:  # a broken GPU's answers may not even decode
            return Missing(f"nvidia-ml-py: {error!r}")

    def xids(self) -> list[tuple[int, int]]:
        """The XIDs that the driver has reported since the last call (the first one arms it): (GPU, number)."""
        if self._events is None:
            with warn_if_silent():
                self._events = [self._armed(handle) for handle in self._handles]
        arrived = []
        for index, events in enumerate(self._events):
            with suppress(self._nvml.NVMLError):  # most often: nothing has happened
                while events is not None:
                    arrived.append((index, int(self._nvml.nvmlEventSetWait_v2(events, 0).eventData)))
        return arrived

    def _armed(self, handle: Any) -> Any:
        with suppress(self._nvml.NVMLError, AttributeError):  # the kernel log has XIDs too
            events = self._nvml.nvmlEventSetCreate()
            self._nvml.nvmlDeviceRegisterEvents(handle, EVENT_XID, events)
            return events
        return None

    def present(self) -> tuple[str, ...]:
        """The PCI bus ids of all GPUs, also of hidden ones; "" for one that does not answer."""
        nvml, addresses = self._nvml, list[str]()
        with warn_if_silent():
            for index in range(_ask(nvml, "nvmlDeviceGetCount") or 0):
                addresses.append("")
                with suppress(Exception):
                    info = nvml.nvmlDeviceGetPciInfo(nvml.nvmlDeviceGetHandleByIndex(index))
                    addresses[-1] = str(text(info.busId))
        return tuple(addresses)

    def _p2p(self, nvml: Any, handle: Any) -> dict[str, list[int]]:
        return {
            name: [0 if peer is handle else nvml.nvmlDeviceGetP2PStatus(handle, peer, number) for peer in self._handles]
            for name, number in P2P.items()
        }


def read(driver: Nvml, index: int, facts: Iterable[str]) -> dict[str, Any]:
    return {fact: driver.ask(index, fact) for fact in facts}


@contextmanager
def of_gpu(gpu: Gpu) -> Iterator[Nvml]:
    """The driver, asked about this GPU alone, as a rank does. Raises NoGpus."""
    with session() as nvml:
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        except nvml.NVMLError as error:
            raise NoGpus(f"NVML does not find {gpu.identity}: {error}") from None
        yield Nvml(nvml, [handle])


CLOCK = "sm_clock_mhz"
READ, ENERGY = ("temperature_c", CLOCK, "power_watts"), "energy_joules"  # the fields of GpuState
REASONS = "clock_event_reasons"
INTERVAL_SECONDS = 0.1  # as often as a GPU measures its power anew


class Watch:
    """Reads temperature, SM clock, power and energy of a GPU in a thread while its `with` block runs. What NVML cannot
    read is left out; nothing that it does ends the work. None stands for a CPU rank."""

    def __init__(self, gpu: Gpu | None) -> None:
        self._read: list[tuple[float, dict[str, float]]] = []  # when, and what was read by its name
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(gpu,), name="gpufleet-watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(ANSWER_SECONDS)

    @property
    def medians(self) -> GpuState | None:
        """`state` without the spikes, of which a mean has its part: for what is a figure itself."""
        return self.state(of=median)

    @property
    def sm_clock_mhz(self) -> int:
        """As it was read last; 0 if it was not."""
        return int(next((read[CLOCK] for _, read in reversed(self._read) if CLOCK in read), 0))

    def held_by(self, reason: int) -> bool:
        """Whether a clock event reason was there half of the time or more, as far as NVML showed any."""
        seen = [int(read[REASONS]) & reason > 0 for _, read in self._read if REASONS in read]
        return 2 * sum(seen) >= len(seen) > 0

    def state(self, since: float = -math.inf, of: Callable[[list[float]], float] = fmean) -> GpuState | None:
        """The means of what was read from a moment of time.monotonic() on, and the energy; None if nothing was read."""
        read = [each for moment, each in self._read if moment >= since]
        values = {name: [each[name] for each in read if name in each] for name in (*READ, ENERGY)}
        energy = values.pop(ENERGY)
        states = {name: of(each) for name, each in values.items() if each}
        spent = {ENERGY: energy[-1] - energy[0]} if len(energy) > 1 else {}
        return GpuState(**states, **spent) if states else None

    def _run(self, gpu: Gpu | None) -> None:
        if gpu is None:
            return
        with suppress(NoGpus), session() as driver, suppress(driver.NVMLError):
            one, over = Nvml(driver, [driver.nvmlDeviceGetHandleByIndex(gpu.index)]), False
            while True:
                found = read(one, 0, (*READ, ENERGY, REASONS)).items()
                known = {name: float(value) for name, value in found if not isinstance(value, Missing)}
                # The means are of the block.
                here = {name: value for name, value in known.items() if name == ENERGY or not over}
                self._read.append((time.monotonic(), here))
                if over:
                    return
                over = self._over.wait(INTERVAL_SECONDS)


def in_thread(call: Callable[..., T], *args: Any) -> Future[T]:
    """The result of `call`, made in a daemon thread: Python's own pool would wait at exit for a GPU that hangs."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def read_all(driver: Nvml, facts: Sequence[str]) -> list[dict[str, Any]]:
    """Of all GPUs at the same time; Missing of one whose driver does not answer in time: it must not hang the run."""
    futures = [in_thread(read, driver, index, facts) for index in range(driver.count())]
    wait(futures, ANSWER_SECONDS)
    silent = dict.fromkeys(facts, Missing(f"no answer from the driver within {ANSWER_SECONDS:g} s"))
    return [future.result() if future.done() else silent for future in futures]


def chosen(nvml: Any, wanted: int | None, environment: Mapping[str, str]) -> tuple[Nvml, GpuTopology]:
    """The driver with the first `wanted` GPUs that are visible, in that order, and their topology. Raises NoGpus."""
    try:
        with warn_if_silent():
            visible, lost = _visible(nvml, environment.get("CUDA_VISIBLE_DEVICES"))
    except Exception as error:  # a version of nvidia-ml-py that does not fit the driver raises anything
        raise NoGpus(f"NVML could not list the GPUs: {error}", driver=True) from None
    if not visible:
        why = "the NVIDIA driver works but reports no GPU: see `lspci` and the kernel log for one that fell off the bus"
        if (count := nvml.nvmlDeviceGetCount()) and "CUDA_VISIBLE_DEVICES" in environment:
            given = environment["CUDA_VISIBLE_DEVICES"]
            why = f"CUDA_VISIBLE_DEVICES={given!r} hides all {count} GPUs of this machine"
        raise NoGpus("; ".join(lost) or why, driver=True)
    driver = Nvml(nvml, [handle for _, handle in visible[:wanted]])
    return driver, _topology(nvml, driver, visible[:wanted], lost)


def _visible(nvml: Any, visible: str | None) -> tuple[list[tuple[int, Any]], list[str]]:
    """(index, handle) in the order of CUDA, for which nothing after an invalid entry is visible; and who gives none."""
    everything, lost = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            everything.append((index, nvml.nvmlDeviceGetHandleByIndex(index)))
        except Exception as error:
            lost.append(f"GPU {index} does not answer: {error} (see the kernel log for its XID)")
    if visible is None:
        return everything, lost
    uuids = {index: _ask(nvml, "nvmlDeviceGetUUID", handle) or "" for index, handle in everything}
    chosen: list[tuple[int, Any]] = []
    for entry in map(str.strip, visible.split(",")):
        by_uuid = entry.startswith("GPU-")
        match = [one for one in everything if entry == str(one[0]) or (by_uuid and uuids[one[0]].startswith(entry))]
        if len(match) != 1 or match[0] in chosen:
            break
        chosen += match
    return chosen, lost


def _topology(nvml: Any, driver: Nvml, visible: Sequence[tuple[int, Any]], lost: Iterable[str]) -> GpuTopology:
    answers = in_thread(read_all, driver, (*CONSTANTS, PAIRED))
    versions = software()  # for which torch is imported: the driver answers meanwhile
    gpus = tuple(Gpu(index, known) for (index, _), known in zip(visible, answers.result(), strict=True))
    with warn_if_silent():
        links = _links(nvml, [handle for _, handle in visible], gpus)
    fabric = (
        "nvswitch" if any("switch" in (gpu.get("nvlink_remotes") or ()) for gpu in gpus)
        else "nvlink" if any(link.startswith("NV") for row in links for link in row)
        else "pcie" if len(gpus) > 1
        else "none"
    )  # fmt: skip
    version = _ask(nvml, "nvmlSystemGetDriverVersion")
    cuda_driver = _ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")
    cuda = f"{cuda_driver // 1000}.{cuda_driver % 1000 // 10}" if cuda_driver else None
    problems = (*lost, *driver_problems(version, cuda, versions["cuda"]))
    return GpuTopology(gpus, links, fabric, version, cuda, problems=problems, **versions)


def _links(nvml: Any, handles: list[Any], gpus: tuple[Gpu, ...]) -> tuple[tuple[str, ...], ...]:
    remotes = [gpu.get("nvlink_remotes") or [] for gpu in gpus]

    def link(i: int, j: int) -> str:
        through_switch = min(remotes[i].count("switch"), remotes[j].count("switch"))
        if count := remotes[i].count(gpus[j].pci_bus_id.lower()) + through_switch:
            return f"NV{count}"
        return PCIE_ANCESTORS.get(_ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", handles[i], handles[j]), "?")

    return tuple(tuple("X" if i == j else link(i, j) for j in range(len(gpus))) for i in range(len(gpus)))


def _ask(nvml: Any, name: str, *args: Any) -> Any:
    """What an NVML function gives; None where this device, driver or user does not get it, or the answer is broken."""
    with suppress(Exception):
        return text(getattr(nvml, name)(*args))
    return None

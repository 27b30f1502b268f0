"""How facts of the host are read: from programs (ipmitool, smartctl, fio), and from the small files of /sys; whether
this system is a virtual machine or a container, which shows less of its host, and what it leaves."""

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.place import Missing

# Words of other languages, decimal commas and colours are not for programs.
ENVIRONMENT = {"LC_ALL": "C", "TERM": "dumb"}
# The packages of Debian and Ubuntu (of NVIDIA's repository that of DCGM) that have these programs.
PACKAGES = {
    "ipmitool": "ipmitool", "smartctl": "smartmontools", "fio": "fio",
    "ib_write_bw": "perftest", "ib_write_lat": "perftest", "mlxlink": "mstflint", "mstlink": "mstflint",
    "dcgmi": "datacenter-gpu-manager-4-cuda-all", "lldpctl": "lldpd", "smpquery": "infiniband-diags",
}  # fmt: skip
# For a program that is to end: dcgmi waits 25 s until its host engine has ended a diagnostic (dcgmi/Diag.cpp).
LAST_SECONDS = 30
# For one that was killed: the kernel keeps it as long as it waits for a broken device, which may be for ever.
KILLED_SECONDS = 1.0
AS_ROOT = "run as root (sudo)"  # the remedy of what only root may read


class Absent(Exception):
    """This machine has no such thing, which is positively known: the text says from what."""


class Unreadable(Exception):
    """What this machine has, or may have, cannot be read: `why`, and by what `remedy` it could be."""

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(f"{why}: {remedy}" if remedy else why)
        self.why, self.remedy = why, remedy


class NoAnswer(Unreadable):
    """A program did not come to its end in time: what it asked hangs, or nobody knows whether it does."""


T = TypeVar("T", covariant=True)


@dataclass(frozen=True)
class HostFact(Generic[T]):
    """`kind`: the type that evidence is decoded to, which `read` returns, unless it raises Absent or Unreadable.
    `subject`: the part of the host that it is about ("bmc"); "" if no check depends on it alone. `on_request`: it takes
    a program of the system or long, so it is read when a check asks for it."""

    name: str
    kind: Any
    read: Callable[[], T]
    subject: str = ""
    on_request: bool = False

    def of(self, host: Mapping[str, Any]) -> T | Missing:
        value, name = host.get(self.name), self.name.replace("_", " ")
        if value is None:
            return Missing(f"this system has no {name} on record", absent=True)
        try:
            return value if isinstance(value, Missing) else codec.typed(value, self.kind)
        except ValueError as error:
            return Missing(f"the {name} on record cannot be read ({error})")


def output(*command: str, seconds: float = 20, statuses: tuple[int, ...] = (0,)) -> str:
    """What a program prints. Unreadable if it is not installed, ended with another status or not in time (NoAnswer)."""
    status, out, errors = ended(*command, seconds=seconds)
    if status not in statuses:
        said = (errors or out).strip().splitlines()
        raise Unreadable(f"{command[0]} failed with status {status}{f': {said[-1]}' if said else ''}")
    return out


def ended(*command: str, seconds: float = 20) -> tuple[int, str, str]:
    """Exit status, standard output and errors of a program. After these seconds, and whatever else ends the waiting, it
    is asked to end and then killed: what it has begun elsewhere it alone can take back. Raises Unreadable, NoAnswer."""
    name, pipe, around = command[0], subprocess.PIPE, {**os.environ, **ENVIRONMENT}
    try:
        process = subprocess.Popen(command, env=around, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    except FileNotFoundError:
        remedy = f"apt install {PACKAGES[name]}" if name in PACKAGES else ""
        raise Unreadable(f"{name} is not installed", remedy) from None
    except OSError as error:
        raise Unreadable(f"{name} cannot be started: {error.strerror}") from None
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{name} did not answer within {seconds:g} s") from None
    finally:
        end(process)
    return process.returncode, out.decode(errors="replace"), errors.decode(errors="replace")


def end(process: subprocess.Popen[bytes]) -> None:
    """Its own children may still hold the other ends of its pipes, which are not waited for."""
    for ask, patience in ((process.terminate, LAST_SECONDS), (process.kill, KILLED_SECONDS)):
        if process.poll() is None:
            ask()
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience)
    for pipe in filter(None, (process.stdout, process.stderr)):
        pipe.close()


def asked(names: Iterable[str], ask: Callable[[str], T], silent: Callable[[str, str], T]) -> list[T]:
    """What each part answers, and `silent` of name and reason where one cannot be asked. Unreadable if none can."""
    found, reasons = list[T](), list[Unreadable]()
    for name in names:
        try:
            found.append(ask(name))
        except Unreadable as why:
            reasons.append(why)
            found.append(silent(name, f"{name}: {why}"))
    if len(reasons) == len(found) > 0:
        raise reasons[0]
    return found


RunTool = Callable[..., str]  # as `output`, for what reads a part of the machine by programs
Ended = Callable[..., tuple[int, str, str]]  # as `ended`
PCI_STEP = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")  # a device, or a port or switch on its way
LANES = (1, 2, 4, 8, 12, 16, 32)  # of a PCIe link that is not there the register says 0, or 255


def text(path: Path) -> str | None:
    """Without the blanks around it; None if there is no such file, nobody may read it, or it is empty."""
    with suppress(OSError):
        return path.read_text(errors="replace").strip() or None
    return None


def texts(folder: Path, **files: str) -> dict[str, Any]:
    """The texts of these files of a folder, by the names that they are given."""
    return {name: text(folder / file) for name, file in files.items()}


def lanes(path: Path) -> float | None:
    found = number(path)
    return found if found in LANES else None


def listed(numbers: str | None) -> set[int]:
    """What the kernel writes as "0-3,8" """
    ranges = [each.partition("-") for each in (numbers or "").split(",") if each]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def whole(path: Path) -> int | None:
    """The whole number that a file begins with; None if it begins with none."""
    found = number(path)
    return None if found is None else int(found)


def number(path: Path) -> float | None:
    """The number that a file begins with: of "16" or "32.0 GT/s PCIe". None if it begins with none."""
    found = re.match(r"-?\d+(\.\d+)?", text(path) or "")
    return float(found[0]) if found else None


# Of product and makers in DMI those of virtual machines (systemd, src/basic/virt.c, dmi_vendor_table), which matter
# where /proc/cpuinfo has no flags, as on Arm. A product "p5.metal" of Amazon EC2 is a machine.
VIRTUAL = (
    "KVM", "OpenStack", "KubeVirt", "Amazon EC2", "QEMU", "VMware", "VMW", "innotek GmbH", "VirtualBox", "Xen", "Bochs",
    "Parallels", "BHYVE", "Hyper-V", "Virtual Machine", "Apple Virtualization", "Google Compute Engine",
)  # fmt: skip
DMI = Path("sys/class/dmi/id")
# What Docker, Podman and systemd write into containers, and the cgroups that older engines show inside of them.
MARKS = (".dockerenv", "run/.containerenv", "run/systemd/container")
CGROUPS = re.compile(r"docker|kubepods|containerd|libpod|/lxc")
INITS = ("systemd", "init", "runit", "openrc-init", "dinit", "finit")  # what has process number 1 outside of containers


def is_virtual(root: Path = Path("/")) -> bool:
    """Every server has DMI: a system without it that is no container is one of Firecracker or gVisor."""
    if re.search(r"^flags\s*:.*\bhypervisor\b", text(root / "proc/cpuinfo") or "", re.MULTILINE):
        return True
    if not (root / DMI).exists():
        return not in_container(root)
    made = [text(root / DMI / name) or "" for name in ("sys_vendor", "product_name", "board_vendor")]
    return any(each.startswith(VIRTUAL) for each in made) and not made[1].endswith("metal")


def in_container(root: Path = Path("/")) -> bool:
    first, grouped = text(root / "proc/1/comm"), CGROUPS.search(text(root / "proc/1/cgroup") or "")
    return any((root / mark).exists() for mark in MARKS) or grouped is not None or first not in (None, *INITS)


def hides_host() -> Unreadable:
    remedy = "run on the host, or start the container with --privileged -v /dev:/dev -v /sys:/sys"
    return Unreadable("this container hides the host", remedy)


def unreadable_here(root: Path, why: str, remedy: str = AS_ROOT) -> Unreadable:
    """Also to root of a container, whose engine masks /sys/firmware (moby, oci/defaults.go, MaskedPaths)."""
    hidden = in_container(root) and not any((root / "sys/firmware").glob("*"))
    return hides_host() if hidden else Unreadable(why, remedy)


def why_missing(root: Path, virtual: str, why: str, remedy: str = "") -> Absent | Unreadable:
    """Why what every server has is not to be seen: `virtual`, or hidden by a container; else `why`."""
    return Absent(virtual) if is_virtual(root) else unreadable_here(root, why, remedy)


def since(then: int, now: int) -> int:
    """What a counter has counted. One that began anew, as after a reset, has counted what it shows."""
    return now - then if now >= then else now


def grown(before: Mapping[str, int | None], now: Mapping[str, int | None]) -> dict[str, int]:
    """Of counters that could be read both times."""
    both = ((name, then, now.get(name)) for name, then in before.items())
    return {name: since(then, count) for name, then, count in both if then is not None and count is not None}


CGROUP = Path("/sys/fs/cgroup")
CAP_IPC_LOCK = 14  # linux/capability.h


def short_of(processors: int, memory: int) -> str:
    """What the container does not leave for this many busy processors and bytes; "" if it does, or nobody knows."""
    with suppress(OSError, ValueError):
        quota, period = (CGROUP / "cpu.max").read_text().split()
        if quota != "max" and int(quota) < processors * int(period):
            return f"the container has the time of {int(quota) / int(period):g} processors, and {processors} to run on"
    with suppress(OSError, ValueError):
        left = int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text())
        # What the kernel caches of files it gives away as soon as somebody needs memory.
        statistics = (CGROUP / "memory.stat").read_text()
        left += sum(map(int, re.findall(r"^(?:in)?active_file (\d+)$", statistics, re.MULTILINE)))
        if left < memory:
            return f"the container has {left / 1e9:.3g} GB of memory left, of {memory / 1e9:.3g} GB that are needed"
    return ""


Limit = int | str  # "unlimited"


def _limits(which: int) -> list[Limit]:
    return ["unlimited" if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(which)]


def _locked_memory() -> Limit:
    """It does not bind a process with CAP_IPC_LOCK, as root on bare metal has it."""
    capabilities = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    free = capabilities and int(capabilities[1], 16) >> CAP_IPC_LOCK & 1
    return "unlimited" if free else _limits(resource.RLIMIT_MEMLOCK)[0]


SHARED_MEMORY = HostFact("shared_memory_bytes", int, lambda: shutil.disk_usage("/dev/shm").total, subject="limits")
LOCKED_MEMORY = HostFact("locked_memory_limit", Limit, _locked_memory, subject="limits")
OPEN_FILES = HostFact("open_files_limit", Limit, lambda: _limits(resource.RLIMIT_NOFILE)[0])
MOST_OPEN_FILES = HostFact("open_files_hard_limit", Limit, lambda: _limits(resource.RLIMIT_NOFILE)[1], subject="limits")

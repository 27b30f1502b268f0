"""Whether this system is a machine, a virtual machine or a container, and what the limits of a container leave."""

import os
import re
import resource
from contextlib import suppress
from pathlib import Path

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.tools import Absent, HostFact, Unreadable

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
    """Whether a hypervisor is below. Every server has DMI: a system without it that is no container is one of
    Firecracker or gVisor."""
    if re.search(r"^flags\s*:.*\bhypervisor\b", tools.text(root / "proc/cpuinfo") or "", re.MULTILINE):
        return True
    if not (root / DMI).exists():
        return not in_container(root)
    made = [tools.text(root / DMI / name) or "" for name in ("sys_vendor", "product_name", "board_vendor")]
    return any(each.startswith(VIRTUAL) for each in made) and not made[1].endswith("metal")


def in_container(root: Path = Path("/")) -> bool:
    first = tools.text(root / "proc/1/comm")
    return (
        any((root / mark).exists() for mark in MARKS)
        or CGROUPS.search(tools.text(root / "proc/1/cgroup") or "") is not None
        or (first is not None and first not in INITS)
    )


def hides(root: Path) -> bool:
    """Whether this is a container that does not show its host: engines mask /sys/firmware of all but privileged ones
    (moby, oci/defaults.go, MaskedPaths)."""
    return in_container(root) and not any((root / "sys/firmware").glob("*"))


def hides_host() -> Unreadable:
    return Unreadable(
        "this container hides the host",
        "run on the host, or start the container with --privileged -v /dev:/dev -v /sys:/sys",
    )


def unreadable_here(root: Path, why: str, remedy: str = tools.AS_ROOT) -> Unreadable:
    """Also what only root may read: root of a container may not."""
    return hides_host() if hides(root) else Unreadable(why, remedy)


def why_missing(root: Path, virtual: str, why: str, remedy: str = "") -> Absent | Unreadable:
    """Why what every server has is not to be seen: a virtual machine has none (`virtual`), or this is a container; else
    `why`, with its remedy."""
    return Absent(virtual) if is_virtual(root) else unreadable_here(root, why, remedy)


CGROUP = Path("/sys/fs/cgroup")
CAP_IPC_LOCK = 14  # linux/capability.h


def short_of(processors: int, memory: int) -> str:
    """What the container does not leave a process that uses so many processors and so many bytes of memory all the
    time; "" if it does, or nobody knows."""
    with suppress(OSError, ValueError):
        quota, period = (CGROUP / "cpu.max").read_text().split()
        if quota != "max" and int(quota) < processors * int(period):
            return f"the container has the time of {int(quota) / int(period):g} processors, and {processors} to run on"
    with suppress(OSError, ValueError):
        left = int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text())
        if left < memory:
            return f"the container has {left / 1e9:.3g} GB of memory left, of {memory / 1e9:.3g} GB that are needed"
    return ""


Limit = int | str  # "unlimited"


def _memory_limit() -> Limit:
    limit = (CGROUP / "memory.max").read_text().strip()
    return "unlimited" if limit == "max" else int(limit)


def _limits(which: int) -> list[Limit]:
    """The soft and the hard one."""
    return ["unlimited" if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(which)]


def _locked_memory() -> Limit:
    """The limit of RLIMIT_MEMLOCK, which does not bind a process with CAP_IPC_LOCK, as root on bare metal has it."""
    capabilities = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    free = capabilities and int(capabilities[1], 16) >> CAP_IPC_LOCK & 1
    return "unlimited" if free else _limits(resource.RLIMIT_MEMLOCK)[0]


def _shared_memory() -> int:
    state = os.statvfs("/dev/shm")
    return state.f_blocks * state.f_frsize


MEMORY_LIMIT = HostFact("container_memory_limit", Limit, _memory_limit)
SHARED_MEMORY = HostFact("shared_memory_bytes", int, _shared_memory, subject="limits")
LOCKED_MEMORY = HostFact("locked_memory_limit", Limit, _locked_memory, subject="limits")
OPEN_FILES = HostFact("open_files_limit", Limit, lambda: _limits(resource.RLIMIT_NOFILE)[0])
MOST_OPEN_FILES = HostFact("open_files_hard_limit", Limit, lambda: _limits(resource.RLIMIT_NOFILE)[1], subject="limits")

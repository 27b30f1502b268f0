"""GPUs, network adapters and NVMe drives as PCIe devices, every port between them and the root, and their links. No
driver or device is asked, but for the state of its link: the kernel has its counts in memory. Those of InfiniBand ports
are another matter: on HGX B200 their driver logs an error for each that it may not read (leptonai/gpud, issue 1164)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.tools import HostFact
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import THIS_NODE, Gpu, Where, grouped

# Where the kernel lists them, what they are, and from where the name is: the first that lists a device says what it is.
KINDS = (
    ("sys/bus/pci/drivers/nvidia/*:*", "gpu"),
    ("sys/class/infiniband/*/device", "adapter"),
    ("sys/class/net/*/device", "network"),
    ("sys/class/nvme/*/device", "nvme"),
)
# Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats: a line each, its name may have blanks.
ERRORS = {"corrected": "aer_dev_correctable", "nonfatal": "aer_dev_nonfatal", "fatal": "aer_dev_fatal"}
TOTAL = "TOTAL_"  # of messages, several errors may have come in one

GENERATIONS = {8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # by GT/s
# PCIe replays a minute and lane that are still healthy, by generation (DCGM): one wrong bit in 10^12.
REPLAYS = {3: 0.48, 4: 0.96, 5: 1.92, 6: 1.92}
# Corrected errors that are no sign of a bad link, as drivers/pci/pcie/aer.c calls them today, and as it did when it
# began to count them (4.19): requests that the device does not know, and errors inside it.
NO_LINK_ERRORS = (
    "NonFatalErr", "CorrIntErr", "HeaderOF",
    "Advisory Non-Fatal", "Corrected Internal Error", "Header Log Overflow",
)  # fmt: skip
# What is inside a switch looks like a link of 5 GT/s above an H100 of 32 (NVIDIA/nccl, issue 1866), and is none.
INSIDE = 5.0
# Requests to what is not there, as a system makes them while it looks at boot for what is (the kernel log's row of
# nonfatal errors does not condemn by what was logged then either). Their names as above.
OF_PROBING = ("UnsupReq", "Unsupported Request")
PASSED_ON = (1, 2)  # nvml.h, nvmlGpuVirtualizationMode_t: PASSTHROUGH, VGPU
# Network interfaces go where their container goes, and are no longer to be seen here.
MAY_LEAVE = ("port", "network")


class Device(msgspec.Struct, frozen=True):
    """`kind`: "gpu", "adapter" (InfiniBand or RoCE), "network", "nvme" or "port". `name`: "mlx5_0", of a GPU or port
    its address. `above`: the port above it, None at the root. Lanes and speed (GT/s), as it runs and can, are those of
    the link that leads to it, of a port below which a link begins of that one. `iommu`: how addresses are translated
    ("identity": not; "DMA", "DMA-FQ"), None without one. `errors`: since boot, by kind and name; None where nobody
    collects them: its root port sends no interrupts to the kernel, and none were ever counted."""

    kind: str = "port"
    name: str = ""
    above: str | None = None
    numa_node: float | None = None
    lanes: float | None = None
    lanes_able: float | None = None
    speed: float | None = None
    speed_able: float | None = None
    iommu: str | None = None
    errors: Mapping[str, Mapping[str, int]] | None = None


Devices = Mapping[str, Device]  # by address ("0000:18:00.0"), a port before what is below it


def read(root: Path = Path("/")) -> dict[str, Device]:
    """Empty where there are no such devices."""
    collecting = {path.name.rpartition(":")[0] for path in (root / "sys/bus/pci_express/drivers/aer").glob("*:*")}
    devices, ends = dict[str, Device](), endpoints(root)
    for device in ends:
        folders = [each for each in reversed((device, *device.parents)) if tools.PCI_STEP.fullmatch(each.name)]
        for above, folder in zip((None, *folders), folders, strict=False):
            if folder.name in devices:
                continue
            kind, name = ends.get(folder, ("port", folder.name))
            counts = {what: _counts(folder / file) for what, file in ERRORS.items()}
            known = {what: each for what, each in counts.items() if each is not None}
            devices[folder.name] = Device(
                kind=kind,
                name=name,
                above=above.name if above else None,
                numa_node=tools.number(folder / "numa_node"),
                lanes=tools.lanes(folder / "current_link_width"),
                lanes_able=tools.lanes(folder / "max_link_width"),
                speed=tools.number(folder / "current_link_speed"),
                speed_able=tools.number(folder / "max_link_speed"),
                iommu=tools.text(folder / "iommu_group/type"),
                errors=known if known and (folders[0].name in collecting or any(known.values())) else None,
            )
    return devices


def endpoints(root: Path) -> dict[Path, tuple[str, str]]:
    """What they are and their names, by where the kernel has them. The network interface of an RDMA adapter is that."""
    found: dict[Path, tuple[str, str]] = {}
    for pattern, kind in KINDS:
        for link in sorted(root.glob(pattern)):
            if tools.PCI_STEP.fullmatch((device := link.resolve()).name):
                found.setdefault(device, (kind, device.name if kind == "gpu" else link.parent.name))
    return found


def _counts(path: Path) -> dict[str, int] | None:
    if (text := tools.text(path)) is None:
        return None
    lines = (line.rsplit(None, 1) for line in text.splitlines())
    counts = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
    return {name: count for name, count in counts.items() if count and not name.startswith(TOTAL)}


PCI_DEVICES = HostFact("pci_devices", dict[str, Device], read, subject="pcie")


class Link(NamedTuple):
    """From a port to the first function of what it leads to. `runs`: lanes and GT/s, 0 for what neither end shows;
    `able`: what both ends can, 0 for what one does not show. `ends`: the port, and all functions of the other end."""

    upper: str
    lower: str
    kind: str
    runs: tuple[float, float]
    able: tuple[float, float]
    ends: tuple[str, ...]


def links(devices: Devices) -> list[Link]:
    """On the way from the root a link begins at every second step, counted from its end: a switch has two sides."""
    found: dict[str, str] = {}
    for address, device in devices.items():
        if device.kind != "port":
            way = [*ports_above(devices, address), address]
            for at in range(len(way) % 2, len(way), 2):
                found.setdefault(way[at], way[at + 1])
    described = []
    for upper, lower in found.items():
        one, other = devices[upper], devices[lower]
        runs = other.lanes or one.lanes or 0.0, other.speed or one.speed or 0.0
        able = min(one.lanes_able or 0.0, other.lanes_able or 0.0), min(one.speed_able or 0.0, other.speed_able or 0.0)
        below = (address for address, device in devices.items() if device.above == upper)
        described.append(Link(upper, lower, other.kind, runs, able, (upper, *below)))
    return described


def ports_above(devices: Devices, address: str) -> list[str]:
    above = devices[address].above
    return [] if above is None or above not in devices else [*ports_above(devices, above), above]


def shared_port(devices: Devices, one: str, other: str) -> str | None:
    """The last port above both devices: that of the switch that they have in common. None if they have none."""
    of_other = set(ports_above(devices, other))
    return next((port for port in reversed(ports_above(devices, one)) if port in of_other), None)


def in_virtual_machine(gpus: Iterable[Gpu]) -> bool:
    """Whether a hypervisor passes these GPUs on: it shows the PCIe tree that it likes."""
    return any(gpu.get("virtualization") in PASSED_ON for gpu in gpus)


def gpus_by_address(gpus: Iterable[Gpu]) -> dict[str, Gpu]:
    """As /sys has them: NVML writes a domain with eight digits."""
    parts = ((gpu, str(gpu.get("pci_bus_id") or "").lower().partition(":")) for gpu in gpus)
    return {f"{int(domain, 16):04x}:{rest}": gpu for gpu, (domain, _, rest) in parts if domain}


def reduced_links(devices: Devices, gpus: Sequence[Gpu]) -> Iterator[Fault]:
    """Links between ports that run with less than both ends can, and those of NVMe drives with less than others like
    them. Those of GPUs and adapters are judged elsewhere: they may rest at a lower speed."""
    judged = judged_links(devices)
    for link in judged:
        runs, wanted = link.runs, link.able
        if link.kind == "nvme":
            alike = [each.runs for each in judged if each.kind == "nvme" and each.able == link.able]
            wanted = max(lanes for lanes, _ in alike), max(speed for _, speed in alike)
        if 0 < runs[0] < wanted[0] or 0 < runs[1] < wanted[1]:
            what = f"it runs at {runs[1]:g} GT/s on {runs[0]:g} lanes, and can {wanted[1]:g} GT/s on {wanted[0]:g}"
            yield _fault("pcie_path_reduced", devices, gpus, link, what)


def judged_links(devices: Devices) -> list[Link]:
    """Those between ports, and those of NVMe drives."""
    return [each for each in links(devices) if each.kind == "nvme" or (each.kind == "port" and each.able[1] > INSIDE)]


def counts_errors(devices: Devices) -> bool:
    return any(device.errors is not None for device in devices.values())


def uncorrected_errors(devices: Devices, gpus: Sequence[Gpu]) -> list[Fault]:
    """Links with errors since boot that could not be corrected, but for what probing gives."""
    return _uncorrected({}, devices, gpus, "since the machine was started", OF_PROBING)


def path_errors(before: Devices, now: Devices, gpus: Sequence[Gpu], seconds: float) -> Iterator[Fault]:
    """Links with uncorrected errors between two readings, or more corrected ones of one name than a healthy link has,
    and devices that are gone. DCGM's rates of replays are one wrong bit in 10^12, as the PCIe specification allows."""
    lost = [address for address, each in before.items() if each.kind not in MAY_LEAVE and address not in now]
    ways = {port for address in lost for port in (*ports_above(before, address), address)}
    gone = [link for link in links(before) if link.lower in ways and link.lower not in now]
    yield from (_fault("pcie_uncorrected", before, gpus, link, f"{link.lower} is gone") for link in gone)
    yield from _uncorrected(before, now, gpus, f"in {seconds:.0f} s")
    for link in links(now):
        rate = REPLAYS.get(GENERATIONS.get(link.able[1], 0), min(REPLAYS.values()))
        allowed = rate * (link.runs[0] or 1) * max(seconds / 60, 1.0)
        for end, name, count in _grown(before, now, link, "corrected"):
            if count > allowed and name not in NO_LINK_ERRORS:
                what = f"{end} counted {count} {name} in {seconds:.0f} s, a healthy link has at most {allowed:.0f}"
                yield _fault("pcie_corrected", now, gpus, link, what)


def _uncorrected(
    before: Devices, now: Devices, gpus: Sequence[Gpu], when: str, healthy: Sequence[str] = ()
) -> list[Fault]:
    """Ports above what is broken see that answers stay away, and count that too: only the deepest link is named.
    `healthy`: names of nonfatal errors that a healthy machine has too."""
    counted = grouped(
        (link, f"{end} counted {count} {kind} {name} {when}")
        for link in links(now)
        for kind in ("nonfatal", "fatal")
        for end, name, count in _grown(before, now, link, kind)
        if kind == "fatal" or name not in healthy
    )
    deeper = {port for link in counted for port in ports_above(now, link.upper)}
    named = ((link, "; ".join(errors)) for link, errors in counted.items() if link.lower not in deeper)
    return [_fault("pcie_uncorrected", now, gpus, link, what) for link, what in named]


def _grown(before: Devices, now: Devices, link: Link, kind: str) -> Iterator[tuple[str, str, int]]:
    for end in link.ends:
        earlier, counted = ((of.get(end, Device()).errors or {}).get(kind, {}) for of in (before, now))
        grown = tools.grown({**dict.fromkeys(counted, 0), **earlier}, counted)
        yield from ((end, name, more) for name, more in grown.items() if more)


def _fault(code: str, devices: Devices, gpus: Sequence[Gpu], link: Link, what: str) -> Fault:
    known = gpus_by_address(gpus)
    below = [address for address in devices if link.upper in ports_above(devices, address)]
    there = [known[address].place for address in below if address in known]
    ends = (address for address in below if address in known or devices[address].kind != "port")
    leads = ", ".join(f"GPU {known[end].index}" if end in known else devices[end].name for end in ends)
    subject: Where = there[0] if len(there) == 1 else THIS_NODE
    return Fault(code, (subject,), f"link from {link.upper} to {link.lower} (it leads to {leads}): {what}")

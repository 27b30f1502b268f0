"""What counts as healthy of the PCIe links between GPUs, network adapters, NVMe drives and the root."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.place import THIS_NODE, Where
from pytest_gpufleet.verdict.link_rules import REPLAYS

Device = Mapping[str, Any]
Devices = Mapping[str, Device]  # by address, as machine/pci_devices.py reads them

GENERATIONS = {8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # by GT/s
# Corrected errors that are no sign of a bad link, as drivers/pci/pcie/aer.c calls them today, and as it did when it
# began to count them (4.19): requests that the device does not know, and errors inside it.
NO_LINK_ERRORS = (
    "NonFatalErr", "CorrIntErr", "HeaderOF",
    "Advisory Non-Fatal", "Corrected Internal Error", "Header Log Overflow",
)  # fmt: skip
# What is inside a switch looks like a link of 5 GT/s above an H100 of 32 (NVIDIA/nccl, issue 1866), and is none.
INSIDE = 5.0
UNCORRECTED = ("nonfatal", "fatal")
# Requests to what is not there, as a system makes them while it looks at boot for what is (the kernel log's row of
# nonfatal errors does not condemn by what was logged then either). Their names as above.
OF_PROBING = ("UnsupReq", "Unsupported Request")
# Network interfaces go where their container goes, and are no longer to be seen here.
MAY_LEAVE = ("port", "network")


@dataclass(frozen=True)
class Link:
    """From a port to what it leads to, by their addresses: of a device with several functions the first."""

    upper: str
    lower: str


def links(devices: Devices) -> list[Link]:
    """Every link between these devices. On the way from the root a link begins at every second step: what is between
    are the two sides of a switch, so it is counted from the device that the way ends at."""
    found: dict[str, Link] = {}
    for address, device in devices.items():
        if device["kind"] != "port":
            way = [*_above(devices, address), address]
            for at in range(len(way) % 2, len(way), 2):
                found.setdefault(way[at], Link(way[at], way[at + 1]))
    return list(found.values())


def _ends(devices: Devices, link: Link) -> list[str]:
    """The port, and all functions of what it leads to."""
    return [link.upper, *(address for address, device in devices.items() if device["above"] == link.upper)]


def _above(devices: Devices, address: str) -> list[str]:
    """The ports above a device, from the root."""
    above = devices[address]["above"]
    return [] if above is None or above not in devices else [*_above(devices, above), above]


def shared_port(devices: Devices, one: str, other: str) -> str | None:
    """The last port above both devices: that of the switch that they have in common. None if they have none."""
    of_other = set(_above(devices, other))
    return next((port for port in reversed(_above(devices, one)) if port in of_other), None)


def below(devices: Devices, port: str, address: str) -> str | None:
    """The port by which a device is connected to the switch that begins with `port`."""
    return next((each for each in _above(devices, address) if devices[each]["above"] == port), None)


def reduced_links(devices: Devices, gpus: Sequence[Gpu]) -> list[Fault]:
    """Links between ports that run with fewer lanes or slower than both their ends can, and those of NVMe drives that
    do so where others of their kind run with more: if none does, the machine was built so. Links that end at a GPU or a
    network adapter are judged elsewhere: theirs may rest at a lower speed."""
    faults = []
    for link in _judged(devices):
        runs, wanted = _runs(devices, link), _wanted(devices, link)
        if any(0 < now < full for now, full in zip(runs, wanted, strict=True)):
            what = f"it runs at {runs[1]:g} GT/s on {runs[0]:g} lanes, and can {wanted[1]:g} GT/s on {wanted[0]:g}"
            faults.append(_fault("pcie_path_reduced", devices, gpus, link, what))
    return faults


def tells_links(devices: Devices) -> bool:
    """Whether there is a link that `reduced_links` can judge."""
    return any(_runs(devices, link)[0] for link in _judged(devices))


def _judged(devices: Devices) -> list[Link]:
    ends = ((link, devices[link.lower]["kind"]) for link in links(devices))
    return [link for link, kind in ends if kind == "nvme" or (kind == "port" and _able(devices, link)[1] > INSIDE)]


def _runs(devices: Devices, link: Link) -> tuple[float, float]:
    """Lanes and GT/s; 0 for what neither end tells."""
    upper, lower = devices[link.upper], devices[link.lower]
    return lower["lanes"] or upper["lanes"] or 0.0, lower["speed"] or upper["speed"] or 0.0


def _able(devices: Devices, link: Link) -> tuple[float, float]:
    """The lanes and GT/s that both ends can; 0 for what one of them does not tell."""
    ends = devices[link.upper], devices[link.lower]
    return min(end["lanes_able"] or 0.0 for end in ends), min(end["speed_able"] or 0.0 for end in ends)


def _wanted(devices: Devices, link: Link) -> tuple[float, float]:
    able = _able(devices, link)
    if devices[link.lower]["kind"] == "port":
        return able
    alike = [each for each in links(devices) if devices[each.lower]["kind"] == "nvme" and _able(devices, each) == able]
    lanes, speeds = zip(*(_runs(devices, each) for each in alike), strict=True)
    return max(lanes), max(speeds)


def counts_errors(devices: Devices) -> bool:
    return any(device["errors"] is not None for device in devices.values())


def uncorrected_errors(devices: Devices, gpus: Sequence[Gpu]) -> list[Fault]:
    """Links with errors since boot that could not be corrected, but for what probing gives."""
    started: dict[str, Device] = {}  # with those errors alone that a healthy machine has when it has started
    for address, device in devices.items():
        nonfatal = (device["errors"] or {}).get("nonfatal", {})
        started[address] = {"errors": {"nonfatal": {name: nonfatal[name] for name in OF_PROBING if name in nonfatal}}}
    return _uncorrected(started, devices, gpus, "since the machine was started")


def path_errors(before: Devices, now: Devices, gpus: Sequence[Gpu], seconds: float) -> list[Fault]:
    """Links with errors between two readings so many seconds apart: any that could not be corrected, more corrected
    ones than a healthy link has, and devices that are gone."""
    lost = [address for address, each in before.items() if each["kind"] not in MAY_LEAVE and address not in now]
    ways = {port for address in lost for port in (*_above(before, address), address)}
    gone = [
        _fault("pcie_uncorrected", before, gpus, link, f"{link.lower} is gone")
        for link in links(before)
        if link.lower in ways and link.lower not in now
    ]
    return [*gone, *_uncorrected(before, now, gpus, f"in {seconds:.0f} s"), *_corrected(before, now, gpus, seconds)]


def _uncorrected(before: Devices, now: Devices, gpus: Sequence[Gpu], when: str) -> list[Fault]:
    """Ports above what is broken see that answers stay away, and count that too: only the deepest link is named."""
    counted = grouped(
        (link, f"{end} counted {count} {kind} {name} {when}")
        for link in links(now)
        for end in _ends(now, link)
        for kind in UNCORRECTED
        for name, count in _grown(before, now, end, kind).items()
    )
    deeper = {port for link in counted for port in _above(now, link.upper)}
    return [
        _fault("pcie_uncorrected", now, gpus, link, "; ".join(told))
        for link, told in counted.items()
        if link.lower not in deeper
    ]


def _corrected(before: Devices, now: Devices, gpus: Sequence[Gpu], seconds: float) -> Iterator[Fault]:
    """DCGM's rates of replays are one wrong bit in 10^12, what the PCIe specification allows a link: 32 GT/s are 1.92 a
    minute and lane. Each error counted here is a wrong bit too, and a healthy link may have so many of one name."""
    for link in links(now):
        generation = GENERATIONS.get(_able(now, link)[1])
        rate = min(REPLAYS.values()) if generation is None else REPLAYS[generation]
        allowed = rate * (_runs(now, link)[0] or 1) * max(seconds / 60, 1.0)
        for end in _ends(now, link):
            for name, count in _grown(before, now, end, "corrected").items():
                if count > allowed and name not in NO_LINK_ERRORS:
                    told = f"{end} counted {count} {name} in {seconds:.0f} s, a healthy link has at most {allowed:.0f}"
                    yield _fault("pcie_corrected", now, gpus, link, told)


def _grown(before: Devices, now: Devices, address: str, kind: str) -> dict[str, int]:
    """What was counted between, by name. Counters that begin again, as those of a device that was taken out and put
    back, have counted what they show."""
    counts = (now[address]["errors"] or {}).get(kind, {})
    earlier = ((before.get(address) or {}).get("errors") or {}).get(kind, {})
    grown = {name: count - earlier.get(name, 0) for name, count in counts.items()}
    return {name: counts[name] if more < 0 else more for name, more in grown.items() if more}


def _fault(code: str, devices: Devices, gpus: Sequence[Gpu], link: Link, what: str) -> Fault:
    behind = [address for address in devices if link.upper in _above(devices, address)]
    known = gpus_by_address(gpus)
    there = [known[address].place for address in behind if address in known]
    leads = ", ".join(
        f"GPU {known[address].index}" if address in known else str(devices[address]["name"])
        for address in behind
        if devices[address]["kind"] != "port"
    )
    subject: Where = there[0] if len(there) == 1 else THIS_NODE
    return Fault(code, (subject,), f"link from {link.upper} to {link.lower} (it leads to {leads}): {what}")


def gpus_by_address(gpus: Iterable[Gpu]) -> dict[str, Gpu]:
    """As /sys has them: NVML writes a domain with eight digits."""
    told = ((gpu, str(gpu.get("pci_bus_id") or "").lower().partition(":")) for gpu in gpus)
    return {f"{int(domain, 16):04x}:{rest}": gpu for gpu, (domain, _, rest) in told if domain}

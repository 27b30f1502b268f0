"""Reads the kernel log: XIDs and SXids, and what it says of the host. model/log_catalogue.py says what these are."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pytest_gpufleet.machine import tools
from pytest_gpufleet.model.log_catalogue import BDF, Gathered, HostMessage, Logged, Sxid, Xid, of_group, recognised

# Older drivers leave "PCI:" out; of a GPU in MIG mode the instance follows the address. Whole addresses only: see
# model/log_catalogue.py for what else stands at the beginning of lines.
_PCI = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2})?(?:\.[0-7])?"
_LINE = re.compile(rf"NVRM: Xid \((?:PCI:)?({_PCI})(?: [^)]*)?\): (\d+)(?:, (.*))?")
# Two more lines with the same number follow, one with "Severity" and one with "Data" in this place: they judge nothing.
_SXID_LINE = re.compile(rf"(nvidia-nvswitch\d+): SXid \(PCI:({_PCI})\): (\d+), (Fatal|Non-fatal), (.*)")
# A record of /dev/kmsg (Documentation/ABI/testing/dev-kmsg): priority, number, microseconds since boot, flags, text.
_RECORD = re.compile(r"(\d+),\d+,(\d+),[^;]*;")
FACILITIES = 8  # a priority below it is the kernel's: it gives a line that a program writes there another facility
DEVICES = Path("/sys/bus/pci/devices")


def parse(text: str) -> list[Xid]:
    """The XIDs and SXids in lines of a kernel log."""
    found: list[Xid] = []
    for _, line in _of_the_kernel(text):
        if xid := _LINE.match(line):
            found.append(Xid(xid[1], int(xid[2]), xid[3] or ""))
        elif sxid := _SXID_LINE.match(line):
            found.append(Sxid(sxid[2], int(sxid[3]), sxid[5], sxid[1], sxid[4]))
    return found


def of_the_host(text: str, own_group: str = "/") -> Iterable[HostMessage]:
    """What lines of a kernel log say of the host."""
    for seconds, line in _of_the_kernel(text):
        if message := recognised(line, seconds):
            yield of_group(message, own_group)


def _of_the_kernel(text: str) -> Iterator[tuple[float | None, str]]:
    """The lines of a kernel log, each with its seconds since boot, without those that programs have written there: a
    daemon that puts messages of before into it again has seen no error of now."""
    for line in text.splitlines():
        record = _RECORD.match(line)
        if record is None:
            yield None, line
        elif int(record[1]) < FACILITIES:
            yield int(record[2]) / 1e6, line[record.end() :]


def behind(message: HostMessage, pci_bus_ids: Sequence[str], devices: Path = DEVICES) -> HostMessage:
    """The message, with the GPUs that it is about: those that are its device, by whatever function, and those whose way
    over PCIe leads over it."""
    named = re.search(BDF, message.device)
    if named is None:
        return message
    ways = {gpu: _way(gpu, devices) for gpu in pci_bus_ids}
    return replace(
        message,
        gpus=tuple(
            gpu
            for gpu, way in ways.items()
            if named[0] in way or named[0].partition(".")[0] == way[-1].partition(".")[0]
        ),
    )


def _way(pci_bus_id: str, devices: Path) -> tuple[str, ...]:
    """The PCI addresses of the ports above a GPU, from the root on, and its own."""
    domain, _, rest = pci_bus_id.lower().partition(":")
    device = devices / f"{domain[-4:]}:{rest}"
    return (*device.resolve().parts, device.name)


class KernelLog:
    """The kernel's log from its beginning; `new()` gives what it has told since the last time."""

    def __init__(self, path: str = "/dev/kmsg", groups: Path = Path("/proc/self/cgroup")) -> None:
        self._trouble = ""
        self._file: int | None = None
        self._group = _own_group(groups)
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            self._trouble = f"the kernel log {path} cannot be read: {error.strerror}"

    def new(self) -> Logged:
        found: list[Xid] = []
        host = Gathered()
        unread, rest = "", ""
        while self._file is not None:
            try:
                record = os.read(self._file, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:
                unread = "the kernel wrote over lines of its log that had not been read yet"
                continue
            except OSError as error:
                self._trouble = unread = f"the kernel log cannot be read: {error.strerror}"
                break
            if not record:
                break
            # A file, unlike /dev/kmsg, may be read up to the middle of a line.
            text, newline, rest = (rest + record.decode(errors="replace")).rpartition("\n")
            found += parse(text)
            host.take(of_the_host(text + newline, self._group))
        found += parse(rest)
        host.take(of_the_host(rest, self._group))
        return Logged(tuple(found), self._trouble, unread, host.all())


def _own_group(groups: Path) -> str:
    """The control group of this process (version 2, or the one of version 1 that limits memory); "/" where nobody
    says."""
    lines = [line.split(":", 2) for line in (tools.text(groups) or "").splitlines()]
    return next((path for number, kinds, path in lines if number == "0" or "memory" in kinds.split(",")), "/")

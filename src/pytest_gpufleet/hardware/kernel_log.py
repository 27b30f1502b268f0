"""Reads XIDs and SXids out of the kernel log (model/xid_catalogue.py says what they are)."""

from __future__ import annotations

import os
import re

from pytest_gpufleet.model.xid_catalogue import Logged, Sxid, Xid

# Older drivers leave "PCI:" out; of a GPU in MIG mode the instance follows the address.
_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)[^)]*\): (\d+)(?:, (.*))?")
# Two more lines with the same number follow, one with "Severity" and one with "Data" in this place: they judge nothing.
_SXID_LINE = re.compile(r"(nvidia-nvswitch\d+): SXid \(PCI:([0-9a-fA-F:.]+)\): (\d+), (Fatal|Non-fatal), (.*)")


def parse(text: str) -> list[Xid]:
    """The XIDs and SXids in lines of a kernel log."""
    return [
        *(Xid(pci, int(number), rest or "") for pci, number, rest in _LINE.findall(text)),
        *(
            Sxid(pci, int(number), rest, switch, severity)
            for switch, pci, number, severity, rest in _SXID_LINE.findall(text)
        ),
    ]


class KernelLog:
    """The kernel's log from its beginning; `new()` gives what it has told since the last time."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._trouble = ""
        self._file: int | None = None
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            self._trouble = f"the kernel log {path} cannot be read: {error.strerror}"

    def new(self) -> Logged:
        found: list[Xid] = []
        unread = ""
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
            found += parse(record.decode(errors="replace"))
        return Logged(tuple(found), self._trouble, unread)

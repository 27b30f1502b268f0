"""XIDs: the errors that the NVIDIA driver writes into the kernel log.

Meanings and actions follow NVIDIA's XID catalogue; which ones condemn a GPU before a run, DCGM's health checks.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

# What NVIDIA's catalogue calls for, in words.
ACTIONS = {
    "RESET_GPU": "reset the GPU; replace it if the XID comes back",
    "RESTART_BM": "restart the machine; replace the GPU if the XID comes back",
    "RESTART_VM": "restart the virtual machine",
    "CHECK_MECHANICALS": "check power cables and seating of the GPU",
    "WORKFLOW": "follow NVIDIA's workflow for this XID; keep the GPU out of service until then",
    "RESTART_APP": "an error of the program, unless it comes back with others",
    "IGNORE": "none",
    "UNKNOWN": "look it up in NVIDIA's XID catalogue",
}
_BY_ACTION = {
    "RESET_GPU": (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158),
    "RESTART_BM": (79,),
    "RESTART_VM": (151,),
    "CHECK_MECHANICALS": (54,),
    "WORKFLOW": (45, 48, 74, *range(144, 151)),
    "RESTART_APP": (
        8, 11, 13, 25, 31, 32, 39, 40, 41, 60, *range(68, 73), 75, 76, 77, 80, *range(82, 87), 88, 89, 94,
        *range(96, 106), *range(126, 136), 139,
    ),
    "IGNORE": (37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 152, 153, 157, 161),
}  # fmt: skip
ACTION = {number: action for action, numbers in _BY_ACTION.items() for number in numbers}

MEANINGS = {
    13: "graphics engine exception",
    31: "memory page fault of the GPU",
    32: "invalid or corrupted push buffer stream",
    38: "driver firmware error",
    43: "GPU stopped processing",
    45: "preemptive clean-up after an earlier error",
    46: "GPU stopped answering",
    48: "double-bit ECC error",
    54: "auxiliary power is not connected",
    61: "internal micro-controller breakpoint",
    62: "internal micro-controller halt",
    63: "row remapping or page retirement recorded",
    64: "row remapping or page retirement failed",
    74: "NVLink error",
    78: "vGPU start error",
    79: "GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    109: "context switch timeout",
    110: "security fault",
    119: "no answer from the GPU system processor (GSP)",
    120: "error of the GPU system processor (GSP)",
    121: "corrected error of the link between chips",
    136: "link training failed",
    140: "unrecovered ECC error",
    143: "GPU initialisation failed",
    145: "NVLink error (RLW)",
    149: "NVLink error (NETIR)",
}

# An XID from before the run condemns its GPU only if it is one of these; during the run, every one does.
CONDEMNING = frozenset({48, 54, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, *range(143, 151), 155, 156, 158})

_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(?:, (.*))?")


@dataclass(frozen=True)
class Xid:
    """One XID: the PCI address as the kernel writes it ("0000:1b:00"), its number and the rest of its line."""

    pci: str
    number: int
    text: str

    @property
    def condemning(self) -> bool:
        return self.number in CONDEMNING

    def of(self, pci_bus_id: str) -> bool:
        """Whether it is about the GPU with this NVML PCI bus id ("00000000:1B:00.0")."""
        domain, bus, device = self.pci.lower().split(":")[:3]
        there = pci_bus_id.lower().split(":")
        return (int(domain, 16), bus, device[:2]) == (int(there[0], 16), there[1], there[2][:2])

    def __str__(self) -> str:
        action = ACTIONS[ACTION.get(self.number, "UNKNOWN")]
        meaning = MEANINGS.get(self.number, "see NVIDIA's XID catalogue")
        return f"XID {self.number} ({meaning}) on PCI {self.pci}; what to do: {action}"


def parse(text: str) -> list[Xid]:
    """The XIDs in lines of a kernel log."""
    return [Xid(pci, int(number), rest or "") for pci, number, rest in _LINE.findall(text)]


class KernelLog:
    """The kernel's log from its beginning; `new()` gives the XIDs since the last time. `trouble` says why it cannot be
    read: then there is no judgement about XIDs."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self.trouble = ""
        self._file: int | None = None
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            self.trouble = f"the kernel log {path} cannot be read: {error.strerror}"

    def new(self) -> list[Xid]:
        found: list[Xid] = []
        while self._file is not None:
            try:
                record = os.read(self._file, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # the kernel has overwritten what was not read yet
            except OSError as error:
                self.trouble = f"the kernel log cannot be read: {error.strerror}"
                break
            if not record:
                break
            found += parse(record.decode(errors="replace"))
        return found

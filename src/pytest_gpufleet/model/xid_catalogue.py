"""XIDs and SXids: the errors of GPUs and of NVSwitches that the NVIDIA driver writes into the kernel log, what they
mean and what to do.

Meanings and actions follow NVIDIA's XID catalogue; which ones condemn a GPU before a run, DCGM's health checks. An SXid
says itself whether it is fatal.
"""

from __future__ import annotations

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
    8: "GPU stopped processing",
    11: "invalid or corrupted push buffer stream",
    13: "graphics engine exception",
    25: "invalid or illegal push buffer stream",
    31: "memory page fault of the GPU",
    32: "invalid or corrupted push buffer stream",
    37: "driver firmware error",
    38: "driver firmware error",
    **dict.fromkeys((39, 40, 41, *range(70, 73), 75, 76, 77, 85, *range(126, 136)), "copy engine error"),
    43: "GPU stopped processing",
    44: "graphics engine fault during a context switch",
    45: "preemptive clean-up after an earlier error",
    46: "GPU stopped answering",
    48: "double-bit ECC error",
    54: "auxiliary power is not connected",
    60: "video processor exception",
    61: "internal micro-controller breakpoint",
    62: "internal micro-controller halt",
    63: "row remapping or page retirement recorded",
    64: "row remapping or page retirement failed",
    66: "illegal access by the driver",
    67: "illegal access by the driver",
    **dict.fromkeys((68, 83, 84, 88, 89, 96, 97, 98), "video decoder error"),
    69: "graphics engine class error",
    74: "NVLink error",
    78: "vGPU start error",
    79: "GPU has fallen off the bus",
    80: "corrupted data sent to the GPU",
    **dict.fromkeys((82, *range(99, 106)), "JPEG engine error"),
    86: "optical flow engine error",
    92: "high rate of single-bit ECC errors",
    93: "wear limit of the InfoROM reached",
    94: "contained ECC error",
    95: "uncontained ECC error",
    106: "test message of the management bus",
    107: "test message of the management bus",
    109: "context switch timeout",
    110: "security fault",
    119: "no answer from the GPU system processor (GSP)",
    120: "error of the GPU system processor (GSP)",
    121: "corrected error of the link between chips",
    136: "link training failed",
    137: "illegal access over NVLink",
    139: "optical flow engine error",
    140: "unrecovered ECC error",
    141: "error on CUDA's fast path",
    143: "GPU initialisation failed",
    144: "NVLink error (SAW)",
    145: "NVLink error (RLW)",
    146: "NVLink error (TLW)",
    147: "NVLink error (TREX)",
    148: "NVLink error (NVLPW_CTRL)",
    149: "NVLink error (NETIR)",
    150: "NVLink error (MSE)",
    151: "key rotation failed",
    152: "deep learning accelerator, memory management error",
    153: "deep learning accelerator, timeout",
    154: "the driver calls for another recovery than before",
    155: "NVLink error that the driver noticed, such as a link taken down",
    156: "a defective part of the GPU was retired",
    157: "a defective part of the GPU could not be retired",
    158: "fatal timeout of the GPU",
    161: "a channel could not be retired",
}

# An XID from before the run condemns its GPU only if it is one of these; during the run, every one does.
CONDEMNING = frozenset({48, 54, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, *range(143, 151), 155, 156, 158})

# By what an SXid calls itself. Before the run only a fatal one condemns; during the run, every one does, as with XIDs.
SXID_ACTIONS = {
    "Fatal": (
        "reset all GPUs, and with them the NVSwitches of the fabric, or restart the machine; if it comes back, have "
        "the board of this NVSwitch and the link looked at"
    ),
    "Non-fatal": "none, unless it comes back; then have the link looked at",
}


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
        return _slot(self.pci) == _slot(pci_bus_id)

    def __str__(self) -> str:
        action = ACTIONS[ACTION.get(self.number, "UNKNOWN")]
        meaning = MEANINGS.get(self.number, "see NVIDIA's XID catalogue")
        return f"XID {self.number} ({meaning}) on PCI {self.pci}; what to do: {action}"


@dataclass(frozen=True)
class Sxid(Xid):
    """The same of an NVSwitch: with its name in the kernel log, and a key of SXID_ACTIONS."""

    switch: str
    severity: str

    @property
    def condemning(self) -> bool:
        return self.severity == "Fatal"

    def __str__(self) -> str:
        about = f"SXid {self.number} ({self.severity}: {self.text})"
        return f"{self.switch} on PCI {self.pci}: {about}; what to do: {SXID_ACTIONS[self.severity]}"


def _slot(address: str) -> str:
    """A PCI address without its function and without zeros in front of its domain."""
    return address.lower().partition(".")[0].lstrip("0")


@dataclass(frozen=True)
class Logged:
    """XIDs and SXids since the last time. `trouble` says why the log cannot be read: then there is no judgement about
    them. `unread`: why something since the time before was not seen."""

    xids: tuple[Xid, ...] = ()
    trouble: str = ""
    unread: str = ""

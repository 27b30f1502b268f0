"""XIDs and SXids: the errors of GPUs and of NVSwitches that the NVIDIA driver writes into the kernel log, what they
mean and what to do.

Actions are those of NVIDIA's XID catalogue, in xid_table.json with its origin and date; `python docs/make_xid_table.py`
writes it. Meanings are ours. An SXid says itself whether it is fatal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pytest_gpufleet.model.host_log_catalogue import HostMessage

TABLE = Path(__file__).with_name("xid_table.json")

# What NVIDIA's catalogue calls for at once, in words.
ACTIONS = {
    "RESET_GPU": "reset the GPU; replace it if the XID comes back",
    "RESTART_BM": "restart the machine; replace the GPU if the XID comes back",
    "RESTART_VM": "restart the virtual machine",
    "CHECK_MECHANICALS": "check power cables and seating of the GPU",
    "CHECK_UVM": "reset the GPU if managed memory or a virtual GPU was in use; else none",
    "UPDATE_SWFW": "update driver and firmware",
    "WORKFLOW_XID_45": "none, if another XID came or a process was ended; else restart the fabric manager",
    **dict.fromkeys(
        ("WORKFLOW_XID_48", "WORKFLOW_NVLINK_ERR", "WORKFLOW_NVLINK5_ERR"),
        "follow NVIDIA's workflow for this XID; keep the GPU out of service until then",
    ),
    "XID_154": "what the XID says",
    "XID_154_EVAL": "what XID 154 says, if that came too; else none, unless it comes back",
    "RESTART_APP": "an error of the program, unless it comes back with others",
    "IGNORE": "none",
    "CONTACT_SUPPORT": "ask NVIDIA",
}
UNKNOWN = "look it up in NVIDIA's XID catalogue"
# An XID from before the run condemns its GPU only if it calls for one of these; during the run, nearly every one does.
CONDEMNING = (
    "RESET_GPU", "RESTART_BM", "CHECK_MECHANICALS", "WORKFLOW_XID_48", "WORKFLOW_NVLINK_ERR", "WORKFLOW_NVLINK5_ERR",
)  # fmt: skip

# What processes leave behind, by what the catalogue says of when these come: 13 and 31 if a program reaches where it
# must not, and crashes of it; 43 and 45 if it is ended, also from outside. They say nothing against the GPU.
OF_CRASHES = frozenset({13, 31})
OF_PROCESSES = OF_CRASHES | {43, 45}
# Those of NVLink 5 have sub-codes, and only these say what to do. They stand in the kernel log alone.
NVLINK_5 = range(144, 151)
_NUMBERS = re.compile(r"\((0x[0-9a-fA-F]{1,8}) (0x[0-9a-fA-F]{1,8})\b")
# "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
_RECOVERY = re.compile(r"changed from 0x[0-9a-fA-F]+ \([^)]*\) to (0x[0-9a-fA-F]+)")

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
    108: "address of another GPU could not be translated",
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
    142: "video encoder error",
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
    159: "error on the coherent link to the processor",
    160: "a channel was retired",
    161: "a channel could not be retired",
    162: "power smoothing is on again",
    163: "power smoothing was switched off",
    164: "the circuits of power smoothing are nearly worn out",
    165: "the circuits of power smoothing are worn out",
    166: "unencrypted traffic on an NVLink in confidential mode",
    167: "PCIe did not answer",
    168: "a part of the GPU's memory cannot be used",
    169: "security micro-controller halt",
    170: "NVLink error in confidential mode",
    171: "uncorrectable error in DRAM",
    172: "uncorrectable error in SRAM",
}
# Those that NVIDIA's catalogue calls unused: no driver for Ampere and newer GPUs gives them.
UNUSED = "unused on Ampere and newer GPUs"

# By what an SXid calls itself. Before the run only a fatal one condemns; during the run, every one does, as with XIDs.
SXID_ACTIONS = {
    "Fatal": (
        "reset all GPUs, and with them the NVSwitches of the fabric, or restart the machine; if it comes back, have "
        "the board of this NVSwitch and the link looked at"
    ),
    "Non-fatal": "none, unless it comes back; then have the link looked at",
}


@cache
def table() -> dict[str, Any]:
    """What docs/make_xid_table.py has made of NVIDIA's catalogue."""
    told: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return told


@dataclass(frozen=True)
class Xid:
    """One XID: the PCI address as the kernel writes it ("0000:1b:00"), its number and the rest of its line."""

    pci: str
    number: int
    text: str

    @property
    def action(self) -> str:
        """What the catalogue calls for at once, a key of ACTIONS; "" for an XID that it has no action for. One of
        NVLink 5 whose sub-code nobody can tell keeps the action of its number, which condemns."""
        whole, _ = table()["actions"].get(str(self.number), ("", ""))
        return next(self._rules(), whole) if self.number in NVLINK_5 else str(whole)

    def _rules(self) -> Iterator[str]:
        """The actions of the sub-code in the text: its first number has some bits, and its second one a value."""
        if told := _NUMBERS.search(self.text):
            bits, status = f"{int(told[1], 16):032b}", int(told[2], 16)
            for number, _, before_575, since, wanted, action in table()["nvlink"]:
                fits = any(map(_matches, (before_575, since), (bits, bits)))
                if number == self.number and fits and (not wanted or int(wanted, 16) == status):
                    yield action

    @property
    def harmless(self) -> bool:
        """Whether there is nothing to do and nothing to look into: of NVLink 5 by the sub-code, of XID 154 if nothing
        is to be done any more."""
        if self.number in NVLINK_5:
            return self.action == "IGNORE"
        recovery = _RECOVERY.search(self.text) if self.action == "XID_154" else None
        return table()["actions"].get(str(self.number)) == ["IGNORE"] * 2 or bool(recovery and not int(recovery[1], 16))

    @property
    def condemning(self) -> bool:
        return self.action in CONDEMNING

    def of(self, pci_bus_id: str) -> bool:
        """Whether it is about the GPU with this NVML PCI bus id ("00000000:1B:00.0")."""
        return _slot(self.pci) == _slot(pci_bus_id)

    def __str__(self) -> str:
        known = str(self.number) in table()["actions"]
        meaning = MEANINGS.get(self.number, UNUSED if known else "see NVIDIA's XID catalogue")
        details = f": {self.text.partition(' (')[0]}" if self.text and self.number in NVLINK_5 else ""
        action = ACTIONS.get(self.action, UNKNOWN)
        return f"XID {self.number} ({meaning}{details}) on PCI {self.pci}; what to do: {action}"


def _matches(pattern: str, bits: str) -> bool:
    return all(wanted in ("-", bit) for wanted, bit in zip(pattern, bits, strict=True))


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
    """XIDs and SXids since the last time, and what was said of the `host`. `trouble` says why the log cannot be read:
    then there is no judgement about them. `unread`: why something since the time before was not seen."""

    xids: tuple[Xid, ...] = ()
    trouble: str = ""
    unread: str = ""
    host: tuple[HostMessage, ...] = ()

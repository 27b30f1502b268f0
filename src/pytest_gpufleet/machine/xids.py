"""XIDs and SXids: the errors of GPUs and of NVSwitches that the NVIDIA driver writes into the kernel log, what they
mean and what to do."""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import Gpu

# Actions are those of NVIDIA's XID catalogue, in xid_table.json with its origin and date; `python
# docs/make_xid_table.py` writes it. Meanings are ours, in xid_meanings.json. An SXid says itself whether it is fatal.

# Older drivers leave "PCI:" out; of a GPU in MIG mode the instance follows the address. Whole addresses only: see
# kernel_log.py for what else stands at the beginning of lines.
_PCI = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2})?(?:\.[0-7])?"
_LINE = re.compile(rf"NVRM: Xid \((?:PCI:)?({_PCI})(?: [^)]*)?\): (\d+)(?:, (.*))?")
# Two more lines with the same number follow, one with "Severity" and one with "Data" in this place: they judge nothing.
_SXID_LINE = re.compile(rf"(nvidia-nvswitch\d+): SXid \(PCI:({_PCI})\): (\d+), (Fatal|Non-fatal), (.*)")

XID_TABLE, XID_MEANINGS = (Path(__file__).with_name(f"xid_{what}.json") for what in ("table", "meanings"))

# What NVIDIA's catalogue calls for at once: the fault of a GPU with such an XID, whether it condemns the GPU if it came
# before the run (during the run, nearly every XID does), and what to do, in words.
_WORKFLOW = "follow NVIDIA's workflow for this XID; keep the GPU out of service until then"
ACTIONS = {
    "RESET_GPU": ("xid_reset", True, "reset the GPU; replace it if the XID comes back"),
    "RESTART_BM": ("xid_restart", True, "restart the machine; replace the GPU if the XID comes back"),
    "RESTART_VM": ("xid_restart", False, "restart the virtual machine"),
    "CHECK_MECHANICALS": ("xid_mechanical", True, "check power cables and seating of the GPU"),
    "CHECK_UVM": ("xid_other", False, "reset the GPU if managed memory or a virtual GPU was in use; else none"),
    "UPDATE_SWFW": ("xid_other", False, "update driver and firmware"),
    "WORKFLOW_XID_45":
        ("xid_other", False, "none, if another XID came or a process was ended; else restart the fabric manager"),
    "WORKFLOW_XID_48": ("xid_workflow", True, _WORKFLOW),
    "WORKFLOW_NVLINK_ERR": ("xid_workflow", True, _WORKFLOW),
    "WORKFLOW_NVLINK5_ERR": ("xid_workflow", True, _WORKFLOW),
    "XID_154": ("recovery_pending", False, "what the XID says"),
    "XID_154_EVAL": ("xid_application", False, "what XID 154 says, if that came too; else none, unless it comes back"),
    "RESTART_APP": ("xid_application", False, "an error of the program, unless it comes back with others"),
    "IGNORE": ("xid_other", False, "none"),
    "CONTACT_SUPPORT": ("xid_other", False, "ask NVIDIA"),
}  # fmt: skip
UNKNOWN = ("xid_other", False, "look it up in NVIDIA's XID catalogue")

# What processes leave behind, by what the catalogue says of when these come: 13 and 31 if a program reaches where it
# must not, and crashes of it; 43 and 45 if it is ended, also from outside. They say nothing against the GPU.
OF_CRASHES = frozenset({13, 31})
OF_PROCESSES = OF_CRASHES | {43, 45}
# Those of NVLink 5 have sub-codes, and only these say what to do. They stand in the kernel log alone.
NVLINK_5 = range(144, 151)
_NUMBERS = re.compile(r"\((0x[0-9a-fA-F]{1,8}) (0x[0-9a-fA-F]{1,8})\b")
# "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
_RECOVERY = re.compile(r"changed from 0x[0-9a-fA-F]+ \([^)]*\) to (0x[0-9a-fA-F]+)")

UNUSED = "unused on Ampere and newer GPUs"  # by NVIDIA's catalogue


@cache
def table() -> dict[str, Any]:
    """What docs/make_xid_table.py has made of NVIDIA's catalogue."""
    return json.loads(XID_TABLE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@cache
def meanings() -> dict[int, str]:
    return {int(number): meaning for number, meaning in json.loads(XID_MEANINGS.read_text(encoding="utf-8")).items()}


@dataclass(frozen=True)
class Xid:
    """One XID: the PCI address as the kernel writes it ("0000:1b:00"), its number and the rest of its line."""

    pci: str
    number: int
    text: str

    @property
    def action(self) -> str:
        """What the catalogue calls for at once, a key of ACTIONS; "" for an XID that it has no action for. Of one of
        NVLink 5 that of the sub-code in its text, whose first number has some bits, and whose second one a value: if
        the sub-code is not known it keeps the action of its number, which condemns."""
        code = _NUMBERS.search(self.text)
        if code and self.number in NVLINK_5:
            bits, status = f"{int(code[1], 16):032b}", int(code[2], 16)
            for number, _, before_575, since, wanted, action in table()["nvlink"]:
                fits = any(re.fullmatch(pattern.replace("-", "."), bits) for pattern in (before_575, since))
                if number == self.number and fits and (not wanted or int(wanted, 16) == status):
                    return str(action)
        return str(table()["actions"].get(str(self.number), ("",))[0])

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
        return ACTIONS.get(self.action, UNKNOWN)[1]

    def of(self, pci_bus_id: str) -> bool:
        """Whether it is about the GPU with this NVML PCI bus id ("00000000:1B:00.0"): whatever its function, and how
        many zeros its domain is written with."""
        one, other = (each.lower().partition(".")[0].lstrip("0") for each in (self.pci, pci_bus_id))
        return one == other

    def __str__(self) -> str:
        known = str(self.number) in table()["actions"]
        meaning = meanings().get(self.number, UNUSED if known else "see NVIDIA's XID catalogue")
        details = f": {self.text.partition(' (')[0]}" if self.text and self.number in NVLINK_5 else ""
        action = ACTIONS.get(self.action, UNKNOWN)[2]
        return f"XID {self.number} ({meaning}{details}) on PCI {self.pci}; what to do: {action}"


@dataclass(frozen=True)
class Sxid(Xid):
    """The same of an NVSwitch: with its name in the kernel log, and whether it calls itself "Fatal" or "Non-fatal".
    Before the run only a fatal one condemns; during the run, every one does, as with XIDs."""

    switch: str
    severity: str

    @property
    def condemning(self) -> bool:
        return self.severity == "Fatal"

    def __str__(self) -> str:
        return f"{self.switch} on PCI {self.pci}: SXid {self.number} ({self.severity}: {self.text})"


def of_lines(lines: Iterable[str]) -> list[Xid]:
    found: list[Xid] = []
    for line in lines:
        if xid := _LINE.match(line):
            found.append(Xid(xid[1], int(xid[2]), xid[3] or ""))
        elif sxid := _SXID_LINE.match(line):
            found.append(Sxid(sxid[2], int(sxid[3]), sxid[5], sxid[1], sxid[4]))
    return found


def xids_of(gpus: Iterable[Gpu], xids: Sequence[Xid]) -> list[Fault]:
    """XIDs of these GPUs, each with its meaning and the action it calls for, without those that call for none; and all
    SXids: all GPUs share the NVSwitches, so they name no GPU."""
    faults = []
    for place, xid in ((gpu.place, xid) for gpu in gpus for xid in xids if xid.of(str(gpu["pci_bus_id"]))):
        code = "xid_of_process" if xid.number in OF_PROCESSES else ACTIONS.get(xid.action, UNKNOWN)[0]
        faults += [] if xid.harmless else [Fault(code, (place,), str(xid), story=xid.text)]
    switches = [xid for xid in xids if isinstance(xid, Sxid)]
    return faults + [Fault("sxid_fatal" if xid.condemning else "sxid", (), str(xid)) for xid in switches]


def xids_of_none(pci_bus_ids: Collection[str], xids: Iterable[Xid]) -> list[Fault]:
    """XIDs of GPUs that are not at any of these PCI bus ids: the driver has lost them since."""
    strange = (xid for xid in xids if not isinstance(xid, Sxid) and not any(map(xid.of, pci_bus_ids)))
    text = "a GPU that is no longer here, or hidden from this container: {}"
    return [Fault("gpu_lost", (), text.format(xid)) for xid in strange]

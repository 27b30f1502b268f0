"""The kernel log: XIDs and SXids, the errors of GPUs and NVSwitches that the NVIDIA driver writes into it; what the
kernel writes when something of the host is wrong (processors, memory, PCIe, disks, network adapters); how it is read,
and which of it condemns the machine.

Of the host a row says by what a line is known, which fault it is, and when that condemns the machine; else it is shown.
Errors that nobody could correct condemn whenever they came. What a machine that waits for its acceptance may have met
without being broken (a stall while it moved to another hypervisor, a full memory, a hot day) condemns only during the
run, and what was corrected does not at all: counters judge how often that may be, and count what the log leaves out.

Above each row stands where its line is from; files are those of Linux. The lines, as they were really written,
are in tests/machine/test_kernel_log.py. A pattern begins where its line does, with what any version of the kernel puts
there: the kernel writes names that programs give themselves and their files into its lines too ("NAME[4711]: segfault
at 0 ip ... in FILE"), and only the first 15 letters of a line can be such a name."""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pytest_gpufleet.machine import tools
from pytest_gpufleet.model.fault import CODES, KERNEL_LOG, Fault
from pytest_gpufleet.model.place import THIS_NODE, Gpu, grouped

# Actions are those of NVIDIA's XID catalogue, in xid_table.json with its origin and date; `python
# docs/make_xid_table.py` writes it. Meanings are ours, in xid_meanings.json. An SXid says itself whether it is fatal.

# Older drivers leave "PCI:" out; of a GPU in MIG mode the instance follows the address. Whole addresses only: users
# choose what else stands at the beginning of lines.
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
def catalogue() -> dict[str, Any]:
    return json.loads(XID_TABLE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@cache
def meanings() -> dict[int, str]:
    return {int(number): meaning for number, meaning in json.loads(XID_MEANINGS.read_text(encoding="utf-8")).items()}


@dataclass(frozen=True)
class Xid:
    """The PCI address as the kernel writes it ("0000:1b:00"), number and rest of its line. Of an SXid also the name of
    the NVSwitch, and its severity: before the run only a fatal one condemns; during it every one, as with XIDs."""

    pci: str
    number: int
    text: str
    switch: str = ""
    severity: str = ""

    @property
    def action(self) -> str:
        """What the catalogue calls for at once, a key of ACTIONS, or "". Of NVLink 5 that of the sub-code in its text
        (bits of one number, value of another); an unknown one has the action of its number, which condemns."""
        code = _NUMBERS.search(self.text)
        if code and self.number in NVLINK_5:
            bits, status = f"{int(code[1], 16):032b}", int(code[2], 16)
            for number, _, before_575, since, wanted, action in catalogue()["nvlink"]:
                fits = any(re.fullmatch(pattern.replace("-", "."), bits) for pattern in (before_575, since))
                if number == self.number and fits and (not wanted or int(wanted, 16) == status):
                    return str(action)
        return str(catalogue()["actions"].get(str(self.number), ("",))[0])

    @property
    def harmless(self) -> bool:
        """Whether there is nothing to do: of NVLink 5 by the sub-code, of XID 154 if nothing is to be done any more."""
        if self.number in NVLINK_5:
            return self.action == "IGNORE"
        if self.action == "XID_154" and (recovery := _RECOVERY.search(self.text)):
            return int(recovery[1], 16) == 0
        return bool(catalogue()["actions"].get(str(self.number)) == ["IGNORE"] * 2)

    @property
    def condemning(self) -> bool:
        return self.severity == "Fatal" if self.switch else ACTIONS.get(self.action, UNKNOWN)[1]

    def of(self, pci_bus_id: str) -> bool:
        """By the NVML PCI bus id ("00000000:1B:00.0") of a GPU, whatever its function and the zeros of its domain."""
        one, other = (each.lower().partition(".")[0].lstrip("0") for each in (self.pci, pci_bus_id))
        return one == other

    def __str__(self) -> str:
        if self.switch:
            return f"{self.switch} on PCI {self.pci}: SXid {self.number} ({self.severity}: {self.text})"
        known = str(self.number) in catalogue()["actions"]
        meaning = meanings().get(self.number, UNUSED if known else "see NVIDIA's XID catalogue")
        details = f": {self.text.partition(' (')[0]}" if self.text and self.number in NVLINK_5 else ""
        action = ACTIONS.get(self.action, UNKNOWN)[2]
        return f"XID {self.number} ({meaning}{details}) on PCI {self.pci}; what to do: {action}"


def xids_of(gpus: Iterable[Gpu], xids: Sequence[Xid]) -> list[Fault]:
    """XIDs of these GPUs that call for something; and all SXids, which name no GPU: all share the NVSwitches."""
    faults = []
    for place, xid in ((gpu.place, xid) for gpu in gpus for xid in xids if xid.of(str(gpu["pci_bus_id"]))):
        code = "xid_of_process" if xid.number in OF_PROCESSES else ACTIONS.get(xid.action, UNKNOWN)[0]
        faults += [] if xid.harmless else [Fault(code, (place,), str(xid), story=xid.text)]
    return faults + [Fault("sxid_fatal" if xid.condemning else "sxid", (), str(xid)) for xid in xids if xid.switch]


def xids_of_none(pci_bus_ids: Collection[str], xids: Iterable[Xid]) -> list[Fault]:
    """XIDs of GPUs that are not at any of these PCI bus ids: the driver has lost them since."""
    strange = (xid for xid in xids if not xid.switch and not any(map(xid.of, pci_bus_ids)))
    text = "a GPU that is no longer here, or hidden from this container: {}"
    return [Fault("gpu_lost", (), text.format(xid)) for xid in strange]


# Of the host.
BDF = r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_OF_PCI = rf"(?P<device>(?:[\w-]+ )?{BDF}): (?:AER: +)?"
_MLX5 = rf"(?P<device>mlx5_core {BDF}): (?:\w+:\d+:\(pid \d+\): )?"
# Not of loop devices, floppy and optical drives, of which a server has none, and its virtual ones never answer.
_DISK = r"(?P<device>(?:nvme|sd|vd|xvd|hd|md|dm-)\w+)"
LONGEST_LINE = 300
# Of one kind: a flood that names a new place in every line costs no more than this.
MOST_DEVICES = 64
# A network link that went down this often within so many seconds needs a look (NVIDIA, InfiniBand Cluster Bring-up
# Procedure: at least twice within a day). Oracle's rdma_link_flapping.py excuses the first half hour after a start,
# in which drivers and switches take links down and up.
FLAPPING, FLAPS, FLAPS_WITHIN, FLAPS_EXCUSED = "network_link_flaps", 2, 86_400, 1_800


@dataclass(frozen=True)
class HostMessage:
    """A message about the host, with all others of its kind about the same device; in TABLE what all of a kind have.
    `before`, `during`: whether it condemns if it was logged before the run, or in it. `device`: as the kernel calls it,
    "" for the machine. `line`: the first. `first`, `last`: seconds since boot, None where the log has no times.
    `gpus`: the PCI bus ids of GPUs that are this device, or are below it."""

    code: str
    before: bool
    during: bool
    device: str = ""
    line: str = ""
    times: int = 1
    first: float | None = None
    last: float | None = None
    gpus: tuple[str, ...] = ()


ALWAYS, BEFORE, DURING, NEVER = (True, True), (True, False), (False, True), (False, False)
# As print_mce has it since Linux 3.18, and before; where edac_mce_amd is loaded, drivers/edac/mce_amd.c writes instead.
_MCE = (
    r"(?:mce: )?\[Hardware Error\]: (?P<device>CPU[ :]\d+)"
    r"(?:: Machine Check(?: Exception)?: \w+ Bank \d+: | \([\w:]+\) MC\d+_STATUS\[[^]]*\]: 0x)"
)
# With the number of the record, but for those of the boot before (BERT): drivers/firmware/efi/cper.c, each line of it.
_CPER = r"(?:\{\d+\})?\[Hardware Error\]: event severity: "
_PART = re.compile(r"(?:\{\d+\})?\[Hardware Error\]:\s+(?!event severity)")
_PCIE_SECTION = rf".*section_type: PCIe error.*?device_id: (?P<device>{BDF})"
_MEMORY_SECTION = r".*section_type: memory error(?:.*DIMM location: (?P<device>[^;]+))?"
_WATCHDOG = r"(?:(?:NMI )?watchdog: )?"
_EDAC = r"EDAC MC\d+: (?P<times>\d+) {kind} (?=\w).*?\bon (?P<device>.+?) \("

# The group `device` of a pattern is what the line is about, `times` how many errors it is about.
TABLE = tuple((re.compile(pattern), HostMessage(code, *when)) for code, when, pattern in (
    # arch/x86/kernel/cpu/mce/core.c, print_mce; github.com/andikleen/mcelog issue 70. Bit 61 of the status says that it
    # was not corrected: MCI_STATUS_UC of arch/x86/include/asm/mce.h. What an AMD processor deferred is not used yet.
    ("machine_check", ALWAYS, _MCE + r"[abefABEF]\w{15}"),
    ("machine_check_corrected", NEVER, _MCE + r"\w{16}"),
    # drivers/firmware/efi/cper.c, joined(); also of the boot before. Probing and switching off give PCIe errors too.
    ("pcie_error_logged", ALWAYS, _CPER + "fatal" + _PCIE_SECTION),
    ("pcie_error_logged", DURING, _CPER + "recoverable" + _PCIE_SECTION),
    ("pcie_corrected_logged", NEVER, _CPER + "corrected" + _PCIE_SECTION),
    ("dimm_uncorrected", ALWAYS, _CPER + "(?:fatal|recoverable)" + _MEMORY_SECTION),
    ("dimm_corrected", NEVER, _CPER + "corrected" + _MEMORY_SECTION),
    ("machine_check", ALWAYS, _CPER + "(?:fatal|recoverable)"),
    ("machine_check_corrected", NEVER, _CPER + "corrected"),
    # drivers/edac/edac_mc.c; github.com/andikleen/mcelog issue 74
    ("dimm_uncorrected", ALWAYS, _EDAC.replace("{kind}", "UE")),
    # github.com/illinois-scicomp/machine-shop-maintenance issue 66
    ("dimm_corrected", NEVER, _EDAC.replace("{kind}", "CE")),
    # mm/memory-failure.c: a page that the processor found poisoned
    ("dimm_uncorrected", ALWAYS, r"Memory failure: 0x[0-9a-f]+: recovery action for"),
    # drivers/pci/pcie/aer.c, aer_print_error; github.com/rwth-i6/returnn issue 1500, above a GPU that was lost
    ("pcie_error_logged", ALWAYS, _OF_PCI + r"PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Fatal\)"),
    # github.com/minisforum-docs/MS-02-Ultra issue 10. Probing for devices at boot gives such errors too.
    ("pcie_error_logged", DURING, _OF_PCI + r"PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Non-Fatal\)"),
    # github.com/pop-os/pop issue 3363; older kernels say "Corrected"
    ("pcie_corrected_logged", NEVER, _OF_PCI + r"PCIe Bus Error: severity=Correct(?:ed|able)"),
    # drivers/pci/pcie/dpc.c: a port has cut off all that is below it
    ("pcie_error_logged", ALWAYS, _OF_PCI + r"DPC: containment event"),
    # NVRM: The NVIDIA GPU 0000:b3:00.0\x0aNVRM: (PCI ID: 10de:26b5) installed in this system has\x0aNVRM: fallen off
    # leptonai/gpud; NVIDIA/open-gpu-kernel-modules issue 789 and osapi.c; NVSentinel's gpufallen/types.go: it never
    # started. One that did later is left: judged()
    ("gpu_lost", ALWAYS, rf"NVRM: (?:(?:The NVIDIA )?GPU (?P<device>{BDF})(?:: |\\x0a.*NVRM: ))?"
         "(?:RmInitAdapter failed|(?:GPU has )?fallen off)"),
    # kernel/watchdog.c; github.com/leptonai/gpud components/cpu/kmsg_matcher.go. Also where a hypervisor stood still.
    ("hung_task", DURING, _WATCHDOG + r"BUG: soft lockup - CPU#\d+ stuck for"),
    # kernel/watchdog.c; since Linux 6.6 "watchdog: CPU5: Watchdog detected ...", by whom it was seen
    ("hung_task", ALWAYS, _WATCHDOG + r"(?:CPU\d+: )?Watchdog detected hard LOCKUP on cpu \d+"),
    # kernel/rcu/tree_stall.h; github.com/oxidecomputer/propolis issue 1153. "expedited" ones come after milliseconds
    # on some kernels (github.com/lkrg-org/lkrg issue 189), and are none.
    ("hung_task", DURING, r"(?:rcu: )?INFO: rcu_\w+ (?:self-)?detected stalls? on CPU"),
    # kernel/hung_task.c; github.com/leptonai/gpud components/cpu/kmsg_matcher.go; newer kernels: "blocked in I/O wait".
    # The name of a task has 15 letters, and one that cannot be printed is "\x0a" in /dev/kmsg.
    ("hung_task", DURING, r"INFO: task (?:\\x\w\w|[^\\]){1,15}:\d+ blocked (?:in I/O wait )?for more than \d+ seconds"),
    # nvme nvme4: I/O tag 22 (2016) opcode 0x2 (Admin Cmd) QID 0 timeout, reset controller
    # drivers/nvme/host/pci.c, nvme_timeout; github.com/leptonai/gpud components/disk/kmsg_matcher.go. A "completion
    # polled" lost an interrupt and no data, and is none. nvme_warn_reset: github.com/raspberrypi/linux issue 6661; then
    # gpud as above, github.com/snu-csl/nvmevirt issue 34
    ("disk_failing", ALWAYS, r"nvme (?P<device>nvme\d+): (?:I/O (?:tag )?\d+ .*timeout, (?:reset|disable) controller|"
         "controller is down; will reset|(?:Disabling device|Removing) after (?:reset|probe) failure)"),
    # block/blk-mq.c, blk_print_req_error; github.com/oxidecomputer/crucible issue 1844, longhorn/longhorn issue 2775.
    # Disks may refuse to discard or to write zeroes, and are not asked again.
    ("disk_failing", ALWAYS,
         r"(?:(?:end_request|blk_update_request|print_req_error): )?(?:I/O|critical medium) error, "
         rf"dev {_DISK}, sector \d+\b(?! op 0x\w+:\((?:DISCARD|WRITE_ZEROES|SECURE_E))"),
    # fs/buffer.c; github.com/Joshua-Riek/ubuntu-rockchip issue 970; drivers/md; gpud as above
    ("disk_failing", ALWAYS, rf"(?:Buffer I/O error on dev(?:ice)?|md/raid\S+ Disk failure on) {_DISK}\b"),
    # drivers/nvme/host/multipath.c; gpud as above
    ("disk_failing", ALWAYS, r"block (?P<device>nvme\w+): no available path - failing I/O"),
    # fs/ext4/super.c; github.com/Joshua-Riek/ubuntu-rockchip issue 970, leptonai/gpud components/os
    ("file_system_failed", ALWAYS, rf"EXT4-fs \({_DISK}\): (?:Remounting filesystem read-only|I/O error while)"),
    # fs/ext4/super.c, __ext4_error; github.com/oxidecomputer/crucible issue 1572
    ("file_system_failed", ALWAYS, rf"EXT4-fs error \(device {_DISK}\)"),
    # fs/xfs/xfs_fsops.c, xfs_do_force_shutdown; github.com/kubernetes/node-problem-detector pull request 845. Without
    # "User initiated shutdown received", which somebody asked for.
    ("file_system_failed", ALWAYS,
         rf"XFS \({_DISK}\): (?:Corruption|(?:[Ll]og |Metadata )?I/O [Ee]rror|Filesystem has been shut down due to)"),
    # fs/btrfs/messages.c, __btrfs_handle_fs_error
    ("file_system_failed", ALWAYS, rf"BTRFS \w+ \(device {_DISK}[^)]*\): forced readonly"),
    # oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/init.scope,...
    # mm/oom_kill.c, dump_oom_summary (since Linux 5.0); github.com/0jc1/py-autovod issue 7. What follows the constraint
    # has names in it that users choose (of groups, of the task), so that only the constraint says whose memory it was.
    ("host_out_of_memory", DURING, r"oom-kill:constraint=CONSTRAINT_(?!MEMCG,)\w+,"),
    # github.com/leptonai/gpud pull request 70. Of which control group: see of_the_host; none if it seems named twice
    ("host_out_of_memory", DURING,
         r"oom-kill:constraint=CONSTRAINT_MEMCG,(?!.*oom_memcg=.*oom_memcg=).*,oom_memcg=(?P<device>.+),task_memcg="),
    # drivers/net/ethernet/mellanox/mlx5/core/events.c; github.com/leptonai/gpud issue 348. At boot it is about what the
    # slot claims to give: every DGX Spark says so, and NVSentinel (pkg/nicdriver/config.go) calls for nothing.
    ("nic_underpowered", DURING, _MLX5 + r"Detected insufficient power on the PCIe slot"),
    # core/events.c, temp_warn, of an adapter whose firmware gave up 80 s later and which was gone after 154 s, and
    # port_module; github.com/leptonai/gpud components/accelerator/nvidia/infiniband/kmsg_matcher.go
    ("nic_too_hot", ALWAYS, _MLX5 + r"(?:High temperature on sensors|Port module event\[error\]: .*High Temperature)"),
    ("nic_underpowered", ALWAYS, _MLX5 + r"Port module event\[error\]: .*Power budget exceeded"),
    # core/health.c and cmd.c; a severity below 4 is an error or worse (include/linux/kern_levels.h)
    ("nic_firmware_failed", ALWAYS, _MLX5 + r"(?:device's health compromised|Fatal error|health recovery flow abort|"
         r"Health issue observed, .*severity\([0-3]\)|.*timeout\. Will cause a leak of a command resource)"),
    # drivers/infiniband/hw/efa/efa_com.c; NVSentinel as above: the adapter no longer answers
    ("nic_firmware_failed", ALWAYS, rf"(?P<device>efa {BDF}|infiniband (?:rdmap|efa_)\w+): "
         "(?:Admin queue is closed|Reset indication didn't turn|Device isn't ready)"),
    # drivers/net/ethernet/mellanox/mlx5/core/en_main.c, mlx5e_update_carrier; oracle-quickstart/oci-hpc,
    # rdma_link_flapping.py. InfiniBand ports write no such line: optics.py has their counters.
    # drivers/net/ethernet/broadcom/bnxt/bnxt.c, bnxt_report_link. Once is nothing: summed_up().
    (FLAPPING, BEFORE, rf"(?P<device>(?:mlx5_core|bnxt_en) {BDF} [\w.@-]+): (?:NIC Link is Down|Link down)$"),
    # drivers/thermal/intel/therm_throt.c; github.com/erpalma/throttled issue 239
    ("processor_throttled", DURING, r"(?:mce: )?CPU\d+: (?:Core|Package) temperature (?:is )?above threshold"),
))  # fmt: skip


def recognised(line: str, at: float | None = None) -> HostMessage | None:
    for pattern, row in TABLE:
        if found := pattern.match(line):
            groups = found.groupdict()
            device, times = groups.get("device") or "", int(groups.get("times") or 1)
            return replace(row, device=device, line=line[:LONGEST_LINE], times=times, first=at, last=at)
    return None


def summed_up(messages: Iterable[HostMessage]) -> tuple[HostMessage, ...]:
    """Messages by their kind and device: however many there are, each costs what one costs."""
    found: dict[tuple[str, bool, bool, str], HostMessage] = {}
    devices = Counter[str]()
    for message in messages:
        kind = (message.code, message.before, message.during)
        if (*kind, message.device) not in found:
            devices[message.code] += 1
            if devices[message.code] > MOST_DEVICES:
                message = replace(message, device="")
        if known := found.get(key := (*kind, message.device)):
            message = replace(known, times=known.times + message.times, last=message.last)
        found[key] = message
    return tuple(each for each in found.values() if each.code != FLAPPING or each.times >= FLAPS)


@dataclass(frozen=True)
class Logged:
    """`trouble`: why the log cannot be read. `unread`: why something since the last time was not seen."""

    xids: tuple[Xid, ...] = ()
    trouble: str = ""
    unread: str = ""
    host: tuple[HostMessage, ...] = ()


# A record of /dev/kmsg (Documentation/ABI/testing/dev-kmsg): priority, number, microseconds since boot, flags, text.
_RECORD = re.compile(r"(\d+),(\d+),(\d+),[^;]*;")
# What the kernel itself has written since boot, as systemd keeps it (systemd.journal-fields(7)).
JOURNAL_TIME = "_SOURCE_MONOTONIC_TIMESTAMP"
JOURNAL = ("journalctl", "-q", "-k", "-o", "json", f"--output-fields=MESSAGE,{JOURNAL_TIME}", "SYSLOG_FACILITY=0")
REMEDY = f"{tools.AS_ROOT}, a container needs `--device /dev/kmsg --cap-add SYSLOG`"
FACILITIES = 8  # a priority below it is the kernel's: it gives a line that a program writes there another facility
DEVICES = Path("/sys/bus/pci/devices")


def parse(text: str) -> list[Xid]:
    """Each once: a broken GPU may write the same line ten thousand times (NVIDIA/NVSentinel, issue 1120)."""
    found: list[Xid] = []
    for _, line in _of_the_kernel(text):
        if xid := _LINE.match(line):
            found.append(Xid(xid[1], int(xid[2]), xid[3] or ""))
        elif sxid := _SXID_LINE.match(line):
            found.append(Xid(sxid[2], int(sxid[3]), sxid[5], sxid[1], sxid[4]))
    return list(dict.fromkeys(found))


def of_the_host(text: str, own_group: str = "/", now: float = 0.0) -> Iterable[HostMessage]:
    """`now`: seconds since boot. Links that went down long before it, or while the machine started, are left out. A
    control group without memory counts only if the processes of the run are in it (`own_group`: theirs, "/" where a
    container hides it): other containers have limits of their own."""
    for seconds, line in joined(_of_the_kernel(text)):
        if (message := recognised(line, seconds)) is None:
            continue
        over = seconds is not None and seconds < max(FLAPS_EXCUSED, now - FLAPS_WITHIN)
        ours = own_group.rstrip("/") and f"{own_group}/".startswith(f"{message.device.rstrip('/')}/")
        if message.code == "host_out_of_memory" and message.device and not ours:
            yield replace(message, during=False)
        elif message.code != FLAPPING or not over:
            yield message


def _of_the_kernel(text: str) -> Iterator[tuple[float | None, str]]:
    """With seconds since boot, without what programs wrote there: a daemon may put old messages into it again."""
    for line in text.splitlines():
        if (record := _RECORD.match(line)) is None:
            yield None, line
        elif int(record[1]) < FACILITIES:
            yield int(record[3]) / 1e6, line[record.end() :]


def joined(lines: Iterable[tuple[float | None, str]]) -> Iterator[tuple[float | None, str]]:
    """The same, with each record of the firmware in one line: what it is about stands below how bad it is."""
    record: tuple[float | None, str] = (None, "")
    for seconds, line in lines:
        part = _PART.match(line)
        if part and record[1].startswith(f"{part[0].rstrip()} event severity"):
            record = record[0], f"{record[1]}; {line[part.end() :]}"
        else:
            yield record
            record = seconds, line
    yield record


def _overwritten(text: str, run: tools.RunTool) -> str:
    """What stood in the log before its first record, by the journal: in weeks of uptime the kernel writes over it."""
    earlier, first = list[str](), _RECORD.match(text)
    if first and int(first[2]):
        with suppress(tools.Unreadable, ValueError):
            for entry in map(json.loads, run(*JOURNAL).splitlines()):
                at, lines = int(entry.get(JOURNAL_TIME) or first[3]), str(entry.get("MESSAGE")).splitlines()
                earlier += [f"0,0,{at},-;" + r"\x0a".join(lines) + "\n"] if at < int(first[3]) else []
    return "".join(earlier)


def behind(message: HostMessage, pci_bus_ids: Sequence[str], devices: Path = DEVICES) -> HostMessage:
    """With the GPUs that it is about: that are its device, by any function, or whose way over PCIe leads over it."""
    if (named := re.search(BDF, message.device)) is None:
        return message
    about = []
    for gpu in pci_bus_ids:
        domain, _, rest = gpu.lower().partition(":")
        device = devices / f"{domain[-4:]}:{rest}"
        same = device.name.partition(".")[0] == named[0].partition(".")[0]
        about += [gpu] if same or named[0] in device.resolve().parts else []
    return replace(message, gpus=tuple(about))


class KernelLog:
    """The kernel's log from its beginning; `new()` gives what is new in it since the last time."""

    def __init__(
        self, path: str = "/dev/kmsg", groups: Path = Path("/proc/self/cgroup"), run: tools.RunTool = tools.output
    ) -> None:
        self._trouble = ""
        self._run: tools.RunTool | None = run  # until the log was read for the first time
        self._file: int | None = None
        # The control group of this process: version 2, or the one of version 1 that limits memory.
        lines = [line.split(":", 2) for line in (tools.text(groups) or "").splitlines()]
        own = (path for number, kinds, path in lines if number == "0" or "memory" in kinds.split(","))
        self._group = next(own, "/")
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            self._trouble = f"the kernel log {path} cannot be read: {error.strerror}; {REMEDY}"

    def new(self) -> Logged:
        records, unread = list[bytes](), ""
        while self._file is not None:
            try:
                record = os.read(self._file, 8192)
            except BrokenPipeError:
                unread = "the kernel wrote over lines of its log that had not been read yet"
                continue
            except BlockingIOError:
                break
            except OSError as error:
                self._trouble = unread = f"the kernel log cannot be read: {error.strerror}"
                break
            if not record:
                break
            records.append(record)
        text = b"".join(records).decode(errors="replace")
        if self._run:
            text, self._run = _overwritten(text, self._run) + text, None
        host = summed_up(of_the_host(text, self._group, time.monotonic()))
        return Logged(tuple(parse(text)), self._trouble, unread, host)


def judged(
    messages: Sequence[HostMessage], gpus: Sequence[Gpu], when: Literal["before", "during"]
) -> tuple[list[Fault], list[Fault]]:
    """What condemns the machine, of messages from before the run or from during it, and the others of them."""
    back = [each for each in messages if when == "before" and each.code == "gpu_lost" and each.gpus]
    condemning = [message for message in messages if getattr(message, when) and message not in back]
    return _faults(condemning, gpus), _faults((each for each in messages if each not in condemning), gpus)


def remarks(noticed: Iterable[Fault]) -> list[str]:
    remarks = []
    for code, each in grouped(dict.fromkeys((fault.name, fault.what) for fault in noticed)).items():
        whose = "the kernel log: " if CODES[code].number in KERNEL_LOG else ""
        more = f", and {len(each) - 1} more" if len(each) > 1 else ""
        remarks.append(f"{whose}{CODES[code].message}: {each[0]}{more}")
    return remarks


def _faults(messages: Iterable[HostMessage], gpus: Iterable[Gpu]) -> list[Fault]:
    """A GPU is named if the message is about it, or about a port that has no other GPU below it; else the node."""
    at, faults = {str(gpu["pci_bus_id"]): gpu.place for gpu in gpus}, []
    for message in messages:
        below = [at[each] for each in message.gpus if each in at]
        more = [f"{message.times:,} times"] if message.times > 1 else []
        if message.first is not None and message.last is not None:
            span = dict.fromkeys((f"{message.first:,.0f}", f"{message.last:,.0f}"))
            more.append(f"{' to '.join(span)} s after boot")
        what = f"{message.line} ({', '.join(more)})" if more else message.line
        faults.append(Fault(message.code, (below[0] if len(below) == 1 else THIS_NODE,), what, story=message.line))
    return faults

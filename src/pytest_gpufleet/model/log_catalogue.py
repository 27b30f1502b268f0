"""What the kernel writes into its log when something of the host is wrong: processors and their memory, PCIe, disks,
network adapters; and the XIDs and SXids of the NVIDIA driver.

A row says by what a line is known, what kind of fault it tells of, and whether that condemns the machine: if it stood
in the log before the run, and if it comes while the run goes on. What does not condemn is shown. Errors that nobody
could correct condemn whenever they came. What a machine that waits for its acceptance may have met without being
broken (a stall while it moved to another hypervisor, a full memory, a hot day) condemns only during the run, and what
was corrected does not at all: how often that may be is judged by counters, which count what the log leaves out.

Above each row stands a line as it was really written, and where. Names of files are those of the Linux kernel's
sources that write it. A pattern begins where its line does, with what any version of the kernel puts there: the kernel
writes names that programs give themselves and their files into its lines too ("NAME[4711]: segfault at 0 ip ... in
FILE"), and only the first 15 letters of a line can be such a name.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

BDF = r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_OF_PCI = rf"(?P<device>(?:[\w-]+ )?{BDF}): (?:AER: +)?"
_MLX5 = rf"(?P<device>mlx5_core {BDF}): (?:\w+:\d+:\(pid \d+\): )?"
# Not of loop devices, floppy and optical drives, of which a server has none, and its virtual ones never answer.
_DISK = r"(?P<device>(?:nvme|sd|vd|xvd|hd|md|dm-)\w+)"
LONGEST_LINE = 300
# Of one kind: a flood that names a new place in every line costs no more than this.
MOST_DEVICES = 64


# Each line of TABLE has one of these in it. A log has ten thousands of others, and to look for a word costs little.
WORDS = (
    "Hardware Error", "EDAC MC", "Memory failure", "PCIe Bus Error", "DPC: ", "lockup", "LOCKUP", "rcu_",
    "INFO: task ", "nvme", "I/O error", "error, dev", "Disk failure", "EXT4-fs", "XFS (", "BTRFS", "oom-kill:",
    "mlx5_core", "above threshold",
)  # fmt: skip


class Row(NamedTuple):
    """`code`: a key of CODES. `before`, `during`: whether it condemns if it was logged before the run, or in it. The
    pattern's group `device` is what the line is about, `times` how many errors it tells of."""

    code: str
    before: bool
    during: bool
    pattern: re.Pattern[str]


def _row(code: str, before: bool, during: bool, pattern: str) -> Row:
    return Row(code, before, during, re.compile(pattern))


CONDEMNS, SHOWN = True, False
# As print_mce has it since Linux 3.18, and before.
_MCE = r"(?:mce: )?\[Hardware Error\]: (?P<device>CPU \d+): Machine Check(?: Exception)?: \w+ Bank \d+: "
# With the number of the record, but for those of the boot before (BERT).
_CPER = r"(?:\{\d+\})?\[Hardware Error\]: event severity: "
_WATCHDOG = r"(?:(?:NMI )?watchdog: )?"
_EDAC = r"EDAC MC\d+: (?P<times>\d+) {kind} (?=\w).*?\bon (?P<device>.+?) \("

TABLE = (
    # mce: [Hardware Error]: CPU 0: Machine Check: 0 Bank 4: a600000000020408
    # arch/x86/kernel/cpu/mce/core.c, print_mce; github.com/andikleen/mcelog issue 70. Bit 61 of the status says that it
    # was not corrected: MCI_STATUS_UC of arch/x86/include/asm/mce.h.
    _row("machine_check", CONDEMNS, CONDEMNS, _MCE + r"[abefABEF]\w{15}"),
    # mce: [Hardware Error]: CPU 2: Machine Check: 0 Bank 5: 8c00004000010092
    _row("machine_check_corrected", SHOWN, SHOWN, _MCE + r"\w{16}"),
    # {1}[Hardware Error]: event severity: fatal
    # drivers/firmware/efi/cper.c, cper_estatus_print: what the firmware tells (APEI), also of the boot before (BERT)
    _row("machine_check", CONDEMNS, CONDEMNS, _CPER + "(?:fatal|recoverable)"),
    _row("machine_check_corrected", SHOWN, SHOWN, _CPER + "corrected"),
    # EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0 (channel:0 slot:0 page:0xe16677 offset:0x0 ...
    # drivers/edac/edac_mc.c; github.com/andikleen/mcelog issue 74
    _row("dimm_uncorrected", CONDEMNS, CONDEMNS, _EDAC.replace("{kind}", "UE")),
    # EDAC MC1: 262 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x2031c14 ...
    # github.com/illinois-scicomp/machine-shop-maintenance issue 66
    _row("dimm_corrected", SHOWN, SHOWN, _EDAC.replace("{kind}", "CE")),
    # Memory failure: 0x1ae83a4: recovery action for dirty LRU page: Recovered
    # mm/memory-failure.c: a page that the processor found poisoned
    _row("dimm_uncorrected", CONDEMNS, CONDEMNS, r"Memory failure: 0x[0-9a-f]+: recovery action for"),
    # pcieport 0000:00:03.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Requester ID)
    # drivers/pci/pcie/aer.c, aer_print_error; github.com/rwth-i6/returnn issue 1500, above a GPU that was lost
    _row("pcie_error_logged", CONDEMNS, CONDEMNS,
         _OF_PCI + r"PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Fatal\)"),
    # pcieport 0000:80:1b.4: PCIe Bus Error: severity=Uncorrectable (Non-Fatal), type=Transaction Layer, (Receiver ID)
    # github.com/minisforum-docs/MS-02-Ultra issue 10. Probing for devices at boot gives such errors too.
    _row("pcie_error_logged", SHOWN, CONDEMNS,
         _OF_PCI + r"PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Non-Fatal\)"),
    # nvidia 0000:07:00.0: PCIe Bus Error: severity=Correctable, type=Data Link Layer, (Transmitter ID)
    # github.com/pop-os/pop issue 3363; older kernels say "Corrected"
    _row("pcie_corrected_logged", SHOWN, SHOWN, _OF_PCI + r"PCIe Bus Error: severity=Correct(?:ed|able)"),
    # pcieport 0000:00:1c.0: DPC: containment event, status:0x1f01 source:0x0000
    # drivers/pci/pcie/dpc.c: a port has cut off all that is below it
    _row("pcie_error_logged", CONDEMNS, CONDEMNS, _OF_PCI + r"DPC: containment event"),
    # watchdog: BUG: soft lockup - CPU#18 stuck for 27s! [python3:2254956]
    # kernel/watchdog.c; github.com/leptonai/gpud components/cpu/kmsg_matcher.go. Also where a hypervisor stood still.
    _row("hung_task", SHOWN, CONDEMNS, _WATCHDOG + r"BUG: soft lockup - CPU#\d+ stuck for"),
    # watchdog: Watchdog detected hard LOCKUP on cpu 3
    # kernel/watchdog.c; since Linux 6.6 "watchdog: CPU5: Watchdog detected ...", by whom it was seen
    _row("hung_task", CONDEMNS, CONDEMNS, _WATCHDOG + r"(?:CPU\d+: )?Watchdog detected hard LOCKUP on cpu \d+"),
    # rcu: INFO: rcu_preempt self-detected stall on CPU
    # kernel/rcu/tree_stall.h; github.com/oxidecomputer/propolis issue 1153. "expedited" ones come after milliseconds
    # on some kernels (github.com/lkrg-org/lkrg issue 189), and are none.
    _row("hung_task", SHOWN, CONDEMNS, r"(?:rcu: )?INFO: rcu_\w+ (?:self-)?detected stalls? on CPU"),
    # INFO: task jfsmount:136986 blocked for more than 120 seconds.
    # kernel/hung_task.c; github.com/leptonai/gpud components/cpu/kmsg_matcher.go; newer kernels: "blocked in I/O wait".
    # The name of a task has 15 letters, and one that cannot be printed is "\x0a" in /dev/kmsg.
    _row("hung_task", SHOWN, CONDEMNS,
         r"INFO: task (?:\\x\w\w|[^\\]){1,15}:\d+ blocked (?:in I/O wait )?for more than \d+ seconds"),
    # nvme nvme4: I/O tag 22 (2016) opcode 0x2 (Admin Cmd) QID 0 timeout, reset controller
    # drivers/nvme/host/pci.c, nvme_timeout; github.com/leptonai/gpud components/disk/kmsg_matcher.go. A "completion
    # polled" lost an interrupt and no data, and is none.
    _row("disk_failing", CONDEMNS, CONDEMNS,
         r"nvme (?P<device>nvme\d+): I/O (?:tag )?\d+ .*timeout, (?:reset|disable) controller"),
    # nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10
    # drivers/nvme/host/pci.c, nvme_warn_reset; github.com/raspberrypi/linux issue 6661
    _row("disk_failing", CONDEMNS, CONDEMNS, r"nvme (?P<device>nvme\d+): controller is down; will reset"),
    # nvme nvme4: Disabling device after reset failure: -19
    # nvme nvme1: Removing after probe failure status: -5
    # drivers/nvme/host/pci.c; gpud as above, github.com/snu-csl/nvmevirt issue 34
    _row("disk_failing", CONDEMNS, CONDEMNS,
         r"nvme (?P<device>nvme\d+): (?:Disabling device after reset failure|Removing after probe failure)"),
    # I/O error, dev nvme0n1, sector 131209936 op 0x0:(READ) flags 0x80700 phys_seg 25 prio class 0
    # print_req_error: critical medium error, dev sdf, sector 1811939592
    # block/blk-mq.c, blk_print_req_error; github.com/oxidecomputer/crucible issue 1844, longhorn/longhorn issue 2775.
    # Disks may refuse to discard or to write zeroes, and are told not to be asked again.
    _row("disk_failing", CONDEMNS, CONDEMNS,
         r"(?:(?:end_request|blk_update_request|print_req_error): )?(?:I/O|critical medium) error, "
         rf"dev {_DISK}, sector \d+\b(?! op 0x\w+:\((?:DISCARD|WRITE_ZEROES|SECURE_E))"),
    # Buffer I/O error on dev nvme0n1p1, logical block 121667584, lost sync page write
    # fs/buffer.c; github.com/Joshua-Riek/ubuntu-rockchip issue 970
    _row("disk_failing", CONDEMNS, CONDEMNS, rf"Buffer I/O error on dev(?:ice)? {_DISK}, logical block"),
    # md/raid0md0: Disk failure on nvme0n1p1 detected, failing array.
    # drivers/md; gpud as above
    _row("disk_failing", CONDEMNS, CONDEMNS, rf"md/raid\S+ Disk failure on {_DISK}"),
    # block nvme0n1: no available path - failing I/O
    # drivers/nvme/host/multipath.c; gpud as above
    _row("disk_failing", CONDEMNS, CONDEMNS, r"block (?P<device>nvme\w+): no available path - failing I/O"),
    # EXT4-fs (nvme0n1p1): Remounting filesystem read-only
    # fs/ext4/super.c, ext4_handle_error; github.com/Joshua-Riek/ubuntu-rockchip issue 970
    _row("file_system_failed", CONDEMNS, CONDEMNS, rf"EXT4-fs \({_DISK}\): Remounting filesystem read-only"),
    # EXT4-fs error (device nvme0n1p1): __ext4_find_entry:1588: inode #43: comm gmain: reading directory lblock 0
    # fs/ext4/super.c, __ext4_error; github.com/oxidecomputer/crucible issue 1572
    _row("file_system_failed", CONDEMNS, CONDEMNS, rf"EXT4-fs error \(device {_DISK}\)"),
    # XFS (dm-4): I/O Error Detected. Shutting down filesystem
    # fs/xfs/xfs_fsops.c, xfs_do_force_shutdown; github.com/kubernetes/node-problem-detector pull request 845. Without
    # "User initiated shutdown received", which somebody asked for.
    _row("file_system_failed", CONDEMNS, CONDEMNS,
         rf"XFS \({_DISK}\): (?:Corruption|(?:[Ll]og |Metadata )?I/O [Ee]rror|Filesystem has been shut down due to)"),
    # BTRFS info (device nvme0n1p3 state EA): forced readonly
    # fs/btrfs/messages.c, __btrfs_handle_fs_error
    _row("file_system_failed", CONDEMNS, CONDEMNS, rf"BTRFS \w+ \(device {_DISK}[^)]*\): forced readonly"),
    # oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/init.scope,...
    # mm/oom_kill.c, dump_oom_summary (since Linux 5.0); github.com/0jc1/py-autovod issue 7. What follows the constraint
    # has names in it that users choose (of groups, of the task), so that only the constraint says whose memory it was.
    _row("host_out_of_memory", SHOWN, CONDEMNS, r"oom-kill:constraint=CONSTRAINT_(?!MEMCG,)\w+,"),
    # oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=...,oom_memcg=/kubepods.slice/...,task_memcg=...
    # github.com/leptonai/gpud pull request 70. Of which control group: of_group(); none if it seems named twice
    _row("host_out_of_memory", SHOWN, CONDEMNS,
         r"oom-kill:constraint=CONSTRAINT_MEMCG,(?!.*oom_memcg=.*oom_memcg=).*,oom_memcg=(?P<device>.+),task_memcg="),
    # mlx5_core 0000:5c:00.0: mlx5_pcie_event:299:(pid 268269): Detected insufficient power on the PCIe slot (27W).
    # drivers/net/ethernet/mellanox/mlx5/core/events.c; github.com/leptonai/gpud issue 348
    _row("nic_underpowered", CONDEMNS, CONDEMNS, _MLX5 + r"Detected insufficient power on the PCIe slot"),
    # mlx5_core 0000:41:00.0: temp_warn:170:(pid 0): High temperature on sensors with bit set 0 1
    # core/events.c, temp_warn, of an adapter whose firmware gave up 80 s later and which was gone after 154 s
    _row("nic_too_hot", CONDEMNS, CONDEMNS, _MLX5 + r"High temperature on sensors"),
    # mlx5_core 0000:5c:00.0: Port module event[error]: module 0, Cable error, High Temperature
    # core/events.c, port_module; github.com/leptonai/gpud components/accelerator/nvidia/infiniband/kmsg_matcher.go
    _row("nic_too_hot", CONDEMNS, CONDEMNS, _MLX5 + r"Port module event\[error\]: .*High Temperature"),
    _row("nic_underpowered", CONDEMNS, CONDEMNS, _MLX5 + r"Port module event\[error\]: .*Power budget exceeded"),
    # mlx5_core 0000:41:00.0: poll_health:471:(pid 0): device's health compromised - reached miss count
    # mlx5_core 0000:41:00.0: poll_health:478:(pid 0): Fatal error 1 detected
    # core/health.c, the same adapter
    _row("nic_firmware_failed", CONDEMNS, CONDEMNS,
         _MLX5 + r"(?:device's health compromised|Fatal error \d+ detected|health recovery flow aborted)"),
    # mlx5_core 0000:5c:00.0: print_health_info:500:(pid 0): Health issue observed, firmware internal error,
    # severity(3) ERROR: -- core/health.c, print_health_info; below 4 is an error or worse (include/linux/kern_levels.h)
    _row("nic_firmware_failed", CONDEMNS, CONDEMNS, _MLX5 + r"Health issue observed, .*severity\([0-3]\)"),
    # mce: CPU1: Package temperature above threshold, cpu clock throttled (total events = 12705)
    # drivers/thermal/intel/therm_throt.c; github.com/erpalma/throttled issue 239
    _row("processor_throttled", SHOWN, CONDEMNS,
         r"(?:mce: )?CPU\d+: (?:Core|Package) temperature (?:is )?above threshold, cpu clock"),
)  # fmt: skip


@dataclass(frozen=True)
class HostMessage:
    """A message about the host, with all others of its kind about the same device. `device`: as the kernel calls it,
    "" for the machine. `line`: the first. `first`, `last`: seconds since boot, None where the log has no times.
    `before`, `during`: of its Row. `gpus`: the PCI bus ids of GPUs that are this device, or are below it."""

    code: str
    device: str
    line: str
    before: bool
    during: bool
    times: int = 1
    first: float | None = None
    last: float | None = None
    gpus: tuple[str, ...] = ()


def recognised(line: str, at: float | None = None) -> HostMessage | None:
    """What a line of the kernel log says of the host, if it is one of TABLE."""
    if not any(word in line for word in WORDS):
        return None
    for row in TABLE:
        if told := row.pattern.match(line):
            groups = told.groupdict()
            device, times = groups.get("device") or "", int(groups.get("times") or 1)
            return HostMessage(row.code, device, line[:LONGEST_LINE], row.before, row.during, times, at, at)
    return None


def of_group(message: HostMessage, own: str) -> HostMessage:
    """What happened in the memory of a control group is told against this machine only if the processes of the run
    (`own`: their group, "/" where a container hides it) are in it: other containers have limits of their own."""
    group = message.device
    ours = own.rstrip("/") and f"{own}/".startswith(f"{group.rstrip('/')}/")
    return message if message.code != "host_out_of_memory" or not group or ours else replace(message, during=False)


class Gathered:
    """Messages by their kind and device: however many there are, each costs what one costs."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, bool, bool, str], HostMessage] = {}
        self._devices: dict[str, int] = {}

    def take(self, messages: Iterable[HostMessage]) -> None:
        for message in messages:
            key = (message.code, message.before, message.during, message.device)
            if key not in self._found:
                self._devices[message.code] = self._devices.get(message.code, 0) + 1
                if self._devices[message.code] > MOST_DEVICES:
                    message = replace(message, device="")
                    key = (*key[:3], "")
            known = self._found.get(key)
            if known:
                message = replace(known, times=known.times + message.times, last=message.last)
            self._found[key] = message

    def all(self) -> tuple[HostMessage, ...]:
        return tuple(self._found.values())


# XIDs and SXids: the errors of GPUs and of NVSwitches that the NVIDIA driver writes into the kernel log, what they
# mean and what to do.
#
# Actions are those of NVIDIA's XID catalogue, in xid_table.json with its origin and date; `python
# docs/make_xid_table.py` writes it. Meanings are ours, in xid_meanings.json. An SXid says itself whether it is fatal.

XID_TABLE, XID_MEANINGS = (Path(__file__).with_name(f"xid_{what}.json") for what in ("table", "meanings"))

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
    told: dict[str, Any] = json.loads(XID_TABLE.read_text(encoding="utf-8"))
    return told


@cache
def meanings() -> dict[int, str]:
    """What an XID means, by its number, as far as we know it."""
    return {int(number): meaning for number, meaning in json.loads(XID_MEANINGS.read_text(encoding="utf-8")).items()}


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
        meaning = meanings().get(self.number, UNUSED if known else "see NVIDIA's XID catalogue")
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

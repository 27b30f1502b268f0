"""What the kernel writes into its log when something of the host is wrong: processors and their memory, PCIe, disks,
network adapters. XIDs are in xid_catalogue.py.

A row says by what a line is known, what kind of fault it tells of, and whether that condemns the machine: if it stood
in the log before the run, and if it comes while the run goes on. What does not condemn is shown. Errors that nobody
could correct condemn whenever they came. What a machine that waits for its acceptance may have met without being
broken (a stall while it moved to another hypervisor, a full memory, a hot day) condemns only during the run, and what
was corrected does not at all: how often that may be is judged by counters, which count what the log leaves out.

Above each row stands a line as it was really written, and where. Names of files are those of the Linux kernel's
sources that write it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

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
    "blocked for more", "nvme", "I/O error", "error, dev", "Disk failure", "EXT4-fs", "XFS (", "BTRFS", "oom-kill:",
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

TABLE = (
    # mce: [Hardware Error]: CPU 0: Machine Check: 0 Bank 4: a600000000020408
    # arch/x86/kernel/cpu/mce/core.c, print_mce; github.com/andikleen/mcelog issue 70. Bit 61 of the status says that it
    # was not corrected: MCI_STATUS_UC of arch/x86/include/asm/mce.h.
    _row("machine_check", CONDEMNS, CONDEMNS,
         r"\[Hardware Error\]: (?P<device>CPU \d+): Machine Check(?: Exception)?: \w+ Bank \d+: [abefABEF]\w{15}"),
    # mce: [Hardware Error]: CPU 2: Machine Check: 0 Bank 5: 8c00004000010092
    _row("machine_check_corrected", SHOWN, SHOWN,
         r"\[Hardware Error\]: (?P<device>CPU \d+): Machine Check(?: Exception)?: \w+ Bank \d+: \w{16}"),
    # {1}[Hardware Error]: event severity: fatal
    # drivers/firmware/efi/cper.c, cper_estatus_print: what the firmware tells (APEI), also of the boot before (BERT)
    _row("machine_check", CONDEMNS, CONDEMNS, r"\[Hardware Error\]: event severity: (?:fatal|recoverable)"),
    _row("machine_check_corrected", SHOWN, SHOWN, r"\[Hardware Error\]: event severity: corrected"),
    # EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0 (channel:0 slot:0 page:0xe16677 offset:0x0 ...
    # drivers/edac/edac_mc.c; github.com/andikleen/mcelog issue 74
    _row("dimm_uncorrected", CONDEMNS, CONDEMNS, r"EDAC MC\d+: (?P<times>\d+) UE .*?\bon (?P<device>.+?) \("),
    # EDAC MC1: 262 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x2031c14 ...
    # github.com/illinois-scicomp/machine-shop-maintenance issue 66
    _row("dimm_corrected", SHOWN, SHOWN, r"EDAC MC\d+: (?P<times>\d+) CE .*?\bon (?P<device>.+?) \("),
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
    _row("host_stalled", SHOWN, CONDEMNS, r"BUG: soft lockup - CPU#\d+ stuck for"),
    # watchdog: Watchdog detected hard LOCKUP on cpu 3
    # kernel/watchdog.c; older kernels say "NMI watchdog: ..."
    _row("host_stalled", CONDEMNS, CONDEMNS, r"Watchdog detected hard LOCKUP on cpu \d+"),
    # rcu: INFO: rcu_preempt self-detected stall on CPU
    # kernel/rcu/tree_stall.h; github.com/oxidecomputer/propolis issue 1153. "expedited" ones come after milliseconds
    # on some kernels (github.com/lkrg-org/lkrg issue 189), and are none.
    _row("host_stalled", SHOWN, CONDEMNS, r"INFO: rcu_\w+ (?:self-)?detected stalls? on CPU"),
    # INFO: task jfsmount:136986 blocked for more than 120 seconds.
    # kernel/hung_task.c; github.com/leptonai/gpud components/cpu/kmsg_matcher.go
    _row("host_stalled", SHOWN, CONDEMNS, r"INFO: task .+ blocked for more than \d+ seconds"),
    # nvme nvme4: I/O tag 22 (2016) opcode 0x2 (Admin Cmd) QID 0 timeout, reset controller
    # drivers/nvme/host/pci.c, nvme_timeout; github.com/leptonai/gpud components/disk/kmsg_matcher.go. A "completion
    # polled" lost an interrupt and no data, and is none.
    _row("disk_failing", CONDEMNS, CONDEMNS,
         r"nvme (?P<device>nvme\d+): I/O .*timeout, (?:reset|disable) controller"),
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
         rf"(?:I/O|critical medium) error, dev {_DISK}, sector \d+\b(?! op 0x\w+:\((?:DISCARD|WRITE_ZEROES|SECURE_E))"),
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
    _row("file_system_failed", CONDEMNS, CONDEMNS, rf"BTRFS \w+ \(device {_DISK}[^)]*\): .*forced readonly"),
    # oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/init.scope,...
    # mm/oom_kill.c, dump_oom_summary (since Linux 5.0); github.com/0jc1/py-autovod issue 7
    _row("host_out_of_memory", SHOWN, CONDEMNS, r"oom-kill:constraint=\w+,.*,global_oom,"),
    # oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=...,oom_memcg=/kubepods.slice/...,task_memcg=...
    # github.com/leptonai/gpud pull request 70. Of which control group: of_group()
    _row("host_out_of_memory", SHOWN, CONDEMNS, r"oom-kill:constraint=CONSTRAINT_MEMCG,.*oom_memcg=(?P<device>[^,]+),"),
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
    _row("processor_throttled", SHOWN, CONDEMNS, r"(?:Core|Package) temperature (?:is )?above threshold, cpu clock"),
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

    def and_then(self, later: HostMessage) -> HostMessage:
        """This one, and a later one of the same kind, as one."""
        return replace(self, times=self.times + later.times, last=later.last)


def recognised(line: str, at: float | None = None) -> HostMessage | None:
    """What a line of the kernel log says of the host, if it is one of TABLE."""
    if not any(word in line for word in WORDS):
        return None
    for row in TABLE:
        if told := row.pattern.search(line):
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
            self._add(message)

    def _add(self, message: HostMessage) -> None:
        key = (message.code, message.before, message.during, message.device)
        if key not in self._found:
            self._devices[message.code] = self._devices.get(message.code, 0) + 1
            if self._devices[message.code] > MOST_DEVICES:
                message = replace(message, device="")
                key = (*key[:3], "")
        known = self._found.get(key)
        self._found[key] = known.and_then(message) if known else message

    def all(self) -> tuple[HostMessage, ...]:
        return tuple(self._found.values())

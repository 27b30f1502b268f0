"""What the kernel log says of the host, and XIDs and SXids. The lines of the host are those of machine/kernel_log.py,
whose comments say where each was really written; those of healthy machines have their origin beside them."""

import json
from dataclasses import replace
from unittest.mock import Mock

import pytest

from pytest_gpufleet.machine import kernel_log
from pytest_gpufleet.machine.kernel_log import TABLE, KernelLog, Logged, Xid, judged, of_the_host, parse, recognised
from pytest_gpufleet.model.fault import CODES, Fault
from pytest_gpufleet.model.place import THIS_NODE, Gpu, gpu as gpu_place
from pytest_gpufleet.verdict.accusations import explaining
from tests.machine.trees import written

# Line, kind, device, whether it condemns: if it was there before the run, if it comes in it.
LINES = [
    ("mce: [Hardware Error]: CPU 0: Machine Check: 0 Bank 4: a600000000020408", "machine_check", "CPU 0", True, True),
    ("mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: 8c00004000010092", "machine_check_corrected", "CPU 3",
     False, False),
    # edac_mce_amd, where it is loaded, writes these instead: EPYC 7001, and BurntSushi/ripgrep
    ("[Hardware Error]: CPU:7 (17:1:1) MC0_STATUS[-|UE|MiscV|AddrV|-|-|-|UECC|-|Poison|-]: 0xbc002800000c0135",
     "machine_check", "CPU:7", True, True),
    ("[Hardware Error]: CPU:2 (19:21:0) MC5_STATUS[-|UE|MiscV|AddrV|PCC|TCC|SyndV|-|-|-]: 0xbea0000001000108",
     "machine_check", "CPU:2", True, True),
    ("[Hardware Error]: CPU:0 (17:1:1) MC15_STATUS[Over|CE|MiscV|AddrV|-|-|SyndV|CECC|-|-|-]: 0xdc2040000000011b",
     "machine_check_corrected", "CPU:0", False, False),
    ("{2}[Hardware Error]: event severity: recoverable", "machine_check", "", True, True),
    ("{3}[Hardware Error]: event severity: corrected", "machine_check_corrected", "", False, False),
    ("[Hardware Error]: event severity: fatal", "machine_check", "", True, True),  # of the boot before
    ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0 (channel:0 slot:0 page:0xe16677 offset:0x0 "
     "grain:32 -  err_code:0000:009f socket:0 imc:0 rank:0 bg:0 ba:3 row:dad3 col:3c0)", "dimm_uncorrected",
     "CPU_SrcID#0_MC#0_Chan#0_DIMM#0", True, True),
    ("EDAC MC0: 1 UE unknown on unknown memory ( page:0x116c60 offset:0x0 grain:1 - APEI location: )",
     "dimm_uncorrected", "unknown memory", True, True),
    ("EDAC MC1: 262 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x2031c14 "
     "offset:0x940 grain:32 syndrome:0x0 -  OVERFLOW area:DRAM err_code:0001:0091 socket:0 ha:0 channel_mask:2 rank:1)",
     "dimm_corrected", "CPU_SrcID#0_Ha#0_Chan#1_DIMM#0", False, False),
    ("Memory failure: 0x1850602: recovery action for dax page: Recovered", "dimm_uncorrected", "", True, True),
    ("pcieport 0000:00:03.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Requester ID)",
     "pcie_error_logged", "pcieport 0000:00:03.0", True, True),
    ("pcieport 0000:80:1b.4: PCIe Bus Error: severity=Uncorrectable (Non-Fatal), type=Transaction Layer, (Receiver ID)",
     "pcie_error_logged", "pcieport 0000:80:1b.4", False, True),
    ("pcieport 0000:00:01.1: AER: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Receiver ID)",
     "pcie_corrected_logged", "pcieport 0000:00:01.1", False, False),
    ("nvidia 0000:07:00.0: PCIe Bus Error: severity=Correctable, type=Data Link Layer, (Transmitter ID)",
     "pcie_corrected_logged", "nvidia 0000:07:00.0", False, False),
    ("pcieport 0000:30:03.0: DPC: containment event, status:0x0005 source:0x3400", "pcie_error_logged",
     "pcieport 0000:30:03.0", True, True),
    ("NVRM: GPU 0000:91:00.0: GPU has fallen off the bus.", "gpu_lost", "0000:91:00.0", True, True),
    ("NVRM: GPU 0000:98:00.0: RmInitAdapter failed! (0x62:0x65:1792)", "gpu_lost", "0000:98:00.0", True, True),
    ("NVRM: RmInitAdapter failed! (0x27:0x38:1193)", "gpu_lost", "", True, True),
    (r"NVRM: The NVIDIA GPU 0000:b3:00.0\x0aNVRM: (PCI ID: 10de:26b5) installed in this system has\x0aNVRM: fallen off "
     "the bus and is not responding to commands.", "gpu_lost", "0000:b3:00.0", True, True),
    ("watchdog: BUG: soft lockup - CPU#18 stuck for 27s! [python3:2254956]", "hung_task", "", False, True),
    ("watchdog: Watchdog detected hard LOCKUP on cpu 3", "hung_task", "", True, True),
    ("NMI watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [nvidia-smi:1]", "hung_task", "", False, True),
    ("watchdog: CPU3: Watchdog detected hard LOCKUP on cpu 3", "hung_task", "", True, True),
    ("rcu: INFO: rcu_preempt self-detected stall on CPU", "hung_task", "", False, True),
    ("rcu: INFO: rcu_sched detected stalls on CPUs/tasks:", "hung_task", "", False, True),
    ("INFO: task jfsmount:136986 blocked for more than 120 seconds.", "hung_task", "", False, True),
    ("INFO: task kworker/u64:3:28 blocked in I/O wait for more than 122 seconds.", "hung_task", "", False, True),
    (r"INFO: task a\xc3\xa4 b:7:286 blocked for more than 120 seconds.", "hung_task", "", False, True),
    ("nvme nvme1: I/O 12 QID 3 timeout, disable controller", "disk_failing", "nvme1", True, True),
    ("nvme nvme4: I/O tag 22 (2016) opcode 0x2 (Admin Cmd) QID 0 timeout, reset controller", "disk_failing", "nvme4",
     True, True),
    ("nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10", "disk_failing", "nvme0", True,
     True),
    ("nvme nvme4: Disabling device after reset failure: -19", "disk_failing", "nvme4", True, True),
    ("nvme nvme1: Removing after probe failure status: -5", "disk_failing", "nvme1", True, True),
    ("I/O error, dev nvme0n1, sector 131209936 op 0x0:(READ) flags 0x80700 phys_seg 25 prio class 0", "disk_failing",
     "nvme0n1", True, True),
    ("blk_update_request: I/O error, dev sdb, sector 8 op 0x1:(WRITE) flags 0x0", "disk_failing", "sdb", True, True),
    ("print_req_error: critical medium error, dev sdf, sector 1811939592", "disk_failing", "sdf", True, True),
    ("Buffer I/O error on dev nvme0n1p1, logical block 121667584, lost sync page write", "disk_failing", "nvme0n1p1",
     True, True),
    ("md/raid0md0: Disk failure on nvme0n1p1 detected, failing array.", "disk_failing", "nvme0n1p1", True, True),
    ("block nvme0n1: no available path - failing I/O", "disk_failing", "nvme0n1", True, True),
    ("EXT4-fs (nvme0n1p1): Remounting filesystem read-only", "file_system_failed", "nvme0n1p1", True, True),
    ("EXT4-fs (nvme0n1p1): I/O error while writing superblock", "file_system_failed", "nvme0n1p1", True, True),
    ("EXT4-fs error (device nvme0n1p1): __ext4_find_entry:1588: inode #43: comm gmain: reading directory lblock 0",
     "file_system_failed", "nvme0n1p1", True, True),
    ("XFS (dm-4): I/O Error Detected. Shutting down filesystem", "file_system_failed", "dm-4", True, True),
    ("XFS (sdb6): log I/O error -5", "file_system_failed", "sdb6", True, True),
    ("XFS (dm-4): Corruption detected. Unmount and run xfs_repair", "file_system_failed", "dm-4", True, True),
    ("BTRFS info (device nvme1n2: state EA): forced readonly", "file_system_failed", "nvme1n2", True, True),
    ("oom-kill:constraint=CONSTRAINT_CPUSET,nodemask=0", "host_out_of_memory", "", False, True),
    ("oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/init.scope,"
     "task=python,pid=7899,uid=0", "host_out_of_memory", "", False, True),
    ("mlx5_core 0000:5c:00.0: mlx5_pcie_event:299:(pid 268269): Detected insufficient power on the PCIe slot (27W).",
     "nic_underpowered", "mlx5_core 0000:5c:00.0", False, True),
    ("mlx5_core 0000:41:00.0: temp_warn:170:(pid 0): High temperature on sensors with bit set 0 1", "nic_too_hot",
     "mlx5_core 0000:41:00.0", True, True),
    ("mlx5_core 0000:5c:00.0: Port module event[error]: module 0, Cable error, High Temperature", "nic_too_hot",
     "mlx5_core 0000:5c:00.0", True, True),
    ("mlx5_core 0000:5c:00.0: Port module event[error]: module 0, Cable error, Power budget exceeded",
     "nic_underpowered", "mlx5_core 0000:5c:00.0", True, True),
    ("mlx5_core 0000:41:00.0: poll_health:471:(pid 0): device's health compromised - reached miss count",
     "nic_firmware_failed", "mlx5_core 0000:41:00.0", True, True),
    ("mlx5_core 0000:41:00.0: poll_health:478:(pid 0): Fatal error 1 detected", "nic_firmware_failed",
     "mlx5_core 0000:41:00.0", True, True),
    ("mlx5_core 0000:41:00.0: print_health_info:500:(pid 0): Health issue observed, firmware internal error, "
     "severity(3) ERROR:", "nic_firmware_failed", "mlx5_core 0000:41:00.0", True, True),
    ("mlx5_core 0000:01:00.0: wait_func_handle_exec_timeout:1122:(pid 3202): cmd[0]: DESTROY_EQ(0x302) timeout. Will "
     "cause a leak of a command resource", "nic_firmware_failed", "mlx5_core 0000:01:00.0", True, True),
    ("infiniband rdmap0s6: Admin queue is closed", "nic_firmware_failed", "infiniband rdmap0s6", True, True),
    ("efa 0000:53:00.0: Device isn't ready, abort com init", "nic_firmware_failed", "efa 0000:53:00.0", True, True),
    ("mlx5_core 0000:01:00.0 enp1s0f0np0: Link down", "network_link_flaps", "mlx5_core 0000:01:00.0 enp1s0f0np0", True,
     False),
    ("bnxt_en 0000:19:00.0 enp25s0f0np0: NIC Link is Down", "network_link_flaps", "bnxt_en 0000:19:00.0 enp25s0f0np0",
     True, False),
    ("mce: CPU1: Package temperature above threshold, cpu clock throttled (total events = 12705)",
     "processor_throttled", "", False, True),
    ("CPU7: Core temperature is above threshold, cpu clock is throttled (total events = 219)",
     "processor_throttled", "", False, True),
]  # fmt: skip

# What healthy machines write, and what looks like one of the above and is none.
HEALTHY = [
    "EDAC MC0: Giving out device to module i10nm_edac controller Intel_10nm Socket#0 IMC#0: DEV 0000:7e:0c.0",
    "EDAC sbridge MC1: HANDLING MCE MEMORY ERROR",  # beside the line that counts: radiasoft/devops issue 134
    "mce: [Hardware Error]: Machine check events logged",
    "mce: CPU2: Core temperature/speed normal",  # erpalma/throttled issue 186
    "pcieport 0000:00:00.0: AER: enabled with IRQ 59",
    "pcieport 0000:00:1c.5: AER: Multiple Corrected error received: 0000:02:00.0",  # the device's own line follows
    "acpi PNP0A08:00: _OSC: OS now controls [PCIeHotplug SHPCHotplug PME AER PCIeCapability LTR DPC]",
    "pcieport 0000:00:1b.0: DPC: error containment capabilities: Int Msg #0, RPExt+ PoisonedTLP+ SwTrigger+",
    "nvme nvme0: I/O 12 QID 3 timeout, completion polled",
    "Freezing of tasks failed after 20.004 seconds (1 tasks refusing to freeze, wq_busy=0):",
    "rcu: INFO: rcu_preempt detected expedited stalls on CPUs/tasks: { 0-... } 6 jiffies s: 85 root: 0x1/.",
    "EXT4-fs (nvme0n1p5): re-mounted. Opts: errors=remount-ro. Quota mode: none.",  # hamonikr-system issue 13
    "EXT4-fs (nvme0n1p3): mounted filesystem 08870205-494a-4ccd-a77b-5d0acea2400f ro with ordered data mode.",
    "XFS (sdb): User initiated shutdown received.",
    "I/O error, dev sr0, sector 0 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 0",
    "I/O error, dev loop1, sector 8 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 0",
    "blk_update_request: I/O error, dev fd0, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 0",
    "I/O error, dev nvme0n1, sector 8 op 0x9:(WRITE_ZEROES) flags 0x0 phys_seg 0 prio class 0",
    "critical target error, dev nvme1n1, sector 8 op 0x3:(DISCARD) flags 0x800 phys_seg 1 prio class 0",
    # of every DGX with a ConnectX-7 whose functions are not all the host's: leptonai/gpud issue 1164
    "mlx5_core 0000:d2:00.0: mlx5_cmd_out_err:838:(pid 268269): ACCESS_REG(0x805) op_mod(0x1) failed, status bad "
    "resource(0x5), syndrome (0x305684), err(-22)",
    # NVIDIA/gpu-operator issue 2511
    "mlx5_core 0000:13:00.0: mlx5_pcie_event:297:(pid 11): PCIe slot power capability was not advertised.",
    "mlx5_core 0000:5c:00.0: Port module event: module 0, Cable plugged",
    "ena 0000:00:05.0 eth0: Admin queue is closed",  # as NVSentinel rejects it
    "mlx5_core 0000:5c:00.0: print_health_info:500:(pid 0): Health issue observed, clock error, severity(4) WARNING:",
    "NVRM: Xid (PCI:0000:1b:00): 79, pid=7, GPU has fallen off the bus.",
]


@pytest.mark.parametrize(("line", "code", "device", "before", "during"), LINES, ids=range(len(LINES)))
def test_what_is_wrong_with_the_host_is_recognised(line, code, device, before, during):
    (message,) = of_the_host(f"4,1234,5140900000,-;{line}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:5c:00.0\n")
    found = (message.code, message.device, message.before, message.during)
    assert found == (code, device, before, during)
    assert (message.line, message.first, message.last) == (line[:300], 5140.9, 5140.9)


def of_firmware(severity, *section, begin="{1}"):
    """A record that the firmware gave to the kernel, which writes it line by line."""
    texts = (f"event severity: {severity}", f" Error 0, type: {severity}", *(f"  {each}" for each in section))
    return [
        f"{begin}[Hardware Error]: {text}"
        for text in ("Hardware error from APEI Generic Hardware Error Source: 1", *texts)
    ]


# intel-wired-lan, "ice: Fix ice module unload"; of the boot before; the one of RTX PRO 6000; nodejs/build issue 2894
PORT = ("section_type: PCIe error", "port_type: 4, root port", "version: 3.0", "device_id: 0000:c9:02.0", "slot: 25",
        "vendor_id: 0x8086, device_id: 0x347a")  # fmt: skip
MEMORY = ("section_type: memory error", "physical_address: 0x0000000116c60000", "DIMM location: BANK_0 DIMM_A1")
RECORDS = [
    (of_firmware("recoverable", *PORT), "pcie_error_logged", "0000:c9:02.0", False, True),
    (of_firmware("fatal", *PORT, begin=""), "pcie_error_logged", "0000:c9:02.0", True, True),
    (of_firmware("corrected", *PORT), "pcie_corrected_logged", "0000:c9:02.0", False, False),
    (of_firmware("recoverable", *MEMORY), "dimm_uncorrected", "BANK_0 DIMM_A1", True, True),
    (of_firmware("corrected", MEMORY[0]), "dimm_corrected", "", False, False),
    (of_firmware("recoverable", "section_type: ARM processor error"), "machine_check", "", True, True),
    (of_firmware("corrected", "section type: unknown, e8ed898d-df16-43cc-8ecc"), "machine_check_corrected", "", False,
     False),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "code", "device", "before", "during"), RECORDS, ids=range(len(RECORDS)))
def test_a_record_of_the_firmware_is_about_what_its_section_says(lines, code, device, before, during):
    """Also where another one follows, and another line comes between."""
    again = of_firmware("corrected", "section_type: IA32/X64 processor error", begin="{2}")
    found = list(of_the_host("\n".join(f"0,1,7000000,-;{line}" for line in (*lines, "eth0: up", *lines, *again))))
    first, second, other = ((each.code, each.device, each.before, each.during) for each in found)
    assert first == second == (code, device, before, during)
    assert (found[0].first, other[0], found[2].line.count("\n")) == (7.0, "machine_check_corrected", 0)


def test_every_row_of_the_table_was_seen_to_match():
    lines = [*(line for line, *_ in LINES), CONTAINER, *(line for lines, *_ in RECORDS for _, line in kernel_log.joined(
        (None, line) for line in lines
    ))]  # fmt: skip
    matched = {next((pattern for pattern, _ in TABLE if pattern.match(line)), None) for line in lines}
    assert [pattern.pattern for pattern, _ in TABLE if pattern not in matched] == []


@pytest.mark.parametrize("line", HEALTHY)
def test_what_a_healthy_host_writes_is_nothing(line):
    assert list(of_the_host(f"6,1,1000,-;{line}\n")) == []


DAY = 86_400
FLAPS = {
    "twice today": ([2 * DAY + 1, 3 * DAY - 60], 3 * DAY, 2),
    "and before": ([DAY, 2 * DAY - 1, 2 * DAY + 3600, 2 * DAY + 7200], 3 * DAY, 2),
    "once, as of a switch that was restarted": ([2 * DAY + 1], 3 * DAY, 0),
    "the day before": ([DAY - 90, DAY - 60], 3 * DAY, 0),
    "while the machine starts": ([5, 1700], 3600, 0),
}


@pytest.mark.parametrize(("seconds", "now", "times"), FLAPS.values(), ids=FLAPS)
def test_a_link_flaps_that_went_down_twice_within_a_day(seconds, now, times):
    records = [f"4,1,{at}000000,-;mlx5_core 0000:01:00.0 enp1s0f0np0: Link down\n" for at in seconds]
    records += [f"4,2,{now}000000,-;mlx5_core 0000:02:00.0 enp2s0f0np0: Link down\n"]  # another port, once
    found = {message.device: message.times for message in kernel_log.summed_up(of_the_host("".join(records), now=now))}
    assert found == ({"mlx5_core 0000:01:00.0 enp1s0f0np0": times} if times else {})


def test_what_a_program_wrote_into_the_log_is_nothing():
    line = "watchdog: Watchdog detected hard LOCKUP on cpu 3"
    assert list(of_the_host(f"12,1,1000,-;{line}\n")) == []
    assert len(list(of_the_host(f"0,1,1000,-;{line}\n"))) == 1
    for xid in (
        "NVRM: Xid (PCI:0000:00:08): 79, GPU has fallen off the bus.",
        "nvidia-nvswitch1: SXid (PCI:0000:86:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
    ):
        assert parse(f"12,1,1000,-;{xid}\n") == []
        assert len(parse(f"3,1,1000,-;{xid}\n30,2,1001,-;{xid}\n")) == 1


SEGFAULT = "{}[31744]: segfault at 0 ip 00005566f8a0712d sp 00007ffc9d3e error 4 in {}[1139,5566f8a07000+1000]"
XID = "NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus."


@pytest.mark.parametrize("form", [
    SEGFAULT,  # names of a program and of its file, as its user likes them; the one of the program has 15 letters
    "traps: {}[31744] general protection fault ip:401136 sp:7ffd2 error:0 in {}[401000+1000]",
    "process '/tmp/{}' started with executable stack; {}",
    "{} invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER_MOVABLE), order=0, oom_score_adj=0",
    "{} (31744): drop_caches: 3",
    "{}: page allocation failure: order:4, mode:0xcc0(GFP_KERNEL), cpuset={},mems_allowed=0",
    'audit: type=1326 comm="{}" exe="{}" sig=31',
    "usb 1-1: Product: {} {}",
])  # fmt: skip
def test_what_a_user_makes_the_kernel_write_is_nothing(form):
    for line in (*(line for line, *_ in LINES), XID, XID.replace("PCI:", "")):
        for name in (line[:15], line[:14], line[:13], *([] if form.startswith("{}") else [line])):
            written = f"4,344,99,-;{form.format(name, line)}\n"
            assert (parse(written), list(of_the_host(written))) == ([], [])


@pytest.mark.parametrize(
    ("name", "file"),
    [("EDAC MC0: 1 UE ", "a on DIMM_A1 (x"), ("INFO: task a", "a:1 blocked for more than 120 seconds."),
     ("nvme nvme0: I/O", " 1 timeout, reset controller"), ("NVRM: Xid (0000", "a:1b:00): 79"),
     ("I/O error, dev ", "sda, sector 1")],
)  # fmt: skip
def test_a_name_that_takes_the_place_of_a_device_is_nothing(name, file):
    line = SEGFAULT.format(name, file)
    assert (parse(line), list(of_the_host(line))) == ([], [])


CONTAINER = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=cri-containerd-ec9e.scope,mems_allowed=0-1,"
    "oom_memcg=/kubepods.slice/kubepods-pod1.slice,task_memcg=/kubepods.slice/kubepods-pod1.slice/cri-ec9e.scope,"
    "task=pt_main_thread,pid=461754,uid=0"
)


@pytest.mark.parametrize(("groups", "condemns"), [
    ("0::/kubepods.slice/kubepods-pod1.slice/cri-ec9e.scope\n", True),
    ("0::/kubepods.slice/kubepods-pod12.slice/cri-ec9e.scope\n", False),
    ("12:cpu:/other\n4:memory:/kubepods.slice/kubepods-pod1.slice\n", True),
    ("0::/\n", False),  # a container that does not see which group is its own
])  # fmt: skip
def test_a_container_without_memory_counts_if_it_is_that_of_the_run(tmp_path, groups, condemns):
    (tmp_path / "cgroup").write_text(groups)
    (tmp_path / "kmsg").write_text(CONTAINER)
    (message,) = KernelLog(str(tmp_path / "kmsg"), tmp_path / "cgroup").new().host
    assert (message.code, message.before, message.during) == ("host_out_of_memory", False, condemns)


@pytest.mark.parametrize("end", [
    "oom_memcg=/advoom,task_memcg=/advoom,task=,global_oom,,pid=4711,uid=65534",
    "oom_memcg=/advoom,task_memcg=/advoom,task=oom_memcg=/run,,pid=4711,uid=65534",
    "oom_memcg=/run,evil,task_memcg=/run,evil,task=a,pid=4711,uid=65534",
    "oom_memcg=/run,task_memcg=/x,task_memcg=/run,task_memcg=/x,task=a,pid=4711,uid=65534",
])  # fmt: skip
def test_no_name_makes_the_memory_of_another_container_that_of_the_host(end):
    line = f"oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0,{end}"
    assert not [message for message in of_the_host(line, "/run") if message.before or message.during]


def test_a_flood_costs_as_much_as_one_line(tmp_path):
    corrected = "pcieport 0000:00:01.1: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)"
    lines = [f"4,{number},{number}000000,-;{corrected}" for number in range(10_000)]
    lines += [f"4,1,1,-;I/O error, dev sd{number}, sector 1" for number in range(1_000)]
    (tmp_path / "kmsg").write_text("\n".join(lines))  # far more than is read at once, and without an end of line
    port, *disks = KernelLog(str(tmp_path / "kmsg")).new().host
    assert (port.times, port.first, port.last) == (10_000, 0, 9_999)
    assert len(disks) == kernel_log.MOST_DEVICES + 1
    assert sum(disk.times for disk in disks) == 1_000


GPUS = ("00000000:1B:00.0", "00000000:1C:00.0", "00000000:9B:00.0")


# Two GPUs below one switch, and one with a port of its own.
WAYS = {
    "0000:1b:00.0": "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:1b:00.0",
    "0000:1c:00.0": "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:1c:00.0",
    "0000:9b:00.0": "pci0000:97/0000:97:01.0/0000:9b:00.0",
}


@pytest.mark.parametrize(("device", "gpus"), [
    ("nvidia 0000:1b:00.0", GPUS[:1]),
    ("snd_hda_intel 0000:1b:00.1", GPUS[:1]),  # another function of that GPU
    ("pcieport 0000:17:01.0", GPUS[1:2]),
    ("pcieport 0000:16:00.0", GPUS[:2]),
    ("pcieport 0000:97:01.0", GPUS[2:]),
    ("pcieport 0000:97:01.1", ()),  # another port, beside that one
    ("mlx5_core 0000:5c:00.0", ()),
])  # fmt: skip
def test_a_port_is_about_the_gpus_below_it(tmp_path, device, gpus):
    devices = written(tmp_path / "pci", {each: tmp_path / way for each, way in WAYS.items()})
    (message,) = of_the_host(f"{device}: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer")
    assert kernel_log.behind(message, GPUS, devices).gpus == gpus


GPU = "00000000:1B:00.0"  # as NVML writes it
XIDS = {
    "plain": "NVRM: Xid (PCI:0000:1b:00): 94, pid=7062, Contained: CE User Channel (0x9).",
    "MIG": "NVRM: Xid (PCI:0000:1b:00 GPU-I:05 GPU-CI:00): 94, pid=7194, Contained: CE User Channel (0x9).",
    "as /dev/kmsg gives it": "6,1234,99,-;NVRM: Xid (PCI:0000:1b:00): 94, Ch 00000001",
    "older drivers": "NVRM: Xid (0000:1b:00): 94, Channel 00000001",
}


@pytest.mark.parametrize("line", XIDS.values(), ids=XIDS)
def test_an_xid_is_found_and_belongs_to_its_gpu(line):
    (xid,) = parse(line)
    assert (xid.number, xid.of(GPU)) == (94, True)
    assert not any(map(xid.of, ("00000000:2B:00.0", "00000001:1B:00.0", "NVML: GPU is lost")))


def test_every_xid_of_the_catalogue_is_known():
    actions = {int(number): action for number, (action, _) in kernel_log.catalogue()["actions"].items()}
    assert sorted(actions) == list(range(1, 173))
    assert {*actions.values(), *(rule[-1] for rule in kernel_log.catalogue()["nvlink"])} <= {"", *kernel_log.ACTIONS}
    needs_words = [number for number, action in actions.items() if action not in ("CONTACT_SUPPORT", "IGNORE")]
    assert [number for number in needs_words if number not in kernel_log.meanings()] == []
    assert kernel_log.UNUSED in str(Xid("0000:1b:00", 47, ""))
    assert "NVIDIA's XID catalogue" in str(Xid("0000:1b:00", 9999, ""))


def nvlink(number, name, first, second, severity="Nonfatal"):
    return f"NVRM: Xid (PCI:0000:1b:00): {number}, {name}  {severity}   XC0 i0 Link 09 ({first} {second} 0x00000000)"


RECOVERY = "NVRM: Xid (PCI:0000:1b:00): 154, GPU recovery action changed from "


@pytest.mark.parametrize(("line", "code", "condemning"), [
    # As drivers before 575 write them, and those since: by other bits of the first number.
    (nvlink(149, "NETIR_LINK_EVT", "0x025525c6", "0x00000000", "Fatal"), "xid_reset", True),
    (nvlink(149, "NETIR_BER_EVENT", "0x00000226", "0x00000001"), None, False),
    (nvlink(144, "SAW_MVB", "0x00000001", "0x00000004"), None, False),
    (nvlink(144, "SAW_MVB", "0x123456789", "0x00000004"), "xid_workflow", True),  # not as anybody knows it
    (nvlink(144, "SAW_MVB", "0x00000001", "0x00000002", "Fatal"), "xid_reset", True),
    (nvlink(145, "RLW_SRC_TRACK", "0x00000007", "0x00000004"), "xid_application", False),
    # An error of this kind can be promoted to a fatal one.
    (nvlink(145, "RLW_RXPIPE", "0x00000006", "0x00000001"), None, False),
    (nvlink(145, "RLW_RXPIPE", "0x00000086", "0x00000001", "Fatal"), "xid_reset", True),
    (nvlink(150, "MSE", "0x00000000", "0xFFFFFFFF", "Fatal"), "xid_reset", True),
    # What nobody can decode is not taken for healthy.
    (nvlink(144, "SAW_NEW", "0x00000001", "0x00000003"), "xid_workflow", True),
    ("NVRM: Xid (PCI:0000:1b:00): 144, SAW_MVB Nonfatal", "xid_workflow", True),
    (RECOVERY + "0x0 (None) to 0x1 (GPU Reset Required)", "recovery_pending", False),
    (RECOVERY + "0x1 (GPU Reset Required) to 0x0 (None)", None, False),
    ("NVRM: Xid (PCI:0000:1b:00): 31, pid=7, name=python3, Ch 00000008, intr 00000000", "xid_of_process", False),
    ("NVRM: Xid (PCI:0000:1b:00): 63, Row Remapper: New row marked for remapping", None, False),
    ("NVRM: Xid (PCI:0000:1b:00): 94, pid=7062, Contained: CE User Channel (0x9).", "xid_application", False),
    ("NVRM: Xid (PCI:0000:1b:00): 46, GPU stopped processing", "xid_reset", True),
])  # fmt: skip
def test_what_an_xid_calls_for(line, code, condemning):
    (xid,) = parse(line)
    found = kernel_log.xids_of([Gpu(3, {"pci_bus_id": GPU})], [xid])
    assert [(fault.name, fault.subjects) for fault in found] == ([(code, (gpu_place(3),))] if code else [])
    assert xid.condemning == condemning


@pytest.mark.parametrize(("severity", "text"), [
    ("Fatal", "Link 30 LTSSM Fault Up"), ("Non-fatal", "Link 27 RX Short Error Rate"),
])  # fmt: skip
def test_an_sxid_is_found_and_belongs_to_its_switch(severity, text):
    begin = "nvidia-nvswitch1: SXid (PCI:0000:86:00.0): 20034, "
    # What follows it is none.
    rest = f"{begin}Severity 1 Engine instance 0 Sub-engine instance 2\n{begin}Data {{0x00000000, 0x00000000}}\n"
    (sxid,) = parse(f"3,1234,99,-;{begin}{severity}, {text}\n{rest}")
    assert (sxid.number, sxid.condemning, sxid.text, sxid.of(GPU)) == (20034, severity == "Fatal", text, False)
    assert str(sxid) == f"nvidia-nvswitch1 on PCI 0000:86:00.0: SXid 20034 ({severity}: {text})"


def test_lines_that_were_overwritten_before_they_were_read_are_reported(tmp_path, monkeypatch):
    """As /dev/kmsg does: EPIPE once, then the oldest line that is left."""
    fell_off = b"6,9,9,-;NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n"
    (tmp_path / "kmsg").touch()
    log = KernelLog(str(tmp_path / "kmsg"))
    answers = Mock(side_effect=[b"6,0,1,-;boot\n", BrokenPipeError(), fell_off, b"", b""])
    monkeypatch.setattr("pytest_gpufleet.machine.kernel_log.os.read", answers)
    logged = log.new()
    assert [xid.number for xid in logged.xids] == [79]
    assert logged.unread == "the kernel wrote over lines of its log that had not been read yet"
    assert log.new() == Logged()


LOST = (
    "The NVIDIA GPU 0000:b3:00.0\nNVRM: (PCI ID: 10de:26b5) installed in this system has\nNVRM: fallen off the bus and"
)
JOURNAL = "".join(  # as `journalctl -o json` writes it: a message of several lines, and what the log still has
    json.dumps({"MESSAGE": message, "_SOURCE_MONOTONIC_TIMESTAMP": at, "_BOOT_ID": "b0"}) + "\n"
    for message, at in ((f"NVRM: {LOST}", "5000000"), (XID, "6000000"), (XID, "8000000"))
)


@pytest.mark.parametrize(("number", "journal", "lost"), [
    (0, JOURNAL, []), (4711, JOURNAL, [("gpu_lost", "0000:b3:00.0", 5.0)]), (4711, "", []), (4711, "no json", []),
])  # fmt: skip
def test_what_the_kernel_wrote_over_since_boot_is_in_the_journal(tmp_path, number, journal, lost):
    asked = []
    (tmp_path / "kmsg").write_text(f"6,{number},7000000,-;eth0: link is up\n6,{number + 1},8000000,-;{XID}\n")
    log = KernelLog(str(tmp_path / "kmsg"), run=lambda *command: asked.append(command[0]) or journal)
    logged = log.new()
    assert [xid.number for xid in logged.xids] == [79]
    assert [(each.code, each.device, each.first) for each in logged.host] == lost
    assert (log.new(), asked) == (Logged(), ["journalctl"] if number else [])


FOUR = [Gpu(index, {"pci_bus_id": f"00000000:{index}B:00.0"}) for index in range(4)]
FATAL = "pcieport 0000:00:03.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Requester ID)"
CORRECTED = "pcieport 0000:00:03.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Receiver ID)"
STALLED = "watchdog: BUG: soft lockup - CPU#18 stuck for 27s! [python3:2254956]"


def message(line, **more):
    return replace(recognised(line), **more)


def test_what_condemns_is_a_fault_and_the_rest_is_shown():
    logged = [recognised(line) for line in (FATAL, STALLED, CORRECTED)]
    found = [[fault.story for fault in each] for when in ("before", "during") for each in judged(logged, FOUR, when)]
    assert found == [[FATAL], [STALLED, CORRECTED], [FATAL, STALLED], [CORRECTED]]
    for _, row in TABLE:  # what never condemns is to be watched
        assert (CODES[row.code].action == "MONITOR") == (not row.before and not row.during)


def test_a_fault_says_how_often_a_message_came_and_at_which_gpu_and_what_is_shown_is_one_remark_a_kind():
    one, two, of_another_run = (f"00000000:{bus}B:00.0" for bus in (1, 2, 9))
    for below in ((two,), (one, two), (of_another_run,), ()):
        (fault,), _ = judged([message(FATAL, gpus=below)], FOUR, "during")
        assert fault.subjects == (gpu_place(2) if below == (two,) else THIS_NODE,)
    often = message(FATAL, times=12_000, first=51.2, last=1207.4)
    found, _ = judged([often, message(FATAL, first=51.2, last=51.2), message(FATAL)], FOUR, "before")
    more = [" (12,000 times, 51 to 1,207 s after boot)", " (51 s after boot)", ""]
    assert [fault.what for fault in found] == [f"{FATAL}{each}" for each in more]
    messages = [message(CORRECTED, device=str(number)) for number in range(3)] + [recognised(STALLED)]
    _, shown = judged(messages, FOUR, "before")
    shown = [Fault(each.name, each.subjects, f"{each.what} {number}") for number, each in enumerate(shown)]
    assert kernel_log.remarks(shown) == [
        f"the kernel log: {CODES['pcie_corrected_logged'].message}: {CORRECTED} 0, and 2 more",
        f"the kernel log: {CODES['hung_task'].message}: {STALLED} 3",
    ]
    assert kernel_log.remarks([]) == []


def test_a_gpu_that_started_after_all_is_not_lost():
    gone, there = (message("NVRM: GPU 0000:98:00.0: RmInitAdapter failed!", gpus=gpus) for gpus in ((), GPUS[:1]))
    assert [[fault.name for fault in judged([each], FOUR, "before")[0]] for each in (gone, there)] == [["gpu_lost"], []]
    assert judged([there], FOUR, "during")[0]


HUNG = Fault("hung_task", (THIS_NODE,), "INFO: task python3:7 blocked for more than 120 seconds.")


@pytest.mark.parametrize(("effect", "cause", "explains"), [
    (HUNG, Fault("xid_restart", (gpu_place(2),), "XID 79"), True),
    (HUNG, Fault("disk_failing", (THIS_NODE,), "nvme0"), True),
    (HUNG, Fault("xid_application", (gpu_place(2),), "XID 94"), False),
    (Fault("pcie_replays", (gpu_place(2),), ""), Fault("pcie_error_logged", (gpu_place(2),), ""), True),
    (Fault("pcie_replays", (gpu_place(2),), ""), Fault("pcie_error_logged", (gpu_place(3),), ""), False),
    (Fault("file_system_failed", (THIS_NODE,), ""), Fault("disk_failing", (THIS_NODE,), ""), True),
    (Fault("rank_died", (gpu_place(0),), ""), Fault("host_out_of_memory", (THIS_NODE,), ""), True),
])  # fmt: skip
def test_causes_explain_effects(effect, cause, explains):
    assert explaining(effect, [cause, effect]) == ([cause] if explains else [])

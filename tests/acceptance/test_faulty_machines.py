"""A recorded 4x H200 with one thing wrong: the check that fails, and the GPUs it names."""

import re
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pytest_gpufleet.machine import links
from pytest_gpufleet.machine.dcgm import Diagnosis
from pytest_gpufleet.machine.gpu_facts import COUNTERS
from pytest_gpufleet.machine.health import ClocksUnderLoad
from pytest_gpufleet.model import place
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import Gpu, GpuTopology, Missing
from tests.acceptance.checks import outcomes, ranks_answer
from tests.conftest import ACCEPTANCE, RECORDED
from tests.machines import recorded

# What needs ranks, and so real GPUs.
NEEDS_GPUS = "not under_load and not every_rank"
ECC = "test_no_memory_error_is_recorded"
XIDS, HOST_LOG = "test_no_grave_xid_in_the_kernel_log", "test_no_grave_message_of_the_host_in_the_kernel_log"
FULL_PCIE, PORTS_CLEAN = "test_network_ports_have_full_pcie", "test_network_ports_stayed_clean"
AS_MUCH_MEMORY = "test_every_socket_has_as_much_memory"
SERIAL = "serial 0000000000002"


def failed(check_outcomes):
    return {name for name, outcome in check_outcomes.items() if outcome.what == "failed"}


def named(text):
    """The indices of the GPUs that a failure names."""
    return set(map(int, re.findall(r"\bGPU (\d+) ", text)))


# Four InfiniBand ports, a management port of another adapter, and the second ports of two adapters, without a cable.
PORTS = """
def port(i, **kind):
    usual = dict(state='4: ACTIVE', rate='400 Gb/sec', link_layer='InfiniBand', adapter='MT4129', function='0')
    return dict(port=f'mlx5_{i}/1', **(usual | kind))
unplugged = dict(function='1', state='1: DOWN', rate='10 Gb/sec')
management = dict(link_layer='Ethernet', adapter='MT4120', rate='40 Gb/sec')
ports = host['network_ports'] = [port(i) for i in range(4)] + [port(4, **management)]
ports += [port(i, **unplugged) for i in (5, 6)]
"""

PORTS_WITH_PCIE = """
def pcie(**link):
    able = dict(lanes_able=16, lanes_of_port=16, speed_able=32.0, speed_of_port=32.0)
    return dict(lanes=16, speed=32.0) | able | link
def port(i, **more):
    usual = dict(state='4: ACTIVE', rate='400 Gb/sec', link_layer='InfiniBand', adapter='MT4129', function='0')
    return dict(port=f'mlx5_{i}/1', pcie=pcie(), errors=dict(link_downed=1, symbol_error=15)) | usual | more
ports = host['network_ports'] = [port(i) for i in range(4)]
"""

# A host with two sockets.
SETUP = """
memory = {'0': 1 << 40, '1': 1 << 40}
setup = host['processor_setup'] = dict(clock_source='tsc', offline=[], smt='on', numa_memory=memory, virtual=False)
"""
MODULES_OF_MEMORY = """
setup.update(sockets=2)
usual = dict(bank=None, bytes=64 << 30, type='DDR5', speed=5600, configured_speed=4800)
modules = host['memory_modules'] = [dict(usual, locator=f'DIMM_{slot}') for slot in range(16)]
"""
ERRORS_OF_MEMORY = """
module = dict(label='DIMM_A1', location='channel 0 slot 0', corrected=3, uncorrected=0)
errors = host['memory_errors'] = [
    dict(controller='mc0', driver='', corrected=3, uncorrected=0, seconds=900, modules=[module])
]
"""

ABSENT, LOST = "Missing('NVML: Not Supported', absent=True)", "Missing('NVML: GPU is lost')"
FELL_OFF = "machine.log = 'NVRM: Xid (PCI:0000:00:%s): 79, pid=1, GPU has fallen off the bus.'"
FABRIC = "for gpu in gpus: gpu['fabric_health'] = {'mask': 0x1AA, 'clique': 0, 'cluster': '00'}\n"
NARROW = "update(pcie_width=8, pcie_width_max=8, pcie_width_able={'gpu': %s, 'port': %s})"
HARMLESS_LOG = """
EDAC MC: Ver: 3.0.0
pcieport 0000:00:00.0: AER: enabled with IRQ 59
mce: CPU supports 7 MCE banks
pcieport 0000:00:01.1: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Receiver ID)
watchdog: BUG: soft lockup - CPU#18 stuck for 27s! [python3:2254956]
oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/kubepods.slice,task_memcg=/x,task=java
"""
NOBODY: set[str] = set()
NODE, GPU_2, ALL = {"node"}, {"gpu2"}, {"gpu0", "gpu1", "gpu2", "gpu3"}


# Without NVSwitch and profile facts that count NVLinks: A100 PCIe, of which bridges connect GPU 0 with 1 and 2 with 3.
BRIDGED = """
machine.fabric = "nvlink"
row = ["X", "NV12", "SYS", "SYS"]
machine.links = links = [row, [row[1], row[0], *row[2:]], [*row[2:], *row[:2]], [*row[2:], row[1], row[0]]]
for index, gpu in enumerate(gpus):
    gpu["name"], gpu["memory_bytes"], gpu["fabric"] = "NVIDIA A100 80GB PCIe", 80 << 30, dict(state=0, status=0)
    gpu["nvlink_states"], gpu["nvlink_speeds"] = [1] * 12, [25.0] * 12
    gpu["pcie_generation_max"] = 4
    gpu["p2p"] = {name: [0 if link in ("X", "NV12") else 1 for link in links[index]] for name in gpu["p2p"]}
"""
UNBRIDGED = """
machine.fabric = "pcie"
machine.links = [["X" if row == column else "SYS" for column in range(4)] for row in range(4)]
for gpu in gpus:
    gpu["nvlink_states"], gpu["nvlink_speeds"] = [0] * 12, [0.0] * 12
"""
# A B200 as it might tell of itself: NVLink 5 with its counters, and errors in the kernel log that call for nothing.
BLACKWELL = """
machine.log = "\\n".join([
    "NVRM: Xid (PCI:0000:00:08): 149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 (0x00000013 0x00000001 0x0)",
    "NVRM: Xid (PCI:0000:00:08): 144, SAW_MVB Nonfatal XC0 i0 Link 03 (0x00000001 0x00000004 0x0)",
    "NVRM: Xid (PCI:0000:00:08): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 11 (0x00000006 0x00000002 0x0)",
    "NVRM: Xid (PCI:0000:00:08): 146, TLW_RX_PIPE0 Nonfatal XC0 i0 Link 11 (0x0000000a 0x00000001 0x0)",
    "NVRM: Xid (PCI:0000:00:08): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
])
for gpu in gpus:
    gpu.update(name="NVIDIA B200", compute_capability=[10, 0], memory_bytes=179 << 30, nvlink_speeds=[50.0] * 18)
    gpu.update(power_limit_watts=1000.0, power_limit_default_watts=1000.0)
    gpu["nvlink_errors"] = {kind: [0] * 18 for kind in ("receive", "recovery", "effective", "symbol")}
    gpu["nvlink_fec"] = [[10**9, 1000, 3] + [0] * 13] * 18
    gpu["fabric_health"] = dict(mask=0x1AA, clique=0, cluster="0" * 32)
"""
FATAL_OF_NVLINK_5 = """
machine.log += "\\nNVRM: Xid (PCI:0000:00:08): 149, NETIR_LINK_DOWN Fatal XC0 i0 Link 03 (0x00200011 0x00000000 0x0)\\n"
"""
# A machine that one check looks at: what is there before the change.
THERE = {
    FULL_PCIE: PORTS_WITH_PCIE,
    "test_network_ports_are_active": PORTS,
    "test_clock_source_is_fast": SETUP,
    "test_processors_are_online": SETUP,
    AS_MUCH_MEMORY: SETUP,
    "test_memory_modules_are_alike": SETUP + MODULES_OF_MEMORY,
    "test_host_memory_had_few_errors": ERRORS_OF_MEMORY,
    "test_host_memory_errors_stayed_rare": ERRORS_OF_MEMORY,
}
# One pair with a bridge, one without.
HALF_BRIDGED = BRIDGED + "for gpu in gpus[2:]: gpu['nvlink_states'], gpu['nvlink_speeds'] = [0] * 12, [0.0] * 12"
SAME_GSP = "for gpu in gpus: gpu['gsp_firmware'] = '580.159.04'\n"
SAME_BAR1 = "for gpu in gpus: gpu['bar1_bytes'] = 256 << 30\n"
# Two GPUs at each socket of 48 processors, as NVML has it in words of 64 bits.
TWO_SOCKETS = """
FIRST, SECOND = [2**48 - 1] + [0] * 15, [2**64 - 2**48, 2**32 - 1] + [0] * 14
for index, gpu in enumerate(gpus):
    first = index // 2 * 48
    gpu.update(cpu_affinity=(FIRST, SECOND)[index // 2], pci_bus_cpus=list(range(first, first + 48)))
"""
# By check: the change, the code of its faults, the places that they name and words of what they say.
FAULTY: dict[str, list[tuple[Any, ...]]] = {
    "test_gpu_count": [
        ("machine.count = 3", "gpu_missing", NODE),
        ("machine.count = 3\nhost['environment']['CUDA_VISIBLE_DEVICES'] = '0,1,2'", "gpu_missing", NODE, "hides"),
    ],
    "test_gpus_are_alike[name]": [("gpus[2]['name'] = 'NVIDIA H100 80GB HBM3'", "gpu_unlike_others", GPU_2)],
    "test_gpus_are_alike[pcie_generation_max]": [("gpus[2]['pcie_generation_max'] = 3", "gpu_unlike_others", GPU_2)],
    "test_pcie_width_is_full": [
        ("gpus[2]['pcie_width'] = 8", "pcie_width_reduced", GPU_2),
        ("gpus[2]." + NARROW % (16, 8), "pcie_slot_narrow", GPU_2),
    ],
    "test_nvlinks_are_up": [
        ("gpus[2]['nvlink_states'][4] = 0", "nvlink_down", GPU_2),
        (BRIDGED + "gpus[2]['nvlink_states'][4] = 0", "nvlink_down", GPU_2, "12 active links, as others have"),
        (f"for gpu in gpus: gpu['nvlink_states'] = {ABSENT}", "fact_unreadable", ALL, "nvlink_states"),
    ],
    "test_nvlinks_are_equally_fast": [
        ("for gpu in gpus: gpu['nvlink_speeds'] = [20.0] * 18", "nvlink_slow", ALL),
        ("gpus[2]['nvlink_speeds'][4] = 20.0", "nvlink_slow", GPU_2),
    ],
    "test_memory_is_complete": [("gpus[2]['memory_bytes'] = 120 << 30", "memory_incomplete", GPU_2)],
    "test_fabric_is_ready": [
        ("gpus[2]['fabric']['state'] = 2", "fabric_not_ready", GPU_2),
        (FABRIC + "gpus[2]['fabric_health']['mask'] = 1 << 4", "fabric_degraded", GPU_2, "route is unhealthy"),
        (FABRIC.replace("0x1AA", "5 << 8"), "fabric_degraded", ALL, "too few NVLinks"),
        (FABRIC + "gpus[2]['fabric_health']['clique'] = 1", "fabric_split", GPU_2),
    ],
    ECC: [
        ("gpus[2]['memory_unrepairable'] = True", "memory_unrepairable", GPU_2),
        ("gpus[2]['ecc_corrected'] = {'dram': 20_000_001, 'sram': 0}", "many_corrected_errors", GPU_2, "in DRAM"),
        ("gpus[2]['ecc_corrected'] = {'dram': 0, 'sram': 10_001}", "many_corrected_errors", GPU_2, "in SRAM"),
        ("gpus[2]['spare_rows'] = {**gpus[2]['spare_rows'], 'max': 3071, 'none': 1}", "spare_rows_used_up", GPU_2),
        ("gpus[2]['remapped_rows'] = [0, 1, 0, 1]", "row_remapping_failed", GPU_2),
        ("gpus[2]['remapped_rows'] = [1, 0, 0, 0]", "new_gpu_remapped_rows", GPU_2, "new GPU has none (1)"),
        ("gpus[2]['ecc_uncorrected_aggregate'] = 1", "new_gpu_ecc_errors", GPU_2, "in its life"),
    ],
    "test_gpus_are_alike[gsp_firmware]": [
        (SAME_GSP + "gpus[2]['gsp_firmware'] = '570.133.20'", "gsp_firmware_differs", GPU_2, "should be 580.159.04"),
    ],
    "test_bar1_is_as_large_as_of_others": [(SAME_BAR1 + "gpus[2]['bar1_bytes'] = 256 << 20", "bar1_small", GPU_2)],
    "test_cpu_affinity_fits_the_pci_bus": [
        (
            TWO_SOCKETS + "gpus[1]['cpu_affinity'], gpus[2]['cpu_affinity'] = SECOND, FIRST",
            "gpu_numa_mismatch",
            {"gpu1", "gpu2"},
            "next to its PCI bus are",
        ),
    ],
    "test_default_power_limit_is_of_the_model": [
        ("gpus[2].update(power_limit_watts=600.0, power_limit_default_watts=600.0)", "power_limit_below_model", GPU_2),
        ("for gpu in gpus: gpu['power_limit_default_watts'] = 600.0", "power_limit_below_model", ALL, "model 700 W"),
    ],
    XIDS: [
        (FELL_OFF % "08", "xid_restart", GPU_2, "XID 79"),
        ("machine.count = 3\n" + FELL_OFF % "09", "gpu_lost", NOBODY, "XID 79"),
        (f"gpus[2]['pci_bus_id'] = {LOST}\n" + FELL_OFF % "08", "gpu_lost", NOBODY),
        ("machine.log = 'nvidia-nvswitch1: SXid (PCI:0000:86:00.0): 20034, Fatal, Link 30'", "sxid_fatal", NOBODY),
        (BLACKWELL + FATAL_OF_NVLINK_5, "xid_reset", GPU_2, "Link 03"),
    ],
    FULL_PCIE: [
        ("ports[1]['pcie'] = pcie(lanes=8)", "nic_pcie_slow", NODE, "mlx5_1/1"),
        ("ports[1]['pcie'] = pcie(speed=16.0)", "nic_pcie_slow", NODE, "16 GT/s"),
        ("ports[1]['pcie'] = pcie(lanes=8, lanes_of_port=8)", "nic_pcie_slow", NODE, "for its 400 Gbit/s"),
    ],
    HOST_LOG: [
        ("machine.log = 'EDAC MC0: 1 UE memory read error on DIMM_A1 (channel:0 slot:0)'", "dimm_uncorrected", NODE),
        (
            "machine.log = 'nvidia 0000:00:08.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Data Link Layer'",
            "pcie_error_logged",
            GPU_2,
        ),
    ],
    "test_persistence_mode_is_on": [
        ("gpus[2]['persistence_mode'] = 0", "persistence_mode_off", GPU_2),
        ("for gpu in gpus: gpu.update(persistence_mode=0, name='NVIDIA L40S', brand=14)", "persistence_mode_off", ALL),
    ],
    "test_no_foreign_process": [
        ("machine.processes = {2: ['process 4711 (miner)']}", "foreign_process", GPU_2, "4711 (miner)")
    ],
    "test_memory_may_be_locked": [("host['locked_memory_limit'] = 65536", "locked_memory_limited", NODE)],
    "test_software_fits_driver": [("machine.problems = ['driver 450']", "software_mismatch", NODE, "driver 450")],
    "test_no_harmful_variable": [
        ("host['environment']['NCCL_P2P_DISABLE'] = '1'", "harmful_variable", NODE, "NCCL_P2P_DISABLE"),
    ],
    "test_files_may_be_opened": [("host['open_files_hard_limit'] = 1024", "open_files_limited", NODE)],
    "test_processors_near_each_gpu_may_be_used": [
        ("gpus[2]['cpu_affinity'] = [0, 1] + [0] * 14", "cpu_affinity", GPU_2)
    ],
    "test_network_ports_are_active": [
        ("ports[2]['state'] = '1: DOWN'", "network_port_unlike_others", NODE, "mlx5_2/1"),
        ("ports[2]['rate'] = '200 Gb/sec'", "network_port_unlike_others", NODE, "mlx5_2/1"),
        ("for one in ports: one['state'] = '1: DOWN'", "network_port_unlike_others", NODE, "is 1: DOWN"),
        # those of the GPUs, beside a port for management that is up
        ("for one in ports[:4]: one['state'] = '1: DOWN'", "network_port_unlike_others", NODE, "is 1: DOWN"),
    ],
    "test_inforom_is_valid": [("gpus[2]['inforom_valid'] = False", "inforom_invalid", GPU_2)],
    "test_clock_source_is_fast": [("setup['clock_source'] = 'hpet'", "clock_source_slow", NODE)],
    "test_processors_are_online": [("setup['offline'] = [5, 13]", "cpu_offline", NODE, "5, 13")],
    "test_memory_modules_are_alike": [
        ("modules[3]['configured_speed'] = 4400", "dimm_slow", NODE, "DIMM_3"),
    ],
    "test_host_memory_had_few_errors": [
        ("module['uncorrected'] = errors[0]['uncorrected'] = 1", "host_memory_uncorrected", NODE, "DIMM_A1"),
    ],
    "test_no_recovery_is_pending": [("gpus[2]['recovery_action'] = 2", "recovery_pending", GPU_2)],
}
# By check: a look-alike.
HEALTHY = {
    "test_pcie_width_is_full": ["for gpu in gpus: gpu." + NARROW % (8, 16)],
    "test_nvlinks_are_up": [BLACKWELL, BRIDGED, HALF_BRIDGED],
    "test_nvlinks_are_equally_fast": [HALF_BRIDGED],
    "test_fabric_is_ready": [
        FABRIC.replace("'clique': 0", "'clique': 3"),  # a fabric that says of itself that it is well
        f"for gpu in gpus: gpu['fabric_health'] = {ABSENT}",
    ],
    "test_gpus_are_alike[gsp_firmware]": [SAME_GSP],
    "test_bar1_is_as_large_as_of_others": [SAME_BAR1],
    # a virtual machine that shows all processors everywhere, and a socket of several NUMA nodes
    "test_cpu_affinity_fits_the_pci_bus": [
        TWO_SOCKETS,
        TWO_SOCKETS + "for gpu in gpus: gpu['pci_bus_cpus'] = list(range(96))",
        TWO_SOCKETS + "gpus[1]['cpu_affinity'] = [2**24 - 1] + [0] * 15",
    ],
    "test_default_power_limit_is_of_the_model": [
        "",
        "for gpu in gpus: gpu['power_limit_default_watts'] = 699.5",
    ],
    "test_every_pair_reaches_each_other": [BRIDGED],
    ECC: [
        BLACKWELL,
        "gpus[2].update(ecc_corrected={'dram': 3_666_595, 'sram': 0}, ecc_corrected_volatile=3_666_595)",
    ],
    XIDS: [BLACKWELL],
    FULL_PCIE: [
        "",
        "ports[0]['pcie'] = pcie(lanes=8, lanes_of_port=8)\nfor one in ports: one['rate'] = '200 Gb/sec'",
        "for one in ports: one.update(rate='200 Gb/sec', pcie=pcie(speed=16, speed_of_port=16))",
        # a machine whose slots are all of an older generation than its adapters
        "for one in ports: one.update(rate='200 Gb/sec', pcie=pcie(speed=8, speed_of_port=8))",
    ],
    HOST_LOG: [f"machine.log = {HARMLESS_LOG!r}"],
    "test_power_limit_is_default": ["for gpu in gpus: gpu['power_limit_watts'] = 750.0"],
    # a cloud's topology file
    "test_no_harmful_variable": ["host['environment']['NCCL_TOPO_FILE'] = '/opt/microsoft/ndv5-topo.xml'"],
    # a driver that chooses the clock
    "test_processors_run_at_full_clock": [
        "host['cpu_governor'], host['cpu_energy_preference'] = 'powersave', 'balance_performance'"
    ],
    # an adapter of another kind that does not answer
    "test_network_ports_are_active": ["", "ports[4]['state'], ports[4]['rate'] = 'unknown', None"],
    "test_clock_source_is_fast": [""],
    "test_processors_are_online": [""],
    AS_MUCH_MEMORY: [""],
    "test_memory_modules_are_alike": [ERRORS_OF_MEMORY],
    "test_host_memory_had_few_errors": [""],
    "test_host_memory_errors_stayed_rare": [""],
}
NOBODY_COUNTS = "host['memory_errors'] = Missing('no EDAC driver counts them', absent=True)"
NOT_APPLICABLE = {
    # GeForce, and boards of workstations
    "test_persistence_mode_is_on": [
        f"for gpu in gpus: gpu.update(persistence_mode=0, brand={brand})" for brand in (5, 12)
    ],
    "test_nvlinks_are_up": [BRIDGED + UNBRIDGED],
    # sold with error correction off
    "test_ecc_is_on": ["for gpu in gpus: gpu['ecc_mode'], gpu['ecc_mode_default'] = [0, 0], 0"],
    FULL_PCIE: ["for one in ports: one['pcie'] = dict.fromkeys(one['pcie'], 0)"],  # virtual adapters
    AS_MUCH_MEMORY: [
        "setup['numa_memory'] = {'0': 1 << 40}",
        # a virtual machine whose host gives one NUMA node less memory
        "setup.update(virtual=True, clock_source='kvm-clock', numa_memory={'0': 1 << 40, '1': 1 << 39})",
    ],
    "test_host_memory_had_few_errors": [NOBODY_COUNTS],
    "test_host_memory_errors_stayed_rare": [NOBODY_COUNTS],
    # ports that count no errors
    PORTS_CLEAN: ["", PORTS, PORTS_WITH_PCIE + "for one in ports: one['errors'] = {}"],
}


def test_what_a_machine_does_not_show_is_told_by_its_reason_alone():
    """Whoever reads it looks for no names of this program, and is not told the same thing in two ways."""
    why = "its host keeps it"
    facts = (
        "cpu_governor", "memory_modules", "memory_errors", "pci_devices", "disk_health", "bmc", "optics", "rdma_writes",
    )  # fmt: skip
    change = "".join(f"host[{fact!r}] = Missing({why!r}, absent=True)\n" for fact in facts)
    found = outcomes(recorded(f"{change}host['network_ports'] = []"))
    told = {name: each.message for name, each in found.items() if each.what == "not applicable"}
    assert len([message for message in told.values() if message == f"not applicable: {why}"]) >= len(facts)
    assert told["test_network_ports_are_active"] == told["test_network_ports_stayed_clean"]
    assert not [message for message in told.values() for fact in facts if fact in message]


def rows(table, name=lambda check, row: check.removeprefix("test_")):
    return [pytest.param(check, row, id=name(check, row)) for check, rows in table.items() for row in rows]


@pytest.mark.parametrize(("check", "row"), rows(FAULTY, lambda check, row: row[1]))
def test_a_fault_is_caught(check, row):
    change, code, places, *words = row
    faults = outcomes(recorded(THERE.get(check, "") + change))[check].faults
    assert {fault.name for fault in faults} == {code}
    assert {str(subject) for fault in faults for subject in fault.subjects} == places
    assert all(word in fault.what for fault in faults for word in words)


@pytest.mark.parametrize("ends", ["passed", "not applicable"])
def test_what_looks_like_a_fault_is_none(ends):
    for check, changes in (HEALTHY if ends == "passed" else NOT_APPLICABLE).items():
        for change in changes:
            found = outcomes(recorded(THERE.get(check, "") + change))
            assert (found[check].what, failed(found)) == (ends, set()), (check, change)


FREE = ClocksUnderLoad(1980, 3201, 0, 480.0)  # as on two H200
RTX_4090 = ClocksUnderLoad(2745, 10251, 0, 300.0)  # a model that rarely reaches its maximum
OF_4090 = "for gpu in gpus: gpu.update(compute_capability=[8, 9], sm_clock_max_mhz=3105, memory_clock_max_mhz=10501)"
# By probe, check and machine: what each rank reads while data flows, and the outcome. Of a link its generation, and the
# highest it can; None: NVML does not tell.
UNDER_LOAD = {
    ("pcie_generation_under_load", "test_pcie_generation_is_full_under_load", ""): [
        ([(5, 5)] * 4, "passed", set()),
        ([(4, 4)] * 4, "failed", {0, 1, 2, 3}, "generation 4 of 5"),
        ([(5, 5), (5, 5), None, (5, 5)], "failed", {2}, "generation unknown of 5"),
        ([None] * 4, "not applicable", set(), "NVML does not tell"),
    ],
    ("clocks_under_load", "test_clocks_are_full_under_load", ""): [
        ([FREE] * 4, "passed", set()),
        # held back by its power limit, and not
        ([FREE, FREE, FREE._replace(sm=1755, reasons=0x4, watts=668.0), FREE], "passed", set()),
        ([FREE, FREE, FREE._replace(sm=1755, reasons=0x4, watts=0.0), FREE], "passed", set()),
        ([FREE, FREE, FREE._replace(sm=1410, reasons=0x4), FREE], "failed", {2}, "of 1980, at 480 W of 700 W"),
        ([FREE, FREE, FREE._replace(sm=1410), FREE], "failed", {2}, "SM clock of at most 1410 MHz"),
        ([FREE, FREE, FREE._replace(memory=2201), FREE], "failed", {2}, "memory clock of at most 2201"),
        ([FREE, FREE, None, FREE], "failed", {2}, "cannot be read"),
        ([None] * 4, "not applicable", set(), "does not tell"),
    ],
    ("clocks_under_load", "test_clocks_are_full_under_load", OF_4090): [
        ([RTX_4090] * 4, "passed", set()),
        ([RTX_4090._replace(sm=2100)] * 4, "failed", {0, 1, 2, 3}),
    ],
}


@pytest.mark.parametrize(("names", "row"), [(names, row) for names, rows in UNDER_LOAD.items() for row in rows])
def test_what_ranks_read_under_load(names, row):
    (probe, check, change), (answers, what, gpus, *words) = names, row
    outcome = outcomes(recorded(change), world=ranks_answer(answers, probe))[check]
    assert (outcome.what, outcome.gpus) == (what, gpus)
    assert [each for each in words if each not in outcome.message] == []


WORN = "gpus[2].update(remapped_rows=[2, 30, 0, 0], ecc_uncorrected_aggregate=120)"


@pytest.mark.parametrize(
    ("change", "names"), [(WORN, set()), (WORN.replace("30, 0, 0", "512, 0, 0"), {"many_rows_remapped"})]
)
def test_what_ages_is_no_fault_of_used_hardware(change, names):
    assert {fault.name for fault in outcomes(recorded(change), fleet_used=True)[ECC].faults} == names


NO_FABRIC = "for gpu in gpus: gpu['fabric'] = dict(state=0, status=0)\n"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (NO_FABRIC, "skipped"),  # the links say that they end at NVSwitches
        (NO_FABRIC + "machine.fabric = 'pcie'", "not applicable"),  # four GPUs of a board that links them directly
        (BRIDGED, "not applicable"),
    ],
)
def test_a_fabric_that_was_not_started_is_not_judged_where_there_are_nvswitches(change, what):
    check = outcomes(recorded(change))["test_fabric_is_ready"]
    assert (check.what, "systemctl status nvidia-fabricmanager" in check.message) == (what, what == "skipped")


def test_eight_gpus_whose_nvlinks_need_no_bridge_are_behind_nvswitches():
    hopper = [Gpu(index, {"compute_capability": [9, 0]}) for index in range(8)]
    assert links.has_nvswitch(hopper, GpuTopology(fabric="pcie"), 18)
    assert not links.has_nvswitch(hopper, GpuTopology(fabric="pcie"), 0)
    assert not links.has_nvswitch(hopper[:4], GpuTopology(fabric="nvlink"), 18)
    ampere = [Gpu(index, {"compute_capability": [8, 0]}) for index in range(8)]
    assert not links.has_nvswitch(ampere, GpuTopology(fabric="nvswitch"), 12)


def test_xid_of_a_gpu_that_is_only_hidden_is_nothing_against_this_run():
    change = """
machine.count, machine.hidden = 3, ["00000000:00:09.0"]
machine.log = "NVRM: Xid (PCI:0000:00:09): 79, GPU has fallen off the bus."
"""
    found = outcomes(recorded(change), asked=3)
    assert (failed(found), found["test_no_grave_xid_in_the_kernel_log"].what) == (set(), "passed")


# ---------------------------------------------------------------- facts that cannot be had

REASONS = {
    "Not Supported": False,
    "Insufficient Permissions": True,
    "GPU is lost": True,
    "Unknown Error": True,
}
# Facts that the report shows and no check of inventory and health judges; those of the last line, telemetry does.
SHOWN = {
    "board_part_number", "pci_device_id", "compute_capability", "pcie_generation", "temperature_limits_c",
    "numa_node", "nvlink_versions", "nvlink_remote_types", "nvlink_fec", "pcie_width_able",
    "sm_clock_max_mhz", "memory_clock_max_mhz",
    "processes", "clock_event_reasons", "power_watts", "temperature_c",
}  # fmt: skip
# Older drivers do not tell these; who looks at the end at what has grown misses the others.
MAY_BE_ABSENT = ({*COUNTERS} - {"remapped_rows", "pcie_replays"}) | {"fabric_health", "spare_rows"}
IDENTITY = {"uuid", "serial", "pci_bus_id"}  # not every model has a serial number


@pytest.mark.parametrize("reason", REASONS)
def test_every_call_that_fails_alone_is_a_finding(reason):
    """Every check of inventory and health, for every fact of GPU 2 that NVML does not tell."""
    unnoticed = set()
    for fact in recorded().machine.gpus[2].facts:
        found = outcomes(recorded(f"gpus[2]['{fact}'] = Missing('NVML: {reason}', {not REASONS[reason]})"))
        if not failed(found):
            unnoticed.add(fact)
        for name in failed(found):
            assert found[name].gpus == {2}, (fact, name)
            assert f"NVML: {reason}" in found[name].message
    assert unnoticed == (SHOWN if REASONS[reason] else SHOWN | IDENTITY | MAY_BE_ABSENT)


# ---------------------------------------------------------------- what a run has left behind

ERRORS = "gpus[2]['nvlink_errors']"


LINKS, RARE, REPLAYS = "test_nvlinks_stayed_clean", "test_memory_errors_stayed_rare", "test_pcie_links_stayed_clean"
CORRECTED, REMAPPED, REPLAYED = "gpus[2]['ecc_corrected']", "gpus[2]['remapped_rows']", "gpus[2]['pcie_replays']"
# The check of what GPU 2 reads in the end, after how many minutes, and what is said against it; "": nothing.
AFTER = [
    (LINKS, 1, f"{ERRORS} = {LOST}", "cannot be read (NVML: GPU is lost)"),
    (
        LINKS,
        1,
        f"for kind, counts in {ERRORS}.items(): {ERRORS}[kind] = counts[1:]",
        "on 17 NVLinks, at the beginning on 18",
    ),
    (LINKS, 1, f"{ERRORS} = {{'symbol': [0] * 18}}", "replay errors are counted on 0 NVLinks, at the beginning on 18"),
    (LINKS, 1, f"{ERRORS}['replay'][0] += 1", "NVLink 0 had 1 replay errors"),
    (LINKS, 1, f"{ERRORS}['crc_data'] = [10**6] * 18", "crc_data errors in "),
    (LINKS, 1, "", ""),
    # An error in the data of each link, which it corrected.
    (LINKS, 1, f"{ERRORS}['crc_data'] = [count + 1 for count in {ERRORS}['crc_data']]", ""),
    (RARE, 5, f"{CORRECTED} = {{'dram': 20_000_000, 'sram': 10_000}}", ""),
    (RARE, 5, f"{CORRECTED} = {{'dram': 0, 'sram': 10_001}}", "10,001 corrected errors in SRAM"),
    (RARE, 5, f"{CORRECTED} = {{'dram': 20_000_001, 'sram': 0}}", "in DRAM in 300 s"),
    (RARE, 3 * 1440, f"{CORRECTED} = {{'dram': 30_000_000, 'sram': 0}}", ""),  # a burn-in of days
    (RARE, 5, f"{REMAPPED} = [1, 0, 0, 0]", ""),
    (RARE, 5, f"{REMAPPED} = [2, 0, 0, 0]", "2 rows were remapped"),
    (RARE, 5, f"{CORRECTED} = {LOST}", "GPU is lost"),
    (REPLAYS, 1, f"{REPLAYED} = 30", ""),  # 30 a minute are healthy on 16 lanes of generation 5
    (REPLAYS, 1, f"{REPLAYED} = 150", "150 PCIe replays in 60 s, a healthy link has at most 31"),
    (REPLAYS, 1, f"{REPLAYED} = {LOST}", "pcie_replays cannot be read (NVML: GPU is lost)"),
]
# The same of the NVLinks of a B200, a minute later.
OF_BLACKWELL = [
    ("", ""),
    ("for gpu in gpus: gpu['nvlink_fec'] = [[10**10, 90000, 170, 2] + [0] * 12] * 18", ""),
    (f"{ERRORS}['symbol'][5] += 1", ""),  # of 144 links in hours one burst, which was sent again
    (f"{ERRORS}['symbol'][5] += 40", "NVLink 5 had 40 symbol errors"),
    (f"{ERRORS}['effective'][0] += 40", "NVLink 0 had 40 effective errors"),
    (f"{ERRORS}['recovery'][17] = None", "recovery errors of NVLink 17 were 0 and are None"),
    (f"{ERRORS} = Missing('NVML: Not Supported', absent=True)", "cannot be read"),
]


@pytest.mark.parametrize(
    ("machine", "check", "minutes", "change", "words"),
    [*(("", *row) for row in AFTER), *((BLACKWELL, LINKS, 1, *row) for row in OF_BLACKWELL)],
)
def test_what_a_run_leaves_behind(machine, check, minutes, change, words):
    here = recorded(machine)
    begun = replace(here.machine, _read_at=time.monotonic() - 60 * minutes)
    outcome = outcomes(replace(here, machine=begun), now=recorded(machine + change))[check]
    assert (outcome.what, outcome.gpus) == (("failed", {2}) if words else ("passed", set()))
    assert words in outcome.message


@pytest.mark.parametrize(
    ("change", "what", "words"),
    [
        ("", "passed", ""),
        ("ports[1]['errors']['symbol_error'] += 11", "failed", "mlx5_1/1: symbol_error grew by 11"),
        ("ports[1]['errors']['symbol_error'] = None", "failed", "symbol_error cannot be read"),
        ("del ports[1]", "failed", "mlx5_1/1: it is gone"),
        ("for one in ports: one['errors'] = {}", "failed", "cannot be read"),
    ],
)
def test_network_ports_of_the_whole_run(change, what, words):
    here, now = recorded(PORTS_WITH_PCIE), recorded(PORTS_WITH_PCIE + change)
    outcome = outcomes(here, now=now)[PORTS_CLEAN]
    assert outcome.what == what
    assert {fault.name for fault in outcome.faults} == ({"network_port_errors"} if words else set())
    assert words in outcome.message


@pytest.mark.parametrize(
    ("fact", "check"),
    [("memory_errors", "test_host_memory_errors_stayed_rare"), ("pci_devices", "test_pcie_paths_stayed_clean")],
)
def test_what_the_host_told_when_the_run_began_and_does_not_any_more_is_not_judged(fact, check):
    before = recorded(f"{SETUP}{ERRORS_OF_MEMORY}host['pci_devices'] = {{}}")
    for now, what in ((None, "skipped"), (Missing("no EDAC driver", absent=True), "skipped")):
        assert outcomes(before, now={fact: now})[check].what == what
    for never, what in ((None, "not applicable"), (Missing("KeyError: it is odd"), "skipped")):
        here = replace(before.machine, host={**before.machine.host, fact: never})
        assert outcomes(replace(before, machine=here))[check].what == what


def test_a_gpu_without_error_correction_has_no_corrected_errors():
    here = recorded("for gpu in gpus: gpu['ecc_corrected'] = Missing('NVML: Not Supported', absent=True)")
    assert outcomes(here, now=here)[RARE].what == "not applicable"


@pytest.mark.parametrize(("model", "what"), [("NVIDIA H200", "skipped"), ("NVIDIA GeForce RTX 3090", "not applicable")])
def test_pcie_replays_that_nvml_does_not_count(model, what):
    """An H200 does count them: its driver or nvidia-ml-py is blind. Of a GeForce nobody can say."""
    here = recorded(
        f"for gpu in gpus:\n  gpu.update(name='{model}', compute_capability=[8, 6])\n"
        "  gpu['pcie_replays'] = Missing('NVML: Not Supported', absent=True)"
    )
    assert outcomes(here, now=here)["test_pcie_links_stayed_clean"].what == what


# ---------------------------------------------------------------- whole runs


INVENTORY_AND_HEALTH = (
    *(ACCEPTANCE / name for name in ("test_1_inventory.py", "test_2_health.py")),
    # A single sample: plots are tested elsewhere.
    *("--gpus=4", "--fleet-dir=runs", "--fleet-interval=10", *RECORDED, "-k", NEEDS_GPUS),
)


@pytest.fixture
def described(run_pytest):
    """described(change, *arguments): a run of inventory and health on the recorded machine after `change`."""
    return lambda change, *arguments, **environment: run_pytest(
        *INVENTORY_AND_HEALTH, *arguments, CHANGE=change, **environment
    )


def test_a_machine_with_one_gpu_as_it_was():
    found = outcomes(recorded(snapshot="h200x1"), asked=1)
    assert failed(found) == {"test_software_fits_driver"}  # its snapshot is of schema 1: no versions
    assert found["test_nvlinks_are_up"].what == found["test_fabric_is_ready"].what == "not applicable"


def test_no_failing_call_crashes_the_run(described):
    """Every fact of GPU 2 fails at once."""
    run = described("gpus[2].update({name: Missing('NVML: GPU is lost') for name in list(gpus[2])[3:]})")
    assert "INTERNALERROR" not in run.text
    assert named(run.check("test_ecc_is_on").message) == {2}


# What an H200 looks like whose driver and nvidia-ml-py do not fit together.
BLIND = """
for gpu in gpus:
    for name in gpu.keys() - {"name", "uuid", "pci_bus_id", "memory_bytes"}:
        gpu[name] = Missing("NVML: Not Supported", absent=True)
"""


def test_a_machine_that_tells_nothing_is_not_healthy(described):
    run = described(BLIND, "--gpus=1")
    assert (run.status, run.record.verdict) == (10, "INCOMPLETE"), run.text
    assert "failed" not in run.outcomes.values()
    for name in (ECC, "test_ecc_is_on", "test_power_limit_is_default"):
        assert run.outcomes[name] == "skipped", run.text
        assert "not judged: GPU 0 NVIDIA H200, no serial, 00000000:00:06.0" in run.check(name).message
    blind = [reason for reason in run.record.reasons if "telemetry never had" in reason]
    assert len(blind) == 1
    assert "clock_event_reasons, temperature_c and power_watts: no slowdown would have been seen" in blind[0]


def test_dcgm_fails_by_its_faults_alone_and_never_passes_what_it_has_not_seen():
    fault = Fault("dcgm_part_broken", (place.gpu(2),), "memory failed")
    remark = Fault("dcgm_warning", (place.gpu(1),), "eud was skipped")
    cases = {
        "failed": Diagnosis(faults=[fault], unseen=["its JSON is cut short"]),
        "skipped": Diagnosis(shown=[remark], unseen=["its JSON is cut short"]),
        "not applicable": Diagnosis(shown=[remark], outcomes=Counter(["Skip"])),
        "passed": Diagnosis(shown=[remark]),
    }
    for what, found in cases.items():
        check = outcomes(recorded(), dcgm_diagnosis=lambda found=found: found)["test_dcgm_diagnostic_passes"]
        assert (check.what, check.faults) == (what, tuple(found.faults))

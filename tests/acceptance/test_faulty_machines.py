"""A recorded 4x H200 with one thing wrong: the check that fails, and the GPUs it names. What is planted for
docs/planted-faults.md (docs/make_planted_faults.py) is not planted here again."""

import re
import time
from collections import Counter
from dataclasses import replace

import pytest

from pytest_gpufleet import cli
from pytest_gpufleet.machine import health
from pytest_gpufleet.machine.dcgm import Diagnosis
from pytest_gpufleet.machine.gpu_facts import COUNTERS
from pytest_gpufleet.machine.health import ClocksUnderLoad
from pytest_gpufleet.machine.kernel_log import Logged
from pytest_gpufleet.model import place
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import Gpu, GpuTopology, Missing
from pytest_gpufleet.verdict.orders import load
from tests.acceptance.checks import outcomes, ranks_answer
from tests.conftest import ACCEPTANCE, RECORDED
from tests.machines import SINCE_THE_SNAPSHOTS, recorded, set_gpu, set_gpus, set_host, set_machine, set_port, then

# What needs ranks, and so real GPUs.
NEEDS_GPUS = "not under_load and not every_rank"
ECC = "test_no_memory_error_is_recorded"
XIDS, HOST_LOG = "test_no_grave_xid_in_the_kernel_log", "test_no_grave_message_of_the_host_in_the_kernel_log"
PORTS_UP, FULL_PCIE = "test_network_ports_are_active", "test_network_ports_have_full_pcie"
PORTS_CLEAN = "test_network_ports_stayed_clean"
AS_MUCH_MEMORY, FEW_ERRORS = "test_every_socket_has_as_much_memory", "test_host_memory_had_few_errors"
SERIAL = "serial 0000000000002"
NOBODY = set()
NODE, GPU_2, ALL = {"node"}, {"gpu2"}, {"gpu0", "gpu1", "gpu2", "gpu3"}
ABSENT, LOST = Missing("NVML: Not Supported", absent=True), Missing("NVML: GPU is lost")


def failed(check_outcomes):
    return {name for name, outcome in check_outcomes.items() if outcome.what == "failed"}


def named(text):
    return set(map(int, re.findall(r"\bGPU (\d+) ", text)))


# ---------------------------------------------------------------- machines
def port(number, **more):
    usual = {"state": "4: ACTIVE", "rate": "400 Gb/sec", "link_layer": "InfiniBand", "adapter": "MT4129"}
    return {"port": f"mlx5_{number}/1", **usual, "function": "0", **more}


def ports(machine):
    """Four InfiniBand ports, a management port of another adapter, and the second ports of two adapters, without a
    cable."""
    management = port(4, link_layer="Ethernet", adapter="MT4120", rate="40 Gb/sec")
    unplugged = {"function": "1", "state": "1: DOWN", "rate": "10 Gb/sec"}
    machine.host["network_ports"] = [*map(port, range(4)), management, port(5, **unplugged), port(6, **unplugged)]


def with_storage(machine):
    """A card for storage that is down, as a DGX H100 has two beside those of its GPUs."""
    machine.host["network_ports"].append(port(7, state="1: DOWN", rate="10 Gb/sec"))
    for index, gpu in enumerate(machine.gpus):
        gpu["network_adapters"] = [f"mlx5_{index}"]


def pcie(**link):
    able = {"lanes_able": 16, "lanes_of_port": 16, "speed_able": 32, "speed_of_port": 32}
    return {"lanes": 16, "speed": 32, **able, **link}


PORT_ERRORS = {"link_downed": 1, "symbol_error": 15}


def ports_with_pcie(machine):
    machine.host["network_ports"] = [port(number, pcie=pcie(), errors=PORT_ERRORS) for number in range(4)]


def set_setup(**more):
    return lambda machine: machine.host["processor_setup"].update(more)


def two_sockets(machine):
    memory = {"0": 1 << 40, "1": 1 << 40}
    setup = {"clock_source": "tsc", "offline": [], "smt": "on", "numa_memory": memory, "virtual": False, "sockets": 2}
    machine.host["processor_setup"] = setup


def set_modules(**of_the_fourth):
    module = {"bytes": 64 << 30, "type": "DDR5", "configured_speed": 4800}
    modules = [{**module, "locator": f"DIMM_{slot}", **(of_the_fourth if slot == 3 else {})} for slot in range(16)]
    return set_host(memory_modules=modules)


def memory_errors(uncorrected=0):
    counts = {"corrected": 3, "uncorrected": uncorrected}
    return set_host(memory_errors=[{"name": "DIMM_A1 (mc0, channel 0 slot 0)", "counts": counts, "seconds": 900}])


def fell_off(device):
    return set_machine(log=f"NVRM: Xid (PCI:0000:00:{device}): 79, pid=1, GPU has fallen off the bus.")


def fabric(**health):
    return {"fabric_health": {**SINCE_THE_SNAPSHOTS["fabric_health"], "mask": 0x1AA, **health}}


def topology_file(**read):
    return set_host(topology_file={"path": "/opt/microsoft/ndv5-topo.xml", **read})


def narrow(gpu):
    return {"pcie_width": 8, "pcie_width_max": 8, "pcie_width_able": {"gpu": gpu}}


HARMLESS_LOG = """
EDAC MC: Ver: 3.0.0
pcieport 0000:00:00.0: AER: enabled with IRQ 59
mce: CPU supports 7 MCE banks
pcieport 0000:00:01.1: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Receiver ID)
watchdog: BUG: soft lockup - CPU#18 stuck for 27s! [python3:2254956]
oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/kubepods.slice,task_memcg=/x,task=java
"""
LINK_DOWN = "mlx5_core 0000:01:00.0 enp1s0f0np0: Link down\n"
COOL = "test_gpus_are_cool_at_idle"
TOPOLOGY_FILE, VERSIONS = "test_topology_file_fits", "test_versions_have_no_known_defect"
FOUR_GPUS = [f"0000:00:0{number}.0" for number in range(6, 10)]
NO_FABRIC = {"fabric": {"state": 0, "status": 0}}
ONE_DOWN = [*[1] * 4, 0, *[1] * 13]  # NVLinks


def tray(**imex):
    """Of an NVL72: four GPUs whose NVLinks leave it."""
    ready = {"nodes": [f"10.0.0.{number}" for number in range(18)], "channels": 1, "daemon": "READY"}
    of_model = {"memory_bytes": 186 * 10**9, "power_limit_watts": 1200.0, "power_limit_default_watts": 1200.0}
    gpus = set_gpus(name="NVIDIA GB200", compute_capability=[10, 0], nvlink_speeds=[50.0] * 18, **of_model)
    return then(gpus, set_host(imex={**ready, **imex}))


def bridged(machine):
    """Without NVSwitch and profile facts that count NVLinks: A100 PCIe, of which bridges connect GPU 0 with 1 and 2
    with 3."""
    row = ["X", "NV12", "SYS", "SYS"]
    matrix = [row, [row[1], row[0], *row[2:]], [*row[2:], *row[:2]], [*row[2:], row[1], row[0]]]
    machine.fabric, machine.links = "nvlink", matrix
    set_gpus(
        name="NVIDIA A100 80GB PCIe", memory_bytes=80 << 30, pcie_generation_max=4, nvlink_states=[1] * 12,
        nvlink_speeds=[25.0] * 12, **NO_FABRIC,
    )(machine)  # fmt: skip
    for gpu, of_gpu in zip(machine.gpus, matrix, strict=True):
        gpu["p2p"] = {name: [0 if link in ("X", "NV12") else 1 for link in of_gpu] for name in gpu["p2p"]}


def reach(status):
    """By nvmlGpuP2PStatus_t to read and to write, of all with each other."""
    rows = [[status if row != column else 0 for column in range(4)] for row in range(4)]
    return then(*(set_gpu(index, p2p={"read": row, "write": row}) for index, row in enumerate(rows)))


def no_read_of_1(machine):
    machine.gpus[2]["p2p"]["read"][1] = 4


UNLINKED = {"nvlink_states": [0] * 12, "nvlink_speeds": [0.0] * 12}
half_bridged = then(bridged, set_gpu(2, **UNLINKED), set_gpu(3, **UNLINKED))
unbridged = then(
    bridged,
    reach(1),
    set_gpus(**UNLINKED),
    set_machine(fabric="pcie", links=[["X" if row == column else "SYS" for column in range(4)] for row in range(4)]),
)
# Peer access over PCIe between all, as A100 PCIe without bridges have it.
over_pcie = then(unbridged, reach(0))


def blackwell(machine):
    """A B200 as it might describe itself: NVLink 5 with its counters, and errors in the kernel log that call for
    nothing."""
    machine.log = """
NVRM: Xid (PCI:0000:00:08): 149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 (0x00000013 0x00000001 0x0)
NVRM: Xid (PCI:0000:00:08): 144, SAW_MVB Nonfatal XC0 i0 Link 03 (0x00000001 0x00000004 0x0)
NVRM: Xid (PCI:0000:00:08): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 11 (0x00000006 0x00000002 0x0)
NVRM: Xid (PCI:0000:00:08): 146, TLW_RX_PIPE0 Nonfatal XC0 i0 Link 11 (0x0000000a 0x00000001 0x0)
NVRM: Xid (PCI:0000:00:08): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)
"""
    set_gpus(
        name="NVIDIA B200", compute_capability=[10, 0], memory_bytes=179 << 30, nvlink_speeds=[50.0] * 18,
        power_limit_watts=1000.0, power_limit_default_watts=1000.0,
        **fabric(),
    )(machine)  # fmt: skip
    for gpu in machine.gpus:
        gpu["nvlink_errors"] = {kind: [0] * 18 for kind in ("receive", "recovery", "effective", "symbol")}


def fatal_of_nvlink_5(machine):
    machine.log += "NVRM: Xid (PCI:0000:00:08): 149, NETIR_LINK_DOWN Fatal XC0 i0 Link 03 (0x00200011 0x00000000 0x0)\n"


# Two GPUs at each socket of 48 processors, as NVML has it in words of 64 bits.
FIRST, SECOND = [2**48 - 1] + [0] * 15, [2**64 - 2**48, 2**32 - 1] + [0] * 14


def affinity_by_socket(machine):
    for index, gpu in enumerate(machine.gpus):
        first = index // 2 * 48
        gpu.update(cpu_affinity=(FIRST, SECOND)[index // 2], pci_bus_cpus=list(range(first, first + 48)))


SMOOTHED = set_gpus(power_smoothing=[1, 2])  # enabled, by preset 2
SAME_GSP, SAME_BAR1 = set_gpus(gsp_firmware="580.159.04"), set_gpus(bar1_bytes=256 << 30)
ABOVE = 10_001, 20_000_001  # corrected errors in SRAM and DRAM that are too many in a day
# What is there before the change, for checks that look at more than a recorded machine has.
THERE = {
    FULL_PCIE: ports_with_pcie, PORTS_UP: ports, "test_memory_modules_are_alike": set_modules(),
    FEW_ERRORS: memory_errors(), "test_host_memory_errors_stayed_rare": memory_errors(),
}  # fmt: skip


def described(check, change):
    return recorded(two_sockets, THERE.get(check, then()), change)


# Check, change, the code of its faults, the places that they name, and words of what they say.
FAULTY = [
    ("test_gpu_count",
     then(set_machine(count=3), lambda machine: machine.host["environment"].update(CUDA_VISIBLE_DEVICES="0,1,2")),
     "gpu_missing", NODE, "hides"),
    ("test_nvlinks_are_up", then(bridged, set_gpu(2, nvlink_states=ONE_DOWN[:12])), "nvlink_down", GPU_2,
     "12 active links, as others have"),
    ("test_nvlinks_are_up", set_gpus(nvlink_states=ABSENT), "fact_unreadable", ALL, "nvlink_states"),
    # half and half: nobody knows which are wrong
    ("test_gpus_are_alike[vbios]", then(set_gpu(2, vbios="96.00.99"), set_gpu(3, vbios="96.00.99")),
     "gpu_unlike_others", ALL, "that of most GPUs"),
    ("test_memory_is_complete", set_gpu(2, memory_bytes=120 << 30), "memory_incomplete", GPU_2),
    ("test_fabric_is_ready", set_gpu(2, fabric={"state": 2, "status": 0}), "fabric_not_ready", GPU_2),
    ("test_fabric_is_ready", set_gpu(2, **fabric(mask=1 << 4)), "fabric_degraded", GPU_2, "route is unhealthy"),
    ("test_fabric_is_ready", set_gpus(**fabric(mask=5 << 8)), "fabric_degraded", ALL, "too few NVLinks"),
    ("test_fabric_is_ready", set_gpu(2, **fabric(clique=1)), "fabric_split", GPU_2),
    ("test_imex_is_ready", tray(daemon="connection refused"), "imex_down", NODE, "refused"),
    ("test_imex_is_ready", tray(channels=0), "imex_channel_missing", NODE),
    (ECC, set_gpu(2, memory_unrepairable=True), "memory_unrepairable", GPU_2),
    (ECC, set_gpu(2, repair_pending=[0, 1]), "recovery_pending", GPU_2, "TPC"),
    (ECC, set_gpu(2, ecc_corrected={"dram": ABOVE[1], "sram": 0}), "many_corrected_errors", GPU_2, "in DRAM"),
    (ECC, set_gpu(2, ecc_corrected={"dram": 0, "sram": ABOVE[0]}), "many_corrected_errors", GPU_2, "in SRAM"),
    (ECC, set_gpu(2, spare_rows={"max": 3071, "high": 0, "partial": 0, "low": 0, "none": 1}), "spare_rows_used_up",
     GPU_2),
    (ECC, set_gpu(2, remapped_rows=[0, 1, 0, 1]), "row_remapping_failed", GPU_2),
    (XIDS, then(set_machine(count=3), fell_off("09")), "gpu_lost", NOBODY, "XID 79"),
    (XIDS, then(set_gpu(2, pci_bus_id=LOST), fell_off("08")), "gpu_lost", NOBODY),
    (XIDS, set_machine(log="nvidia-nvswitch1: SXid (PCI:0000:86:00.0): 20034, Fatal, Link 30"), "sxid_fatal", NOBODY),
    (XIDS, then(blackwell, fatal_of_nvlink_5), "xid_reset", GPU_2, "Link 03"),
    (FULL_PCIE, set_port(1, pcie=pcie(speed=16)), "nic_pcie_slow", NODE, "mlx5_1/1", "16 GT/s"),
    (FULL_PCIE, set_port(1, pcie=pcie(lanes=8, lanes_of_port=8)), "nic_pcie_slow", NODE, "for its 400 Gbit/s"),
    (HOST_LOG, set_machine(log="nvidia 0000:00:08.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Data Link"),
     "pcie_error_logged", GPU_2),
    ("test_persistence_mode_is_on", set_gpus(persistence_mode=0, name="NVIDIA L40S", brand=14), "persistence_mode_off",
     ALL),
    ("test_no_foreign_process", set_machine(processes={2: ["process 4711 (miner)"]}), "foreign_process", GPU_2, "4711"),
    (VERSIONS, set_machine(driver="570.86.15"), "version_defective", NODE, "570.133.20"),
    ("test_memory_may_be_locked", set_host(locked_memory_limit=65536), "locked_memory_limited", NODE),
    ("test_software_fits_driver", set_machine(problems=["driver 450"]), "software_mismatch", NODE, "driver 450"),
    ("test_files_may_be_opened", set_host(open_files_hard_limit=1024), "open_files_limited", NODE),
    ("test_processors_near_each_gpu_may_be_used", set_gpu(2, cpu_affinity=[0, 1] + [0] * 14), "cpu_affinity", GPU_2),
    (PORTS_UP, set_port(state="1: DOWN"), "network_port_unlike_others", NODE, "is 1: DOWN"),
    ("test_inforom_is_valid", set_gpu(2, inforom_valid=False), "inforom_invalid", GPU_2),
    ("test_clock_source_is_fast", set_setup(clock_source="hpet"), "clock_source_slow", NODE),
    ("test_processors_are_online", set_setup(offline=[5, 13]), "cpu_offline", NODE, "5, 13"),
    ("test_memory_modules_are_alike", set_modules(configured_speed=4400), "dimm_slow", NODE, "DIMM_3"),
    (FEW_ERRORS, memory_errors(uncorrected=1), "host_memory_uncorrected", NODE, "DIMM_A1"),
    ("test_no_recovery_is_pending", set_gpu(2, recovery_action=2), "recovery_pending", GPU_2),
]  # fmt: skip
NOBODY_COUNTS = set_host(memory_errors=Missing("no EDAC driver counts them", absent=True))
# By check: look-alikes that pass, and machines to which it does not apply; others are in docs/planted-faults.md.
HEALTHY = {
    "test_fabric_is_ready": [set_gpus(fabric_health=ABSENT)],
    "test_imex_is_ready": [tray()],
    "test_gpus_are_alike[power_smoothing]": [set_gpus(power_smoothing=[0, 0])],
    # a virtual machine that shows all processors everywhere, and a socket of several NUMA nodes
    "test_cpu_affinity_fits_the_pci_bus": [
        then(affinity_by_socket, set_gpus(pci_bus_cpus=list(range(96)))),
        then(affinity_by_socket, set_gpu(1, cpu_affinity=[2**24 - 1] + [0] * 15)),
    ],
    "test_default_power_limit_is_of_the_model": [then(), set_gpus(power_limit_default_watts=699.5)],
    ECC: [set_gpu(2, ecc_corrected={"dram": 3_666_595, "sram": 0}, ecc_corrected_volatile=3_666_595)],
    FULL_PCIE: [
        then(),
        then(set_port(rate="200 Gb/sec"), set_port(0, pcie=pcie(lanes=8, lanes_of_port=8))),
        # a machine whose slots are all of an older generation than its adapters
        set_port(rate="200 Gb/sec", pcie=pcie(speed=8, speed_of_port=8)),
    ],
    # a file of more than was asked for; and firmware without a security update
    TOPOLOGY_FILE: [topology_file(devices=[*FOUR_GPUS, "0000:00:0a.0", "ffff:ff:01.0"])],
    VERSIONS: [then(), set_machine(driver="550.163.01"), set_host(network_ports=[port(0, firmware="28.39.2048")])],
    # a cloud's topology file
    "test_no_harmful_variable": [
        lambda machine: machine.host["environment"].update(NCCL_TOPO_FILE="/opt/microsoft/ndv5-topo.xml")
    ],
    # an adapter of another kind that does not answer
    PORTS_UP: [set_port(4, state="unknown", rate=None), with_storage],
    "test_clock_source_is_fast": [then()],
    "test_processors_are_online": [then()],
    AS_MUCH_MEMORY: [then()],
    "test_memory_modules_are_alike": [memory_errors()],
    FEW_ERRORS: [then()],
    "test_host_memory_errors_stayed_rare": [then()],
}
NOT_APPLICABLE = {
    # GeForce, and boards of workstations
    "test_persistence_mode_is_on": [set_gpus(persistence_mode=0, brand=brand) for brand in (5, 12)],
    TOPOLOGY_FILE: [then()],
    "test_gpus_are_alike[power_smoothing]": [then(), set_gpus(power_smoothing=ABSENT)],
    COOL: [set_gpus(compute_capability=[8, 0], temperature_c=75)],
    "test_nvlinks_are_up": [unbridged],
    "test_imex_is_ready": [then(), set_host(imex={"nodes": ["10.0.0.1"], "channels": 0, "daemon": "down"})],
    # sold with error correction off
    "test_ecc_is_on": [set_gpus(ecc_mode=[0, 0], ecc_mode_default=0)],
    FULL_PCIE: [set_port(pcie=dict.fromkeys(pcie(), 0))],  # virtual adapters
    # one NUMA node, and a virtual machine whose host gives one NUMA node less memory
    AS_MUCH_MEMORY: [
        set_setup(numa_memory={"0": 1 << 40}),
        set_setup(virtual=True, clock_source="kvm-clock", numa_memory={"0": 1 << 40, "1": 1 << 39}),
    ],
    FEW_ERRORS: [NOBODY_COUNTS],
    "test_host_memory_errors_stayed_rare": [NOBODY_COUNTS],
    PORTS_CLEAN: [then(), ports, then(ports_with_pcie, set_port(errors={}))],  # ports that count no errors
}


def test_what_a_machine_does_not_show_is_described_by_its_reason_alone():
    """Whoever reads it looks for no names of this program, and does not read the same thing in two ways."""
    why = "its host keeps it"
    facts = (
        "cpu_governor", "memory_modules", "memory_errors", "pci_devices", "disk_health", "bmc", "optics", "rdma_writes",
    )  # fmt: skip
    found = outcomes(recorded(set_host(**dict.fromkeys(facts, Missing(why, absent=True)), network_ports=[])))
    messages = {name: each.message for name, each in found.items() if each.what == "not applicable"}
    assert len([message for message in messages.values() if message == f"not applicable: {why}"]) >= len(facts)
    assert messages[PORTS_UP] == messages[PORTS_CLEAN]
    assert not [message for message in messages.values() for fact in facts if fact in message]


@pytest.mark.parametrize(("check", "change", "code", "places", "words"), [
    pytest.param(*row[:4], row[4:], id=row[2]) for row in FAULTY
])  # fmt: skip
def test_a_fault_is_caught(check, change, code, places, words):
    faults = outcomes(described(check, change))[check].faults
    assert {fault.name for fault in faults} == {code}
    assert {str(subject) for fault in faults for subject in fault.subjects} == places
    assert all(word in fault.what for fault in faults for word in words)


@pytest.mark.parametrize("ends", ["passed", "not applicable"])
def test_what_looks_like_a_fault_is_none(ends):
    for check, changes in (HEALTHY if ends == "passed" else NOT_APPLICABLE).items():
        for change in changes:
            found = outcomes(described(check, change))
            assert (found[check].what, failed(found)) == (ends, set()), check


FREE = ClocksUnderLoad(1980, 3201, 0, 480.0)  # as on two H200
RTX_4090 = ClocksUnderLoad(2745, 10251, 0, 300.0)  # a model that rarely reaches its maximum
OF_4090 = set_gpus(compute_capability=[8, 9], sm_clock_max_mhz=3105, memory_clock_max_mhz=10501)
GENERATION = "pcie_generation_under_load", "test_pcie_generation_is_full_under_load"
CLOCKS = "clocks_under_load", "test_clocks_are_full_under_load"


def one(answer, of=FREE):
    return [of, of, answer, of]


# Probe and check, machine, what each rank reads while data flows, and the outcome. Of a link its generation, and the
# highest it can; None: NVML cannot say.
UNDER_LOAD = [
    (GENERATION, then(), [(4, 4)] * 4, "failed", {0, 1, 2, 3}, "generation 4 of 5"),
    (GENERATION, then(), one(None, (5, 5)), "failed", {2}, "generation unknown of 5"),
    (GENERATION, then(), [None] * 4, "not applicable", set(), "NVML does not"),
    (CLOCKS, then(), [FREE] * 4, "passed", set()),
    # held back by its power limit, and not
    (CLOCKS, then(), one(FREE._replace(sm=1755, reasons=0x4, watts=668.0)), "passed", set()),
    (CLOCKS, then(), one(FREE._replace(sm=1755, reasons=0x4, watts=0.0)), "passed", set()),
    (CLOCKS, then(), one(FREE._replace(sm=1410, reasons=0x4)), "failed", {2}, "of 1980, at 480 W of 700 W"),
    (CLOCKS, then(), one(FREE._replace(sm=1410)), "failed", {2}, "SM clock of at most 1410 MHz"),
    (CLOCKS, then(), one(FREE._replace(memory=2201)), "failed", {2}, "memory clock of at most 2201"),
    (CLOCKS, then(), one(None), "failed", {2}, "cannot be read"),
    (CLOCKS, then(), [None] * 4, "not applicable", set(), "NVML does not"),
    (CLOCKS, OF_4090, [RTX_4090] * 4, "passed", set()),
    (CLOCKS, OF_4090, [RTX_4090._replace(sm=2100)] * 4, "failed", {0, 1, 2, 3}),
]


@pytest.mark.parametrize("row", UNDER_LOAD)
def test_what_ranks_read_under_load(row):
    (probe, check), change, answers, what, gpus, *words = row
    outcome = outcomes(recorded(change), world=ranks_answer(answers, probe))[check]
    assert (outcome.what, outcome.gpus) == (what, gpus)
    assert [each for each in words if each not in outcome.message] == []


IMEX, FABRIC = "test_imex_is_ready", "test_fabric_is_ready"


@pytest.mark.parametrize(("check", "change", "what", "words"), [
    (IMEX, set_host(imex=Missing("nothing of it is here", absent=True)), "skipped", "a ComputeDomain"),
    (IMEX, set_host(imex=Missing("it is not installed", remedy="install it")), "skipped", "install it"),
    (IMEX, set_host(imex={"nodes": ["10.0.0.1"], "channels": 1, "daemon": "WAITING_FOR_PEERS"}), "skipped",
     "nvidia-imex-ctl -N"),
    # the links say that they end at NVSwitches
    (FABRIC, set_gpus(**NO_FABRIC), "skipped", "systemctl status nvidia-fabricmanager"),
    # four GPUs linked by their board, and by bridges
    (FABRIC, then(set_gpus(**NO_FABRIC), set_machine(fabric="pcie")), "not applicable", "no NVSwitch fabric"),
    (FABRIC, bridged, "not applicable", "no NVSwitch fabric"),
])  # fmt: skip
def test_imex_and_a_fabric_that_say_nothing_of_this_machine_are_not_judged(check, change, what, words):
    found = outcomes(recorded(tray() if check == IMEX else then(), change))[check]
    assert (found.what, words in found.message) == (what, True)


WORN = set_gpu(2, remapped_rows=[2, 30, 0, 0], ecc_uncorrected_aggregate=120)


@pytest.mark.parametrize(
    ("change", "names"), [(WORN, set()), (set_gpu(2, remapped_rows=[2, 512, 0, 0]), {"many_rows_remapped"})]
)
def test_what_ages_is_no_fault_of_used_hardware(change, names):
    assert {fault.name for fault in outcomes(recorded(change), fleet_used=True)[ECC].faults} == names


@pytest.mark.parametrize(("change", "gpus"), [
    (set_gpu(2, temperature_c=61), {2}),
    (set_gpus(temperature_c=75), {0, 1, 2, 3}),
    (set_gpu(2, temperature_c=60), set()),
    # which another check names
    (then(set_gpu(2, temperature_c=75), set_machine(processes={2: ["process 4711 (miner)"]})), set()),
], ids=["one", "all", "at the ceiling", "at work"])  # fmt: skip
def test_gpus_that_stay_hot_without_work_are_named(change, gpus, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    found = outcomes(recorded(change))[COOL]
    assert ({fault.name for fault in found.faults}, found.gpus) == ({"hot_at_idle"} if gpus else set(), gpus)


def test_a_gpu_that_cools_down_from_work_is_healthy(monkeypatch):
    readings = iter([[75, 40], [66, 35], [58, 35]])
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert health.hot_at_idle(recorded().machine.gpus[:2], lambda: next(readings)) == []
    assert [*readings] == []


def test_eight_gpus_whose_nvlinks_need_no_bridge_are_behind_nvswitches():
    hopper = [Gpu(index, {"compute_capability": [9, 0]}) for index in range(8)]
    assert health.has_nvswitch(hopper, GpuTopology(fabric="pcie"), 18)
    assert not health.has_nvswitch(hopper, GpuTopology(fabric="pcie"), 0)
    assert not health.has_nvswitch(hopper[:4], GpuTopology(fabric="nvlink"), 18)
    ampere = [Gpu(index, {"compute_capability": [8, 0]}) for index in range(8)]
    assert not health.has_nvswitch(ampere, GpuTopology(fabric="nvswitch"), 12)


def test_xid_of_a_gpu_that_is_only_hidden_is_nothing_against_this_run():
    found = outcomes(recorded(set_machine(count=3, hidden=["00000000:00:09.0"]), fell_off("09")), asked=3)
    assert (failed(found), found[XIDS].what) == (set(), "passed")


# ---------------------------------------------------------------- facts that cannot be had
REASONS = "Not Supported", "Insufficient Permissions", "GPU is lost", "Unknown Error"
# Facts that the report shows and no check of inventory and health judges; those of the last line, telemetry does.
SHOWN = {
    "board_part_number", "compute_capability", "pcie_generation", "temperature_limits_c",
    "numa_node", "pcie_width_able",
    "nvlink_versions", "nvlink_remote_types", "pci_device_id",  # of snapshots alone
    "sm_clock_max_mhz", "memory_clock_max_mhz",
    "processes", "clock_event_reasons", "power_watts",
}  # fmt: skip
# Older drivers do not have these; who looks at the end at what has grown misses the others.
MAY_BE_ABSENT = ({*COUNTERS} - {"remapped_rows", "pcie_replays"}) | {"fabric_health", "spare_rows", "temperature_c"}
IDENTITY = {"uuid", "serial", "pci_bus_id"}  # not every model has a serial number


@pytest.mark.parametrize("reason", REASONS)
def test_every_call_that_fails_alone_is_a_finding(reason):
    absent, unnoticed = reason == "Not Supported", set()
    for fact in recorded().machine.gpus[2].facts:
        found = outcomes(recorded(set_gpu(2, **{fact: Missing(f"NVML: {reason}", absent)})))
        if not failed(found):
            unnoticed.add(fact)
        for name in failed(found):
            assert found[name].gpus == {2}, (fact, name)
            assert f"NVML: {reason}" in found[name].message
    assert unnoticed == (SHOWN | IDENTITY | MAY_BE_ABSENT if absent else SHOWN)


# ---------------------------------------------------------------- what a run has left behind
def counted(kind, more, *links):
    def change(machine):
        counts = machine.gpus[2]["nvlink_errors"][kind]
        for link in links or range(18):
            counts[link] += more

    return change


def one_link_less(machine):
    machine.gpus[2]["nvlink_errors"] = {kind: row[1:] for kind, row in machine.gpus[2]["nvlink_errors"].items()}


def unreadable_link(machine):
    machine.gpus[2]["nvlink_errors"]["recovery"][17] = None


LINKS, RARE, REPLAYS = "test_nvlinks_stayed_clean", "test_memory_errors_stayed_rare", "test_pcie_links_stayed_clean"
# The machine, the check of what GPU 2 reads in the end, after how many minutes, and what is said against it; "":
# nothing.
AFTER = [
    (then(), LINKS, 1, set_gpu(2, nvlink_errors=LOST), "cannot be read (NVML: GPU is lost)"),
    (then(), LINKS, 1, one_link_less, "on 17 NVLinks, at the beginning on 18"),
    (then(), LINKS, 1, set_gpu(2, nvlink_errors={"symbol": [0] * 18}), "replay errors are counted on 0 NVLinks"),
    (then(), LINKS, 1, counted("replay", 1, 0), "NVLink 0 had 1 replay errors"),
    (then(), LINKS, 1, counted("crc_data", 10**6), "crc_data errors in "),
    (counted("replay", 9, 0), LINKS, 1, counted("replay", -8, 0), "NVLink 0 had 1 replay errors"),  # after a reset
    (then(), LINKS, 1, then(), ""),
    (then(), LINKS, 1, counted("crc_data", 1), ""),  # an error in the data of each link, which it corrected
    (blackwell, LINKS, 1, then(), ""),
    (blackwell, LINKS, 1, counted("symbol", 1, 5), ""),  # of 144 links in hours one burst, which was sent again
    (blackwell, LINKS, 1, counted("symbol", 40, 5), "NVLink 5 had 40 symbol errors"),
    (blackwell, LINKS, 1, counted("effective", 40, 0), "NVLink 0 had 40 effective errors"),
    (blackwell, LINKS, 1, unreadable_link, "recovery errors of NVLink 17 were 0 and are None"),
    (blackwell, LINKS, 1, set_gpu(2, nvlink_errors=ABSENT), "cannot be read"),
    (then(), RARE, 5, set_gpu(2, ecc_corrected={"dram": 20_000_000, "sram": 10_000}), ""),
    (then(), RARE, 5, set_gpu(2, ecc_corrected={"dram": 0, "sram": ABOVE[0]}), "10,001 corrected errors in SRAM"),
    (then(), RARE, 5, set_gpu(2, ecc_corrected={"dram": ABOVE[1], "sram": 0}), "in DRAM in 300 s"),
    # a burn-in of days
    (then(), RARE, 3 * 1440, set_gpu(2, ecc_corrected={"dram": 30_000_000, "sram": 0}), ""),
    (then(), RARE, 5, set_gpu(2, remapped_rows=[1, 0, 0, 0]), ""),
    (then(), RARE, 5, set_gpu(2, remapped_rows=[2, 0, 0, 0]), "2 rows were remapped"),
    (then(), RARE, 5, set_gpu(2, ecc_corrected=LOST), "GPU is lost"),
    (then(), REPLAYS, 1, set_gpu(2, pcie_replays=30), ""),  # healthy in a minute on 16 lanes of generation 5
    (then(), REPLAYS, 1, set_gpu(2, pcie_replays=150), "150 PCIe replays in 60 s, a healthy link has at most 31"),
    (set_gpu(2, pcie_replays=500), REPLAYS, 1, set_gpu(2, pcie_replays=150), "150 PCIe replays in 60 s"),
    (then(), REPLAYS, 1, set_gpu(2, pcie_replays=LOST), "pcie_replays cannot be read (NVML: GPU is lost)"),
]


@pytest.mark.parametrize(("machine", "check", "minutes", "change", "words"), AFTER)
def test_what_a_run_leaves_behind(machine, check, minutes, change, words):
    here = recorded(machine)
    begun = replace(here.machine, _read_at=time.monotonic() - 60 * minutes)
    outcome = outcomes(replace(here, machine=begun), now=recorded(machine, change))[check]
    assert (outcome.what, outcome.gpus) == (("failed", {2}) if words else ("passed", set()))
    assert words in outcome.message


@pytest.mark.parametrize(("change", "words"), [
    (then(), ""),
    (set_port(1, errors={**PORT_ERRORS, "symbol_error": 26}), "mlx5_1/1: symbol_error grew by 11"),
    (set_port(1, errors={**PORT_ERRORS, "symbol_error": None}), "symbol_error cannot be read"),
    (lambda machine: machine.host["network_ports"].pop(1), "mlx5_1/1: it is gone"),
    (set_port(errors={}), "cannot be read"),
])  # fmt: skip
def test_network_ports_of_the_whole_run(change, words):
    outcome = outcomes(recorded(ports_with_pcie), now=recorded(ports_with_pcie, change))[PORTS_CLEAN]
    assert outcome.what == ("failed" if words else "passed")
    assert {fault.name for fault in outcome.faults} == ({"network_port_errors"} if words else set())
    assert words in outcome.message


@pytest.mark.parametrize(
    ("fact", "check"),
    [("memory_errors", "test_host_memory_errors_stayed_rare"), ("pci_devices", "test_pcie_paths_stayed_clean")],
)
def test_what_could_be_read_of_the_host_when_the_run_began_and_cannot_any_more_is_not_judged(fact, check):
    before = recorded(two_sockets, memory_errors(), set_host(pci_devices={}))
    for now, what in ((None, "skipped"), (Missing("no EDAC driver", absent=True), "skipped")):
        assert outcomes(before, now={fact: now})[check].what == what
    for never, what in ((None, "not applicable"), (Missing("KeyError: it is odd"), "skipped")):
        here = replace(before.machine, host={**before.machine.host, fact: never})
        assert outcomes(replace(before, machine=here))[check].what == what


@pytest.mark.parametrize(("check", "facts", "what"), [
    (RARE, {"ecc_corrected": ABSENT}, "not applicable"),  # a GPU without error correction
    # An H200 does count them: its driver or nvidia-ml-py cannot read them. Of a GeForce nobody can say.
    (REPLAYS, {"pcie_replays": ABSENT, "name": "NVIDIA H200"}, "skipped"),
    (REPLAYS, {"pcie_replays": ABSENT, "name": "NVIDIA GeForce RTX 3090"}, "not applicable"),
])  # fmt: skip
def test_what_nvml_does_not_count(check, facts, what):
    here = recorded(set_gpus(compute_capability=[8, 6], **facts))
    assert outcomes(here, now=here)[check].what == what


def test_a_kernel_log_that_nobody_may_read_is_not_judged():
    before, why = recorded(), "the kernel log /dev/kmsg cannot be read: Permission denied"
    found = outcomes(replace(before, machine=replace(before.machine, logged=Logged(trouble=why))))
    for check in (XIDS, HOST_LOG):
        assert (found[check].what, why in found[check].message) == ("skipped", True)


# ---------------------------------------------------------------- whole runs
@pytest.fixture
def run_described(run_pytest):
    checks = (ACCEPTANCE / name for name in ("test_1_inventory.py", "test_2_health.py"))
    # A single sample: plots are tested elsewhere.
    options = ("--gpus=4", "--fleet-dir=runs", "--fleet-interval=10", *RECORDED, "-k", NEEDS_GPUS)
    return lambda change, *arguments: run_pytest(*checks, *options, *arguments, CHANGE=change)


def test_a_virtual_machine_with_one_gpu_has_no_nvlinks():
    without = dict.fromkeys(("nvlink_states", "nvlink_speeds", "nvlink_remotes", "nvlink_errors"), ABSENT)
    found = outcomes(recorded(set_machine(count=1, fabric="none"), set_gpus(**without, **NO_FABRIC)), asked=1)
    assert failed(found) == set()
    assert found["test_nvlinks_are_up"].what == found["test_fabric_is_ready"].what == "not applicable"


def test_no_failing_call_crashes_the_run(run_described):
    run = run_described("gpus[2].update({name: Missing('NVML: GPU is lost') for name in list(gpus[2])[3:]})")
    assert "INTERNALERROR" not in run.text
    assert named(run.check("test_ecc_is_on").message) == {2}


# What an H200 looks like whose driver and nvidia-ml-py do not fit together.
NOT_SUPPORTED = """
for gpu in gpus:
    for name in gpu.keys() - {"name", "uuid", "pci_bus_id", "memory_bytes"}:
        gpu[name] = Missing("NVML: Not Supported", absent=True)
"""


def test_a_machine_of_which_nothing_can_be_read_is_not_healthy(run_described):
    run = run_described(NOT_SUPPORTED, "--gpus=1")
    assert (run.status, run.record.verdict) == (10, "INCOMPLETE"), run.text
    assert "failed" not in run.outcomes.values()
    for name in (ECC, "test_ecc_is_on", "test_power_limit_is_default"):
        assert run.outcomes[name] == "skipped", run.text
        assert "not judged: GPU 0 NVIDIA H200, no serial, 00000000:00:06.0" in run.check(name).message
    (reason,) = [reason for reason in run.record.reasons if "telemetry never had" in reason]
    assert "clock_event_reasons, temperature_c and power_watts: no slowdown would have been seen" in reason


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


# ---------------------------------------------------------------- whole checks of an order
RIGHT = """
name = "four H200"
[gpus]
count = 4
model = "NVIDIA H200"
nvlinks = 18
[software]
driver = { at_least = "580.95.05" }
"""


def given(text, folder):
    file = folder / "order.toml"
    file.write_text(text)
    return load(file)


def as_ordered(text, folder, *changes):
    came = outcomes(recorded(*changes), fleet_order=given(text, folder))
    return {name: outcome for name, outcome in came.items() if name.startswith("test_as_ordered")}


def test_a_right_machine_meets_each_line_and_the_others_do_not_apply(tmp_path):
    came = as_ordered(RIGHT, tmp_path)
    asked = {f"test_as_ordered[{line}]" for line in ("gpus.count", "gpus.model", "gpus.nvlinks", "software.driver")}
    assert {name for name, outcome in came.items() if outcome.what == "passed"} == asked
    assert {outcome.what for name, outcome in came.items() if name not in asked} == {"not applicable"}
    without = outcomes(recorded())
    assert {outcome.what for name, outcome in without.items() if "as_ordered" in name} == {"not applicable"}


def test_the_line_that_is_not_met_fails_and_no_other_and_one_that_cannot_be_read_is_not_judged(tmp_path):
    came = as_ordered(RIGHT, tmp_path, set_gpu(2, nvlink_states=ONE_DOWN))
    failed = {name: outcome.gpus for name, outcome in came.items() if outcome.what == "failed"}
    assert failed == {"test_as_ordered[gpus.nvlinks]": {2}}
    came = as_ordered(f"{RIGHT}[memory]\nmodules = 32\n", tmp_path)["test_as_ordered[memory.modules]"]
    assert (came.what, "not judged" in came.message) == ("skipped", True)


def test_ports_that_are_down_everywhere_are_named_unless_nothing_is_asked_of_the_network(tmp_path):
    down = [port(number, state="1: DOWN", rate="10 Gb/sec") for number in range(4)]
    here, check = recorded(set_host(network_ports=down)), "test_network_ports_are_active"
    order = given(RIGHT + "[[ports]]\nadapter = 'MT4129'\ncount = 4\n", tmp_path)
    assert outcomes(here, fleet_network="none")[check].what == "not applicable"
    for found in (outcomes(here), outcomes(here, fleet_order=order, fleet_network="none")):
        named = {fault.what.partition(" ")[0] for fault in found[check].faults}
        assert named == {f"mlx5_{index}/1" for index in range(4)}


def test_a_run_keeps_the_order_and_others_can_be_written_from_it(run_pytest, tmp_path, capsys):
    options = ("--gpus=4", "--fleet-level=quick", "--fleet-order=order.toml", *RECORDED, "--fleet-dir=runs")
    run = run_pytest(*options, str(ACCEPTANCE / "test_1_order.py"), files={"order.toml": RIGHT})
    record, (folder,) = run.record, run.folders
    assert {check.outcome for check in record.checks.values()} == {"passed", "not applicable"}, run.text
    assert record.order == given(RIGHT, tmp_path)
    assert (record.run.order, record.run.order_sha256) == (record.order.file, record.order.sha256)
    assert record.order.sha256 in (folder / "report.html").read_text()
    written = tmp_path / "written.toml"
    assert cli.main(["order", str(folder), "-o", str(written)]) == 0
    assert f"that run: {record.verdict};" in capsys.readouterr().out  # it was of some checks alone
    assert cli.main(["order", str(folder), "-o", str(written)]) == 1  # it is left as it is
    assert outcomes(recorded(), fleet_order=load(written))["test_as_ordered[gpus.vbios]"].what == "passed"

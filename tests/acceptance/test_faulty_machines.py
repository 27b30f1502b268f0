"""A recorded 4x H200 with one thing wrong: the check that fails, and the GPU it names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpufleet.hardware.facts import COUNTERS

ROOT = Path(__file__).parents[2]
HARDWARE = Path(__file__).parents[1] / "hardware"
# What needs ranks, and so real GPUs.
NEEDS_GPUS = "not under_load and not every_rank"
ECC = "test_no_memory_error_is_recorded"
SERIAL = "serial 0000000000002"


@pytest.fixture
def described(run_pytest):
    """described(change, *arguments): inventory and health on the recorded machine after `change`."""

    def run(change, *arguments, **environment):
        files = [ROOT / "acceptance" / name for name in ("test_1_inventory.py", "test_2_health.py")]
        # A single sample: plots are tested elsewhere, and loading matplotlib takes as long as all else here.
        options = ("--gpus=4", "--fleet-dir=runs", "--fleet-interval=10", "-p", "recorded", "-k", NEEDS_GPUS)
        return run_pytest(*files, *options, *arguments, PYTHONPATH=str(HARDWARE), CHANGE=change, **environment)

    return run


@pytest.fixture
def on_recorded(run_pytest):
    """on_recorded(module, *arguments): a test module on the recorded machine."""

    def run(module, *arguments, **environment):
        options = ("--gpus=4", "--fleet-dir=runs", "-p", "recorded", *arguments)
        return run_pytest(*options, files={"test_inner.py": module}, PYTHONPATH=str(HARDWARE), **environment)

    return run


def failed(run):
    return {name for name, outcome in run.outcomes.items() if outcome == "failed"}


def test_the_machine_as_it_was(described):
    run = described("")
    assert failed(run) == set(), run.text
    assert run.status == 10  # no acceptance: most checks are left out here


def test_a_machine_with_one_gpu_as_it_was(described):
    run = described("", "--gpus=1", SNAPSHOT="h200x1")
    assert failed(run) == {"test_software_fits_driver"}, run.text  # its snapshot is of schema 1: no versions
    assert run.outcomes["test_nvlinks_are_up"] == run.outcomes["test_fabric_is_ready"] == "not applicable"


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

FAULTS = {
    "a GPU missing": ("machine.count = 3", "test_gpu_count", "3 of 4 GPUs are here: `lspci | grep -i nvidia` shows"),
    "a GPU hidden": (
        "machine.count = 3\nhost['environment']['CUDA_VISIBLE_DEVICES'] = '0,1,2'",
        "test_gpu_count",
        "3 of 4 GPUs are here: CUDA_VISIBLE_DEVICES='0,1,2' hides those that it does not name; `lspci",
    ),
    "one of another model": ("gpus[2]['name'] = 'NVIDIA H100 80GB HBM3'", "test_gpus_are_alike[name]", SERIAL),
    "one VBIOS differs": ("gpus[2]['vbios'] = '96.00.99.00.01'", "test_gpus_are_alike[vbios]", SERIAL),
    "PCIe x8": ("gpus[2]['pcie_width'] = 8", "test_pcie_width_is_full", "pcie_width is 8, should be 16"),
    "slot of generation 3": ("gpus[2]['pcie_generation_max'] = 3", "test_gpus_are_alike[pcie_generation_max]", SERIAL),
    "one NVLink down": ("gpus[2]['nvlink_states'][4] = 0", "test_nvlinks_are_up", SERIAL),
    "all NVLinks gone": (
        "for gpu in gpus: gpu['nvlink_states'] = Unavailable('NVML: Not Supported', False)",
        "test_nvlinks_are_up",
        "nvlink_states cannot be read (NVML: Not Supported)",
    ),
    "all NVLinks slower": (
        "for gpu in gpus: gpu['nvlink_speeds'] = [20.0] * 18",
        "test_nvlinks_are_equally_fast",
        "an NVLink runs at 20 GB/s, those of this model at 25 GB/s",
    ),
    "speeds of NVLinks unreadable": (
        "gpus[2]['nvlink_speeds'] = Unavailable('NVML: Unknown Error', True)",
        "test_nvlinks_are_equally_fast",
        "nvlink_speeds cannot be read (NVML: Unknown Error)",
    ),
    "one NVLink slower": ("gpus[2]['nvlink_speeds'][4] = 20.0", "test_nvlinks_are_equally_fast", SERIAL),
    "a part of the memory gone": (
        "gpus[2]['memory_bytes'] = 120 << 30",
        "test_memory_is_complete",
        f"{SERIAL}, 00000000:00:08.0, GPU-00000000-0000-0000-0000-000000000002: memory_bytes is 128849018880",
    ),
    "fabric not ready": ("gpus[2]['fabric']['state'] = 2", "test_fabric_is_ready", SERIAL),
    "P2P not OK on one pair": ("gpus[2]['p2p']['read'][1] = 4", "test_every_pair_reaches_each_other", SERIAL),
    "ECC off": ("gpus[2]['ecc_mode'] = [0, 1]", "test_ecc_is_on", SERIAL),
    "uncorrectable ECC before": ("gpus[2]['ecc_uncorrected_volatile'] = 1", ECC, SERIAL),
    "ECC counter unreadable": (
        "gpus[2]['ecc_uncorrected_volatile'] = Unavailable('NVML: GPU is lost', True)",
        ECC,
        f"{SERIAL}, 00000000:00:08.0, GPU-00000000-0000-0000-0000-000000000002: "
        "ecc_uncorrected_volatile cannot be read (NVML: GPU is lost)",
    ),
    "remapped rows unreadable": (
        "gpus[2]['remapped_rows'] = Unavailable('NVML: Insufficient Permissions', True)",
        ECC,
        "remapped_rows cannot be read (NVML: Insufficient Permissions)",
    ),
    "remap pending": ("gpus[2]['remapped_rows'] = [0, 1, 1, 0]", ECC, "row remapping pending"),
    "remap failed": ("gpus[2]['remapped_rows'] = [0, 1, 0, 1]", ECC, "row remapping failed"),
    "XID 79 before": (
        "machine.log = 'NVRM: Xid (PCI:0000:00:08): 79, pid=1, GPU has fallen off the bus.'",
        "test_no_grave_xid_in_the_kernel_log",
        "XID 79 (GPU has fallen off the bus) on PCI 0000:00:08; what to do: restart the machine",
    ),
    "XID 79 before, and the GPU gone": (
        "machine.count = 3\nmachine.log = 'NVRM: Xid (PCI:0000:00:09): 79, GPU has fallen off the bus.'",
        "test_no_grave_xid_in_the_kernel_log",
        "a GPU that is no longer here, or hidden from this container: XID 79 (GPU has fallen off the bus)",
    ),
    "XID 79 before, and its GPU's address unreadable": (
        "gpus[2]['pci_bus_id'] = Unavailable('NVML: GPU is lost', True)\n"
        "machine.log = 'NVRM: Xid (PCI:0000:00:08): 79, GPU has fallen off the bus.'",
        "test_no_grave_xid_in_the_kernel_log",
        "XID 79 (GPU has fallen off the bus) on PCI 0000:00:08",
    ),
    "fatal SXid before": (
        "machine.log = 'nvidia-nvswitch1: SXid (PCI:0000:86:00.0): 20034, Fatal, Link 30 LTSSM Fault Up'",
        "test_no_grave_xid_in_the_kernel_log",
        "nvidia-nvswitch1 on PCI 0000:86:00.0: SXid 20034 (Fatal: Link 30 LTSSM Fault Up); what to do: reset all GPUs",
    ),
    "power limit lowered": ("gpus[2]['power_limit_watts'] = 500.0", "test_power_limit_is_default", SERIAL),
    "MIG on": ("gpus[2]['mig_mode'] = [1, 1]", "test_mig_is_off", SERIAL),
    "foreign process": ("machine.processes = {2: ['process 4711 (miner)']}", "test_no_foreign_process", "4711 (miner)"),
    "/dev/shm of 64 MiB": ("host['shared_memory_bytes'] = 64 << 20", "test_shared_memory_is_large_enough", "67108864"),
    "memlock limited": ("host['locked_memory_limit'] = 65536", "test_memory_may_be_locked", "65536"),
    "driver too old": ("machine.problems = ['driver 450 is too old']", "test_software_fits_driver", "driver 450"),
    "NCCL_P2P_DISABLE left": (
        "host['environment']['NCCL_P2P_DISABLE'] = '1'",
        "test_no_harmful_variable",
        "NCCL_P2P_DISABLE",
    ),
    "too few open files": ("host['open_files_hard_limit'] = 1024", "test_files_may_be_opened", "1024"),
    "power-saving governor": ("host['cpu_governor'] = 'powersave'", "test_processors_run_at_full_clock", "powersave"),
    "processors far away": (
        "gpus[2]['cpu_affinity'] = [0, 1] + [0] * 14",
        "test_processors_near_each_gpu_may_be_used",
        SERIAL,
    ),
    "network port down": (PORTS + "ports[2]['state'] = '1: DOWN'", "test_network_ports_are_active", "mlx5_2/1"),
    "network port slower": (PORTS + "ports[2]['rate'] = '200 Gb/sec'", "test_network_ports_are_active", "mlx5_2/1"),
    "InfoROM corrupted": ("gpus[2]['inforom_valid'] = False", "test_inforom_is_valid", SERIAL),
    "serial number that does not decode": (
        "gpus[2]['serial'] = Unavailable('nvidia-ml-py: UnicodeDecodeError', True)",
        "test_inforom_is_valid",
        "00000000:00:08.0, GPU-00000000-0000-0000-0000-000000000002: serial cannot be read (nvidia-ml-py: Unicode",
    ),
    "recovery pending": ("gpus[2]['recovery_action'] = 2", "test_no_recovery_is_pending", SERIAL),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(described, name):
    change, check, words = FAULTS[name]
    run = described(change)
    assert check in failed(run), run.text
    assert words in run.check(check).message
    assert (run.status, run.record.verdict) == (1, "REJECTED")


def test_xid_of_a_gpu_that_is_only_hidden_is_nothing_against_this_run(described):
    change = """
from pytest_gpufleet.hardware import facts
facts.pci_addresses = lambda: ["00000000:00:09.0"]
machine.count = 3
machine.log = "NVRM: Xid (PCI:0000:00:09): 79, GPU has fallen off the bus."
"""
    assert described(change).outcomes["test_no_grave_xid_in_the_kernel_log"] == "passed"


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
HEALTHY = {
    "bridges between pairs": (
        BRIDGED,
        {"test_nvlinks_are_up": "passed", "test_every_pair_reaches_each_other": "passed"},
    ),
    "no bridges": (BRIDGED + UNBRIDGED, {"test_nvlinks_are_up": "not applicable"}),
    "one pair with a bridge, one without": (
        BRIDGED + "for gpu in gpus[2:]: gpu['nvlink_states'], gpu['nvlink_speeds'] = [0] * 12, [0.0] * 12",
        {"test_nvlinks_are_up": "passed", "test_nvlinks_are_equally_fast": "passed"},
    ),
    "ports of several kinds": (PORTS, {"test_network_ports_are_active": "passed"}),
    "ports without a cable": (
        PORTS + "for one in ports: one['state'] = '1: DOWN'",
        {"test_network_ports_are_active": "not applicable"},
    ),
    "a driver that chooses the clock": (
        "host['cpu_governor'], host['cpu_energy_preference'] = 'powersave', 'balance_performance'",
        {"test_processors_run_at_full_clock": "passed"},
    ),
    "a power limit above the default": (
        "for gpu in gpus: gpu['power_limit_watts'] = 750.0",
        {"test_power_limit_is_default": "passed"},
    ),
    "sold with error correction off": (
        "for gpu in gpus: gpu['ecc_mode'], gpu['ecc_mode_default'] = [0, 0], 0",
        {"test_ecc_is_on": "not applicable"},
    ),
    "a cloud's topology file": (
        "host['environment']['NCCL_TOPO_FILE'] = '/opt/microsoft/ndv5-topo.xml'",
        {"test_no_harmful_variable": "passed"},
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_healthy_machines_are_like(described, name):
    change, outcomes = HEALTHY[name]
    run = described(change)
    assert failed(run) == set(), run.text
    assert {check: run.outcomes[check] for check in outcomes} == outcomes


def test_a_link_of_a_bridge_down(described):
    run = described(BRIDGED + "gpus[2]['nvlink_states'][4] = 0")
    assert failed(run) == {"test_nvlinks_are_up"}
    assert f"{SERIAL}, 00000000:00:08.0" in run.check("test_nvlinks_are_up").message
    assert "should be 12 active links, as others have" in run.check("test_nvlinks_are_up").message


def test_sxid_that_is_not_fatal_is_nothing_against_a_machine_before_the_run(described):
    change = "machine.log = 'nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Non-fatal, Link 44 Minion Link DLREQ'"
    assert described(change).outcomes["test_no_grave_xid_in_the_kernel_log"] == "passed"


# What each rank reads while data flows: the generation of its link, and the highest it can; None: NVML does not tell.
GENERATIONS = {
    "all at full speed": ([(5, 5)] * 4, "passed", ""),
    "one slower": ([(5, 5), (5, 5), (4, 5), (5, 5)], "failed", f"{SERIAL}, %s: generation 4 of 5"),
    "slots of an older generation": ([(4, 4)] * 4, "failed", f"{SERIAL}, %s: generation 4 of 5"),
    "one does not tell": ([(5, 5), (5, 5), None, (5, 5)], "failed", f"{SERIAL}, %s: generation unknown of 5"),
    "none tells": ([None] * 4, "not applicable", "NVML does not tell"),
}


@pytest.mark.parametrize("name", GENERATIONS)
def test_pcie_generation_under_load(described, name):
    answers, outcome, words = GENERATIONS[name]
    stand_in = f"from pytest_gpufleet.world.world import World\nWorld.run = lambda self, probe: {answers}"
    run = described(stand_in, "-k", "under_load")
    check = run.check("test_pcie_generation_is_full_under_load")
    assert check.outcome == outcome, run.text
    assert words.replace("%s", "00000000:00:08.0, GPU-00000000-0000-0000-0000-000000000002") in check.message
    assert ("GPU 1" in check.message) == (name == "slots of an older generation")


# A later answer of the source differs from the first: it happened while a test ran.
DURING = {
    "uncorrectable ECC during": ("'ecc_uncorrected_volatile', 1", "ecc_uncorrected_volatile was 0, is 1"),
    "hardware slowdown during": ("'clock_event_reasons', 0x8", "hardware slowdown (clock event 0x8)"),
    "software thermal slowdown during": ("'clock_event_reasons', 0x20", "software thermal slowdown (clock event 0x20)"),
    "thermal slowdown during": ("'clock_event_reasons', 0x40", "hardware thermal slowdown"),
    "counter can no longer be read": (
        "'remapped_rows', Unavailable('NVML: GPU is lost', True)",
        "remapped_rows could be read before and cannot now: NVML: GPU is lost",
    ),
}
CHANGES_LATER = """
from recorded import Unavailable, recorded

def test_during():
    recorded.gpus[2].facts.__setitem__(%s)

def test_after():
    pass
"""


@pytest.mark.parametrize("name", DURING)
def test_what_gets_worse_fails_the_test_that_ran(on_recorded, name):
    change, words = DURING[name]
    run = on_recorded(CHANGES_LATER % change)
    assert run.outcomes["test_during"] == "failed", run.text
    message = run.check("test_during").message
    assert words in message
    assert SERIAL in message


def test_xid_during(on_recorded):
    inner = """
    def test_during():
        with open("kernel-log", "a") as log:
            log.write("NVRM: Xid (PCI:0000:00:08): 13, pid=7, Graphics Exception\\n")
    def test_after():
        pass
    """
    run = on_recorded(inner)
    assert run.outcomes == {"test_during": "failed", "test_after": "passed"}, run.text
    assert "XID 13 (graphics engine exception)" in run.check("test_during").message
    assert SERIAL in run.check("test_during").message


@pytest.mark.parametrize("severity", ["Fatal", "Non-fatal"])
def test_sxid_during(on_recorded, severity):
    """Only the line that tells its severity counts: the two with more about it do not."""
    inner = """
    SXID = "nvidia-nvswitch1: SXid (PCI:0000:86:00.0): 20034, "

    def write(text):
        with open("kernel-log", "a") as log:
            log.write(SXID + text + "\\n")
    def test_during():
        write("%s, Link 30 LTSSM Fault Up")
    def test_after():
        write("Severity 1 Engine instance 30 Sub-engine instance 00")
        write("Data {0x10000000, 0x10000000, 0x00000000}")
    """
    run = on_recorded(inner % severity)
    assert run.outcomes == {"test_during": "failed", "test_after": "passed"}, run.text
    told = f"nvidia-nvswitch1 on PCI 0000:86:00.0: SXid 20034 ({severity}: Link 30 LTSSM Fault Up); what to do: "
    assert told in run.check("test_during").message


# How a check can end without having passed or failed, and what it then says.
ENDS = {"does not apply": "not_applicable('no such thing')", "is skipped": "pytest.skip()", "xfails": "pytest.xfail()"}
XID_79 = """
import pytest

from pytest_gpufleet.hardware.facts import COUNTERS
from pytest_gpufleet import not_applicable

def fall_off_the_bus():
    with open("kernel-log", "a") as log:
        log.write("NVRM: Xid (PCI:0000:00:08): 79, GPU has fallen off the bus.\\n")
"""


@pytest.mark.parametrize("end", ENDS)
def test_what_gets_worse_fails_a_check_that_has_nothing_to_say(on_recorded, end):
    run = on_recorded(f"{XID_79}\ndef test_during():\n    fall_off_the_bus()\n    {ENDS[end]}")
    assert (run.outcomes["test_during"], run.record.verdict) == ("failed", "REJECTED"), run.text
    assert SERIAL in run.check("test_during").message


def test_what_gets_worse_adds_to_a_failure_and_does_not_replace_it(on_recorded):
    run = on_recorded(f"{XID_79}\ndef test_during():\n    fall_off_the_bus()\n    raise ValueError('boom')")
    assert "ValueError: boom" in run.check("test_during").message
    assert "GPU health" in run.text
    assert run.record.reasons[0] == "test_inner.py::test_during"
    assert "XID 79" not in run.record.reasons[0]


def test_what_gets_worse_rejects_the_machine_whatever_becomes_of_the_check(on_recorded):
    """Here pytest itself takes the failure for an expected one."""
    run = on_recorded(f"{XID_79}\n@pytest.mark.xfail\ndef test_during():\n    fall_off_the_bus()")
    assert run.outcomes["test_during"] == "skipped"
    assert (run.status, run.record.verdict) == (1, "REJECTED"), run.text
    assert run.record.reasons[0].startswith("while test_inner.py::test_during ran: GPU 2 NVIDIA H200, " + SERIAL)


@pytest.fixture
def after_load(run_pytest):
    """after_load(fact): what the last check says of the NVLinks, with another answer of GPU 2 than at the beginning."""

    def run(errors):
        module = CHANGES_LATER % f"'nvlink_errors', {errors}"
        options = ("--gpus=4", "--fleet-dir=runs", "-p", "recorded", "-k", "test_during or stayed_clean")
        files = ("test_inner.py", ROOT / "acceptance" / "test_9_endurance.py")
        return run_pytest(*options, *files, files={"test_inner.py": module}, PYTHONPATH=str(HARDWARE))

    return run


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        ("Unavailable('NVML: GPU is lost', True)", "nvlink_errors cannot be read (NVML: GPU is lost)"),
        ("Unavailable('NVML: Not Supported', False)", "nvlink_errors cannot be read (NVML: Not Supported)"),
        (
            "{kind: counts[1:] for kind, counts in recorded.gpus[2]['nvlink_errors'].items()}",
            "replay errors are counted on 17 NVLinks, at the beginning on 18",
        ),
        ("{**recorded.gpus[2]['nvlink_errors'], 'replay': [1] + [0] * 17}", "NVLink 0 had 1 replay errors"),
        ("{**recorded.gpus[2]['nvlink_errors'], 'crc_flit': [0, 1] + [0] * 16}", "NVLink 1 had 1 crc_flit errors"),
        ("{**recorded.gpus[2]['nvlink_errors'], 'crc_data': [10**6] * 18}", "crc_data errors in "),
    ],
)
def test_nvlinks_that_did_not_stay_clean(after_load, errors, words):
    run = after_load(errors)
    check = run.check("test_nvlinks_stayed_clean")
    assert check.outcome == "failed", run.text
    assert f"GPU 2 NVIDIA H200, {SERIAL}" in check.message
    assert words in check.message


@pytest.mark.parametrize("more", [0, 1])
def test_nvlinks_that_stayed_clean(after_load, more):
    """Also with a CRC error in the data of each, which it corrected."""
    errors = "recorded.gpus[2]['nvlink_errors']"
    run = after_load(f"{{**{errors}, 'crc_data': [count + {more} for count in {errors}['crc_data']]}}")
    assert run.outcomes["test_nvlinks_stayed_clean"] == "passed"


@pytest.fixture
def after_checks(run_pytest):
    """after_checks(change, number): what the last check says of the PCIe links, after as many checks with `change`."""

    def run(change, number):
        module = f"""
import pytest
from recorded import Unavailable, recorded

@pytest.mark.parametrize("number", range({number}))
def test_during(number):
    recorded.gpus[2].facts["pcie_replays"] = {change}
"""
        options = ("--gpus=4", "--fleet-dir=runs", "-p", "recorded", "-k", "test_during or pcie_links_stayed_clean")
        files = ("test_inner.py", ROOT / "acceptance" / "test_9_endurance.py")
        return run_pytest(*options, *files, files={"test_inner.py": module}, PYTHONPATH=str(HARDWARE))

    return run


ONE_MORE = "recorded.gpus[2]['pcie_replays'] + "


def test_pcie_replays_that_no_check_had_too_many_of(after_checks):
    """30 a minute are healthy on 16 lanes of generation 5, and a check shorter than a minute may have as many."""
    run = after_checks(ONE_MORE + "30", 5)
    assert failed(run) == {"test_pcie_links_stayed_clean"}, run.text
    message = run.check("test_pcie_links_stayed_clean").message
    assert f"GPU 2 NVIDIA H200, {SERIAL}" in message
    assert "150 PCIe replays in " in message
    assert "a healthy link has at most 31" in message
    assert "GPU 1" not in message


def test_pcie_links_that_stayed_clean(after_checks):
    run = after_checks(ONE_MORE + "6", 5)
    assert set(run.outcomes.values()) == {"passed"}, run.text


def test_pcie_replays_that_can_no_longer_be_read(after_checks):
    run = after_checks("Unavailable('NVML: GPU is lost', True)", 1)
    message = run.check("test_pcie_links_stayed_clean").message
    assert f"GPU 2 NVIDIA H200, {SERIAL}" in message
    assert "pcie_replays cannot be read (NVML: GPU is lost)" in message


@pytest.mark.parametrize(
    ("model", "outcome"), [("NVIDIA H200", "skipped"), ("NVIDIA GeForce RTX 3090", "not applicable")]
)
def test_pcie_replays_that_nvml_does_not_count(on_recorded, model, outcome):
    """An H200 does count them: its driver or nvidia-ml-py is blind. Of a GeForce nobody can say."""
    run = on_recorded(
        *("", ROOT / "acceptance" / "test_9_endurance.py", "-k", "pcie_links_stayed_clean"),
        CHANGE=f"for gpu in gpus:\n  gpu.update(name='{model}', compute_capability=[8, 6])\n"
        "  gpu['pcie_replays'] = Unavailable('NVML: Not Supported', False)",
    )
    assert run.outcomes == {"test_pcie_links_stayed_clean": outcome}, run.text


# What an H200 looks like whose driver and nvidia-ml-py do not fit together.
BLIND = """
for gpu in gpus:
    for name in gpu.keys() - {"name", "uuid", "pci_bus_id", "memory_bytes"}:
        gpu[name] = Unavailable("NVML: Not Supported", False)
"""


def test_a_machine_that_tells_nothing_is_not_healthy(described):
    run = described(BLIND, "--gpus=1")
    assert (run.status, run.record.verdict, failed(run)) == (10, "INCOMPLETE", set()), run.text
    for name in (ECC, "test_ecc_is_on", "test_power_limit_is_default"):
        assert run.outcomes[name] == "skipped", run.text
        assert "not judged: GPU 0 NVIDIA H200, serial NVML: Not Supported, 00000000:00:06.0" in run.check(name).message
    blind = [reason for reason in run.record.reasons if "telemetry never had" in reason]
    assert len(blind) == 1
    assert "clock_event_reasons, temperature_c and power_watts: no slowdown would have been seen" in blind[0]


def test_xid_that_only_nvml_tells(on_recorded):
    """As in a container that may not read the kernel log."""
    inner = """
    from recorded import Recorded

    def test_during():
        told = [(2, 79)]
        Recorded.xids = lambda self: [told.pop()] if told else []
    def test_after():
        pass
    """
    run = on_recorded(inner)
    assert run.outcomes == {"test_during": "failed", "test_after": "passed"}, run.text
    assert "XID 79 (GPU has fallen off the bus)" in run.check("test_during").message
    assert SERIAL in run.check("test_during").message


def test_lost_telemetry_is_told_and_leaves_the_verdict_incomplete(on_recorded):
    inner = """
    from pytest_gpufleet.run import health_watch
    from pytest_gpufleet.plugin.fixtures import FLEET

    def broken(self, sample):
        raise RuntimeError("no room for it")

    health_watch.Guard.note = broken

    def test_during(pytestconfig):
        while not pytestconfig.stash[FLEET].sampler.trouble:
            pass
    """
    run = on_recorded(inner, "--fleet-interval=0.05")
    assert (run.record.verdict, run.status) == ("INCOMPLETE", 10), run.text
    assert "telemetry lost samples: RuntimeError: no room for it" in run.record.reasons


def test_power_cap_alone_is_normal(on_recorded):
    run = on_recorded(CHANGES_LATER % "'clock_event_reasons', 0x4")
    assert run.outcomes == {"test_during": "passed", "test_after": "passed"}, run.text


@pytest.mark.parametrize(("reasons", "outcome"), [(0x20, "passed"), (0x60, "failed")])
def test_a_t4_may_slow_down_for_heat_until_its_hardware_does(on_recorded, reasons, outcome):
    change = "for gpu in gpus: gpu['name'] = 'Tesla T4'"
    run = on_recorded(CHANGES_LATER % f"'clock_event_reasons', {reasons}", CHANGE=change)
    assert run.outcomes["test_during"] == outcome, run.text
    assert "software thermal" not in run.check("test_during").message


REASONS = {
    "Not Supported": False,
    "Insufficient Permissions": True,
    "GPU is lost": True,
    "Unknown Error": True,
}


@pytest.mark.parametrize("reason", REASONS)
def test_no_failing_call_crashes_the_run(described, reason):
    """Every fact of GPU 2 fails at once; each check that needs one says so and names the GPU."""
    run = described(
        f"gpus[2].update({{name: Unavailable('NVML: {reason}', {REASONS[reason]}) for name in list(gpus[2])[3:]}})"
    )
    assert "INTERNALERROR" not in run.text
    message = run.check("test_ecc_is_on").message
    assert run.outcomes["test_ecc_is_on"] == "failed"
    assert f"GPU 2 NVIDIA H200, {SERIAL}" in message
    assert reason in message


# Every check of inventory and health that looks at GPUs, for every fact of GPU 2 that NVML does not tell.
ONE_BY_ONE = """
import inspect
from dataclasses import replace

import pytest

from pytest_gpufleet.hardware.facts import COUNTERS
import test_1_inventory, test_2_health
from recorded import Unavailable, recorded

from pytest_gpufleet.model.machine import GpuFacts

for module in (test_1_inventory, test_2_health):
    for name, check in vars(module).items():
        if name.startswith("test_") and "gpus" in inspect.signature(check).parameters:
            globals()[name] = check

@pytest.fixture(params=recorded.gpus[2].facts)
def gpus(request):
    told = {**recorded.gpus[2].facts, request.param: Unavailable("NVML: %s", %s)}
    return (*recorded.gpus[:2], GpuFacts(2, told), recorded.gpus[3])
"""
# Facts that the report shows and no check of these two files judges; those of the last line, telemetry does.
SHOWN = {
    "pci_device_id", "compute_capability", "pcie_generation", "temperature_limits_c",
    "numa_node", "nvlink_versions", "nvlink_remote_types", "nvlink_errors",
    "clock_event_reasons", "power_watts", "temperature_c",
}  # fmt: skip
IDENTITY = {"uuid", "serial", "pci_bus_id"}  # not every model has a serial number


@pytest.mark.parametrize("reason", REASONS)
def test_every_call_that_fails_alone_is_a_finding(on_recorded, reason):
    run = on_recorded(
        ONE_BY_ONE % (reason, REASONS[reason]),
        *("-k", NEEDS_GPUS, "-o", f"pythonpath={ROOT / 'acceptance'}", "--tb=line"),
    )
    said = {name: run.check(name).message for name in failed(run)}
    assert [text for text in said.values() if "GPU 2 " not in text or f"NVML: {reason}" not in text] == []
    assert "TypeError" not in run.text
    every = {name.rpartition("[")[2].rstrip("]").rpartition("-")[2] for name in run.outcomes}
    found = {name.rpartition("[")[2].rstrip("]").rpartition("-")[2] for name in said}
    assert every - found == (SHOWN if REASONS[reason] else SHOWN | IDENTITY | COUNTERS.keys())


@pytest.mark.parametrize(("unsupported", "limit"), [("memory_max", 87), ("gpu_max", 89)])
def test_too_hot_during(on_recorded, unsupported, limit):
    """Also where the device does not tell one of its thresholds."""
    inner = """
    from pytest_gpufleet.plugin.fixtures import FLEET

    def test_during(pytestconfig):
        while not any(pytestconfig.stash[FLEET].guard._reasons):  # until the first sample of telemetry
            pass
    """
    change = f"""
for gpu in gpus:
    gpu.update(temperature_c=60, memory_temperature_c=70)
    gpu["temperature_limits_c"]["{unsupported}"] = None
gpus[2]["temperature_c"] = 91
"""
    run = on_recorded(inner, CHANGE=change)
    message = run.check("test_during").message
    assert f"GPU 2 NVIDIA H200, {SERIAL}" in message
    assert f"temperature_c reached 91, the device's own limit is {limit}" in message
    assert "GPU 1" not in message
    assert run.record.telemetry[0]["gpus"][2]["temperature_c"] == 91


def test_snapshot_is_what_the_inventory_reads_without_names(tmp_path):
    uuid = "GPU-0c0ffee0-77aa-4c1e-9b1d-5a0c33e9f100"
    change = (
        f"gpus[1].update(serial='S3CRET', uuid='{uuid}')\nhost['name'] = 'n0de'\nmachine.processes = {{2: ['miner']}}\n"
        f"host['environment']['CUDA_VISIBLE_DEVICES'] = 'GPU-x,{uuid}'"
    )
    command = "import recorded; from pytest_gpufleet.cli import main; main(['snapshot'%s])"
    texts = [
        subprocess.run(
            [sys.executable, "-c", command % more],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(HARDWARE), "CHANGE": change},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for more in ("", ", '--anonymous'")
    ]
    whole, anonymous = map(json.loads, texts)
    assert (whole["schema"], whole["gpus"][1]["facts"]["serial"], whole["host"]["name"]) == (2, "S3CRET", "n0de")
    topology = whole["topology"]
    assert (topology["driver"], topology["nccl"], topology["torch"]) == ("580.159.04", "2.28.9", "2.11.0+cu130")
    assert (topology["fabric"], topology["links"][0]) == ("nvswitch", ["X", "NV18", "NV18", "NV18"])
    assert [gpu["processes"] for gpu in topology["gpus"]] == [[], [], ["miner"], []]
    assert (topology["gpus"][1]["serial"], topology["gpus"][1]["uuid"]) == ("S3CRET", uuid)
    assert not [name for name in ("S3CRET", uuid, "n0de") if name not in texts[0] or name in texts[1]]
    assert anonymous["topology"]["gpus"][1]["serial"] == anonymous["gpus"][1]["facts"]["serial"] == "0000000000001"
    assert anonymous["host"]["environment"]["CUDA_VISIBLE_DEVICES"].endswith("-000000000001")
    assert anonymous["gpus"][3]["facts"]["nvlink_states"] == [1] * 18


def test_a_gpu_that_does_not_answer_is_told_and_hangs_nothing(on_recorded):
    inner = """
    import threading
    from pytest_gpufleet.hardware import facts, telemetry
    from recorded import Recorded

    def test_during():
        ask = Recorded.ask
        def hanging(self, index, fact):
            if index == 2:
                threading.Event().wait()
            return ask(self, index, fact)
        Recorded.ask = hanging
        facts.ANSWER_SECONDS = 0.5
        telemetry.LONGEST_GAP = 0.01  # at an interval of 10 s
    """
    run = on_recorded(inner, "--fleet-interval=10")
    message = run.check("test_during").message
    assert f"GPU 2 NVIDIA H200, {SERIAL}" in message
    assert "no answer from the driver within 0.5 s" in message
    assert "telemetry lost samples: no answer from the driver for" in "\n".join(run.record.reasons)

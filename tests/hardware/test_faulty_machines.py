"""A recorded 4x H200 with one thing wrong: the check that fails, and the GPU it names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
# What needs ranks, and so real GPUs.
NEEDS_GPUS = "not under_load and not every_rank"
ECC = "test_no_memory_error_is_recorded"
SERIAL = "serial 0000000000002"


@pytest.fixture
def described(run_pytest):
    """described(change, *arguments): inventory and health on the recorded machine after `change`."""

    def run(change, *arguments, **environment):
        files = [ROOT / "acceptance" / name for name in ("test_1_inventory.py", "test_2_health.py")]
        options = ("--gpus=4", "--fleet-dir=runs", "-p", "recorded", "-k", NEEDS_GPUS)
        return run_pytest(*files, *options, *arguments, PYTHONPATH=str(HERE), CHANGE=change, **environment)

    return run


@pytest.fixture
def on_recorded(run_pytest):
    """on_recorded(module, *arguments): a test module on the recorded machine."""

    def run(module, *arguments, **environment):
        options = ("--gpus=4", "--fleet-dir=runs", "-p", "recorded", *arguments)
        return run_pytest(*options, files={"test_inner.py": module}, PYTHONPATH=str(HERE), **environment)

    return run


def failed(run):
    return {name for name, outcome in run.outcomes.items() if outcome == "failed"}


def test_the_machine_as_it_was(described):
    run = described("")
    assert failed(run) == set(), run.text
    assert run.status == 10  # no acceptance: most checks are left out here


def test_a_machine_with_one_gpu_as_it_was(described):
    run = described("", "--gpus=1", SNAPSHOT="h200x1")
    assert failed(run) == set(), run.text
    assert run.outcomes["test_nvlinks_are_up"] == run.outcomes["test_fabric_is_ready"] == "not applicable"


FAULTS = {
    "a GPU missing": ("machine.count = 3", "test_gpu_count", "3 of 4 GPUs are here"),
    "one of another model": ("gpus[2]['name'] = 'NVIDIA H100 80GB HBM3'", "test_gpus_are_alike[name]", SERIAL),
    "one VBIOS differs": ("gpus[2]['vbios'] = '96.00.99.00.01'", "test_gpus_are_alike[vbios]", SERIAL),
    "PCIe x8": ("gpus[2]['pcie_width'] = 8", "test_pcie_width_is_full", "pcie_width is 8, should be 16"),
    "slot of generation 3": ("gpus[2]['pcie_generation_max'] = 3", "test_gpus_are_alike[pcie_generation_max]", SERIAL),
    "one NVLink down": ("gpus[2]['nvlink_states'][4] = 0", "test_nvlinks_are_up", SERIAL),
    "one NVLink slower": ("gpus[2]['nvlink_speeds'][4] = 20.0", "test_nvlinks_are_equally_fast", SERIAL),
    "fabric not ready": ("gpus[2]['fabric']['state'] = 2", "test_fabric_is_ready", SERIAL),
    "P2P not OK on one pair": ("gpus[2]['p2p']['read'][1] = 4", "test_every_pair_reaches_each_other", SERIAL),
    "ECC off": ("gpus[2]['ecc_mode'] = [0, 1]", "test_ecc_is_on", SERIAL),
    "uncorrectable ECC before": ("gpus[2]['ecc_uncorrected_volatile'] = 1", ECC, SERIAL),
    "remap pending": ("gpus[2]['remapped_rows'] = [0, 1, 1, 0]", ECC, "row remapping pending"),
    "remap failed": ("gpus[2]['remapped_rows'] = [0, 1, 0, 1]", ECC, "row remapping failed"),
    "XID 79 before": (
        "machine.log = 'NVRM: Xid (PCI:0000:00:08): 79, pid=1, GPU has fallen off the bus.'",
        "test_no_grave_xid_in_the_kernel_log",
        "XID 79 (GPU has fallen off the bus) on PCI 0000:00:08; what to do: restart the machine",
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
    "network port down": (
        "host['network_ports'] = [dict(port=f'mlx5_{i}/1', state='4: ACTIVE', rate='400 Gb/sec') for i in range(4)]\n"
        "host['network_ports'][2]['state'] = '1: DOWN'",
        "test_network_ports_are_active",
        "mlx5_2/1",
    ),
    "InfoROM corrupted": ("gpus[2]['inforom_valid'] = False", "test_inforom_is_valid", SERIAL),
    "recovery pending": ("gpus[2]['recovery_action'] = 2", "test_no_recovery_is_pending", SERIAL),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(described, name):
    change, check, words = FAULTS[name]
    run = described(change)
    assert check in failed(run), run.text
    assert words in run.check(check).message
    assert (run.status, run.record.verdict) == (1, "REJECTED")


# A later answer of the source differs from the first: it happened while a test ran.
DURING = {
    "uncorrectable ECC during": ("'ecc_uncorrected_volatile', 1", "ecc_uncorrected_volatile was 0, is 1"),
    "hardware slowdown during": ("'clock_event_reasons', 0x8", "hardware slowdown (clock event 0x8)"),
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


def test_xid_that_only_nvml_tells(on_recorded):
    """As in a container that may not read the kernel log."""
    inner = """
    from recorded import machine

    def test_during():
        told = [(2, 79)]
        machine.Recorded.xids = lambda self: [told.pop()] if told else []
    def test_after():
        pass
    """
    run = on_recorded(inner)
    assert run.outcomes == {"test_during": "failed", "test_after": "passed"}, run.text
    assert "XID 79 (GPU has fallen off the bus)" in run.check("test_during").message
    assert SERIAL in run.check("test_during").message


def test_lost_telemetry_is_told_and_leaves_the_verdict_incomplete(on_recorded):
    inner = """
    from pytest_gpufleet import guard
    from pytest_gpufleet.plugin import FLEET

    def broken(self, sample):
        raise RuntimeError("no room for it")

    guard.Guard.note = broken

    def test_during(pytestconfig):
        while not pytestconfig.stash[FLEET].sampler.trouble:
            pass
    """
    run = on_recorded(inner, "--fleet-interval=0.05")
    assert (run.record.verdict, run.status) == ("INCOMPLETE", 10), run.text
    assert "telemetry lost samples, the last because of RuntimeError: no room for it" in run.record.reasons


def test_power_cap_alone_is_normal(on_recorded):
    run = on_recorded(CHANGES_LATER % "'clock_event_reasons', 0x4")
    assert run.outcomes == {"test_during": "passed", "test_after": "passed"}, run.text


@pytest.mark.parametrize(
    ("reason", "applicable"),
    [("Not Supported", False), ("Insufficient Permissions", True), ("GPU is lost", True), ("Unknown Error", True)],
)
def test_no_failing_call_crashes_the_run(described, reason, applicable):
    """Every fact of GPU 2 fails at once; each check that needs one says so and names the GPU."""
    run = described(
        f"gpus[2].update({{name: Unavailable('NVML: {reason}', {applicable}) for name in list(gpus[2])[3:]}})"
    )
    assert "INTERNALERROR" not in run.text
    message = run.check("test_ecc_is_on").message
    assert run.outcomes["test_ecc_is_on"] == "failed"
    assert f"GPU 2 NVIDIA H200, {SERIAL}" in message
    assert reason in message


def test_too_hot_during(on_recorded):
    inner = """
    from pytest_gpufleet.plugin import FLEET

    def test_during(pytestconfig):
        while not any(pytestconfig.stash[FLEET].guard._reasons):  # until the first sample of telemetry
            pass
    """
    run = on_recorded(
        inner,
        CHANGE="for gpu in gpus: gpu.update(temperature_c=60, memory_temperature_c=70)\ngpus[2]['temperature_c'] = 91",
    )
    message = run.check("test_during").message
    assert f"GPU 2 NVIDIA H200, {SERIAL}" in message
    assert "temperature_c reached 91, the device's own limit is 87" in message
    assert "GPU 1" not in message
    assert run.record.telemetry[0]["gpus"][2]["temperature_c"] == 91


def test_snapshot_is_what_the_inventory_reads_without_names(tmp_path):
    change = "gpus[1]['serial'] = 'S3CRET'\nhost['name'] = 'n0de'"
    command = "import recorded; from pytest_gpufleet.cli import main; main(['snapshot'%s])"
    texts = [
        subprocess.run(
            [sys.executable, "-c", command % more],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(HERE), "CHANGE": change},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for more in ("", ", '--anonymous'")
    ]
    whole, anonymous = map(json.loads, texts)
    assert (whole["schema"], whole["gpus"][1]["facts"]["serial"], whole["host"]["name"]) == (1, "S3CRET", "n0de")
    assert "S3CRET" not in texts[1]
    assert "n0de" not in texts[1]
    assert anonymous["gpus"][3]["facts"]["nvlink_states"] == [1] * 18


def test_a_gpu_that_does_not_answer_is_told_and_hangs_nothing(on_recorded):
    inner = """
    import threading
    from pytest_gpufleet.hardware import facts
    from recorded import machine

    def test_during():
        ask = machine.Recorded.ask
        def hanging(self, index, fact):
            if index == 2:
                threading.Event().wait()
            return ask(self, index, fact)
        machine.Recorded.ask = hanging
        facts.ANSWER_SECONDS = 0.5
    """
    run = on_recorded(inner, "--fleet-interval=100")
    message = run.check("test_during").message
    assert f"GPU 2 NVIDIA H200, {SERIAL}" in message
    assert "no answer from the driver within 0.5 s" in message

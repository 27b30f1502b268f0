"""What gets worse while a test runs, on a recorded 4x H200: the test fails, and the GPUs are named."""

import pytest

from pytest_gpufleet.machine.health import Guard, slowdowns
from pytest_gpufleet.machine.local_node import LocalNode
from pytest_gpufleet.model import place
from pytest_gpufleet.model.place import Gpu, Missing
from tests.acceptance.test_faulty_machines import SERIAL, named
from tests.conftest import RECORDED
from tests.machines import recorded


class Worsening:
    """The recorded machine between two checks. `facts`: of its GPU 2, `reported`: XIDs that NVML reports."""

    def __init__(self, log):
        self.log = log
        log.touch()
        here = recorded()
        self.gpus = [dict(gpu.facts) for gpu in here.machine.gpus]
        self.facts, self.reported = self.gpus[2], []
        self.node = LocalNode(self, here.topology, str(log))
        self.node.kernel_log()
        self.guard = Guard(self.node)

    def count(self):
        return len(self.gpus)

    def ask(self, index, fact):
        return self.gpus[index].get(fact, Missing("NVML: Not Supported", absent=True))

    def xids(self):
        reported, self.reported = self.reported, []
        return reported

    def kernel(self, *lines):
        with self.log.open("a") as log:
            log.writelines(f"{line}\n" for line in lines)


@pytest.fixture
def machine(tmp_path):
    return Worsening(tmp_path / "kernel-log")


def set_to(**facts):
    return lambda machine: machine.facts.update(facts)


def counting_anew(machine):
    """As after a reset of the GPU."""
    machine.facts["ecc_uncorrected_volatile"] = 3
    machine.guard.check()
    machine.facts["ecc_uncorrected_volatile"] = 1


def slowed(**spent):
    """By the driver's counters, in nanoseconds: between two samples of telemetry."""
    return lambda machine: machine.facts.update(slowdown_ns={**machine.facts["slowdown_ns"], **spent})


def logged(*lines):
    return lambda machine: machine.kernel(*lines)


def xid(number, what="name=python3, Ch 00000008"):
    return f"NVRM: Xid (PCI:0000:00:08): {number}, pid=7, {what}"


SXID = "nvidia-nvswitch1: SXid (PCI:0000:86:00.0): 20034, {}, Link 30 LTSSM Fault Up"
PCIE = "nvidia 0000:00:08.0: PCIe Bus Error: severity={}, type=Data Link Layer, (Receiver ID)"
GPU_2, NODE = ["gpu2"], ["node"]
# What happens, the code and the places of the fault, and words of it; "": there is none.
WORSE = {
    "an uncorrectable error": (
        set_to(ecc_uncorrected_volatile=1), "ecc_uncorrected", GPU_2, "ecc_uncorrected_volatile was 0, is 1"),
    "a counter that began anew": (
        counting_anew, "ecc_uncorrected", GPU_2, "ecc_uncorrected_volatile was 3, is 1"),
    "nothing": (lambda machine: None, "", [], ""),
    "heat between two samples": (
        slowed(hw_thermal=12_000_000), "thermal_slowdown", GPU_2, "hw thermal slowdown for 0.012 s (clock event 0x40)"),
    "a power brake between two samples": (
        slowed(power_brake=3_500_000_000), "power_brake", GPU_2,
        "hw power brake slowdown for 3.5 s (clock event 0x80)"),
    "a slowdown at this moment": (
        set_to(clock_event_reasons=0x20), "thermal_slowdown", GPU_2, "sw thermal slowdown (clock event 0x20)"),
    "the power cap is normal": (set_to(clock_event_reasons=0x4), "", [], ""),
    # healthy in a minute on 16 lanes of generation 5; a shorter check may have as many
    "few replays": (set_to(pcie_replays=30), "", [], ""),
    "many replays": (set_to(pcie_replays=31), "pcie_replays", GPU_2, "pcie_replays was 0, is 31"),
    "a counter that is gone": (
        set_to(remapped_rows=Missing("NVML: GPU is lost")), "counter_unreadable", GPU_2,
        "remapped_rows could be read before and cannot now: NVML: GPU is lost"),
    "an XID": (logged(xid(13, "Graphics Exception")), "xid_of_process", GPU_2, "XID 13 (graphics engine exception)"),
    # of another, or one of ours that nobody needed any more: nothing against the GPU
    "a process that was ended": (logged(xid(43), xid(45)), "", [], ""),
    # as in a container that may not read the kernel log
    "an XID that NVML alone reports": (
        lambda machine: machine.reported.append((2, 79)), "xid_restart", GPU_2, "XID 79 (GPU has fallen off the bus)"),
    "a fatal SXid": (
        logged(SXID.format("Fatal")), "sxid_fatal", [],
        "nvidia-nvswitch1 on PCI 0000:86:00.0: SXid 20034 (Fatal: Link 30 LTSSM Fault Up)"),
    "another SXid": (
        logged(SXID.format("Non-fatal")), "sxid", [], "nvidia-nvswitch1 on PCI 0000:86:00.0: SXid 20034 (Non-fatal"),
    "a PCIe error of a GPU": (
        logged(PCIE.format("Uncorrected (Fatal)")), "pcie_error_logged", GPU_2,
        "nvidia 0000:00:08.0: PCIe Bus Error: severity=Uncorrected (Fatal)"),
    "a processor that stands still": (
        logged("watchdog: BUG: soft lockup - CPU#18 stuck for 27s! [python3:2254956]"), "hung_task", NODE,
        "soft lockup - CPU#18 stuck for 27s!"),
}  # fmt: skip


def described(health):
    return [(fault.name, [str(subject) for subject in fault.subjects]) for fault in health.faults]


@pytest.mark.parametrize("what", WORSE)
def test_what_gets_worse_is_a_fault_of_the_check_in_which_it_did(machine, what):
    happens, code, places, words = WORSE[what]
    happens(machine)
    health = machine.guard.check()
    assert described(health) == ([(code, places)] if code else [])
    assert all(words in fault.what for fault in health.faults)
    machine.facts["clock_event_reasons"] = 0x1
    assert described(machine.guard.check()) == []


def test_what_a_process_leaves_behind_belongs_to_the_check_that_failed_and_corrected_errors_are_shown(machine):
    machine.kernel(xid(31))
    assert described(machine.guard.check(failed=True)) == [("xid_of_process", GPU_2)]
    machine.kernel(*map(xid, (13, 31, 43, 45)))
    assert described(machine.guard.check()) == []
    machine.kernel(*[PCIE.format("Correctable")] * 10_000)
    health = machine.guard.check()
    (shown,) = health.noticed
    assert (health.faults, shown.name, shown.subjects) == ((), "pcie_corrected_logged", (place.gpu(2),))
    assert "10,000 times" in shown.what


def test_gpus_that_a_sample_of_telemetry_finds_too_hot(machine):
    """Also where one of its thresholds cannot be read."""
    for gpu, without in ((1, "memory_max"), (2, "gpu_max")):
        limits = {"shutdown": 95, "slowdown": 89, "memory_max": 95, "gpu_max": 87, without: None}
        machine.node.topology.gpus[gpu].facts["temperature_limits_c"] = limits
        machine.gpus[gpu]["temperature_c"] = 91
    machine.guard.note(machine.node.sample())
    faults = machine.guard.check().faults
    assert [str(*fault.subjects) for fault in faults] == ["gpu1", "gpu2"]
    assert ["limit is 87" in faults[0].what, "limit is 89" in faults[1].what] == [True, True], faults


@pytest.mark.parametrize(
    ("reasons", "bits", "of_t4"),  # the power cap, 0x4, is normal
    [(0x4, [], []), (0x8, [0x8], [0x8]), (0x20, [0x20], []), (0x40, [0x40], [0x40]), (0x60, [0x20, 0x40], [0x40])],
)
def test_a_t4_may_slow_down_for_heat_until_its_hardware_does(reasons, bits, of_t4):
    for model, wanted in (("NVIDIA H200", bits), ("Tesla T4", of_t4)):
        gpu = Gpu(2, {"name": model})
        found = slowdowns(gpu, gpu, reasons)
        assert [int(fault.what.rpartition(" ")[2].rstrip(")"), 16) for fault in found] == wanted


# ---------------------------------------------------------------- whole runs
ENDS = """
import pytest
from pytest_gpufleet import not_applicable

@pytest.fixture(autouse=True)
def falls_off_the_bus():
    with open("kernel-log", "a") as log:
        log.write("NVRM: Xid (PCI:0000:00:08): 79, GPU has fallen off the bus.\\n")

def test_passes():
    pass

def test_does_not_apply():
    not_applicable("no such thing")

def test_is_skipped():
    pytest.skip()

def test_xfails():
    pytest.xfail()

def test_fails_anyway():
    raise ValueError("boom")

@pytest.mark.xfail
def test_is_expected_to_fail():
    pass
"""


@pytest.fixture(scope="module")
def on_recorded(run_pytest):
    options = ("--gpus=4", "--fleet-dir=runs", *RECORDED)
    return lambda module, *arguments: run_pytest(*options, *arguments, files={"test_inner.py": module})


def test_what_gets_worse_fails_the_test_that_ran_however_it_ends(on_recorded):
    run = on_recorded(ENDS, "--fleet-interval=10")
    *others, expected = run.outcomes.items()
    assert {outcome for _, outcome in others} == {"failed"}, run.text
    assert expected == ("test_is_expected_to_fail", "skipped")  # pytest itself takes the failure for an expected one
    assert (run.status, run.record.verdict) == (1, "REJECTED")
    for name, _ in others:
        message = run.check(name).message
        assert ("XID 79" in message, named(message)) == ((True, {2}) if name != "test_fails_anyway" else (False, set()))
    # It adds to a failure and does not replace it.
    assert "ValueError: boom" in run.check("test_fails_anyway").message
    assert "GPU health" in run.text
    found = [(fault.check.partition("::")[2], fault.name, fault.watched) for fault in run.record.faults]
    assert set(found) == {
        *((name, "xid_restart", True) for name in run.outcomes),
        ("test_fails_anyway", "check_failed", False),
    }
    (reason,) = [reason for reason in run.record.reasons if "test_is_expected_to_fail" in reason]
    assert reason.startswith(f"while test_inner.py::test_is_expected_to_fail ran: GPU 2 NVIDIA H200, {SERIAL}")


def test_a_gpu_that_does_not_answer_is_reported_and_hangs_nothing(on_recorded):
    inner = """
    import threading
    from pytest_gpufleet.machine import local_node, nvml
    from tests.machine.recorded import Recorded

    def test_during():
        ask = Recorded.ask
        def hanging(self, index, fact):
            if index == 2:
                threading.Event().wait()
            return ask(self, index, fact)
        Recorded.ask = hanging
        nvml.ANSWER_SECONDS = 0.5
        local_node.LONGEST_GAP = 0.01  # at an interval of 10 s
    """
    run = on_recorded(inner, "--fleet-interval=10")
    message = run.check("test_during").message
    assert named(message) == {2}
    assert "no answer from the driver within 0.5 s" in message
    assert "telemetry lost samples: no answer from the driver for" in "\n".join(run.record.reasons)

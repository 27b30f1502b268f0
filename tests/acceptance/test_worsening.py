"""What gets worse while a test runs, on a recorded 4x H200: the test fails, and the GPUs are named."""

import pytest

from pytest_gpufleet.machine.health import slowdowns
from pytest_gpufleet.model import place
from pytest_gpufleet.model.gpu import Gpu
from tests.acceptance.test_faulty_machines import SERIAL, named
from tests.conftest import INNER, RECORDED


@pytest.fixture(scope="module")
def on_recorded(run_pytest):
    """on_recorded(module, *arguments): a test module on the recorded machine."""

    def run(module, *arguments, **environment):
        options = ("--gpus=4", "--fleet-dir=runs", *RECORDED, *arguments)
        return run_pytest(*options, files={"test_inner.py": module}, **environment)

    return run


# The tests of inner/worsening.py, and of those that fail, which GPU is named and the words.
WORSE = {
    "test_uncorrectable_error": ({2}, "ecc_uncorrected_volatile was 0, is 1"),
    "test_nothing_more": None,
    "test_heat_between_two_samples": ({2}, "hw thermal slowdown for 0.012 s (clock event 0x40)"),
    "test_power_brake_between_two_samples": ({2}, "hw power brake slowdown for 3.5 s (clock event 0x80)"),
    "test_nothing_slowed_it_down": None,
    "test_slowdown": ({2}, "sw thermal slowdown (clock event 0x20)"),
    **dict.fromkeys([f"test_few_replays[{number}]" for number in range(5)]),
    "test_many_replays": ({2}, "pcie_replays was 150, is 181"),
    "test_counter_that_is_gone": ({2}, "remapped_rows could be read before and cannot now: NVML: GPU is lost"),
    "test_counter_that_stays_away": None,
    "test_xid": ({2}, "XID 13 (graphics engine exception)"),
    "test_somebody_was_ended": None,
    "test_fails_by_itself": (set(), "ValueError: an illegal memory access"),
    "test_what_the_failed_one_left_behind": None,
    "test_xid_that_only_nvml_reports": ({2}, "XID 79 (GPU has fallen off the bus)"),
    "test_sxid[Fatal]": (set(), "nvidia-nvswitch1 on PCI 0000:86:00.0: SXid 20034 (Fatal: Link 30 LTSSM Fault Up)"),
    "test_sxid[Non-fatal]": (set(), "nvidia-nvswitch1 on PCI 0000:86:00.0: SXid 20034 (Non-fatal: "),
    "test_pcie_error_of_a_gpu": ({2}, "nvidia 0000:00:08.0: PCIe Bus Error: severity=Uncorrected (Fatal)"),
    "test_processor_that_stands_still": (set(), "soft lockup - CPU#18 stuck for 27s!"),
    "test_flood_of_corrected_errors": None,
    "test_does_not_apply": ({2}, "XID 79"),
    "test_is_skipped": ({2}, "XID 79"),
    "test_xfails": ({2}, "XID 79"),
    "test_fails_anyway": (set(), "ValueError: boom"),
}


@pytest.fixture(scope="module")
def worsened(on_recorded):
    # A sample would see the clock events of one test in the next one.
    return on_recorded(INNER / "worsening.py", "--fleet-interval=10")


def test_what_gets_worse_is_watched_in_every_test(worsened):
    assert worsened.outcomes == {
        **{name: "failed" if worse else "passed" for name, worse in WORSE.items()},
        "test_is_expected_to_fail": "skipped",
    }, worsened.text
    assert (worsened.status, worsened.record.verdict) == (1, "REJECTED")


@pytest.mark.parametrize("name", [name for name, worse in WORSE.items() if worse])
def test_what_gets_worse_fails_the_test_that_ran(worsened, name):
    gpus, words = WORSE[name]
    message = worsened.check(name).message
    assert words in message
    assert named(message) == gpus


def test_what_gets_worse_adds_to_a_failure_and_does_not_replace_it(worsened):
    assert "GPU health" in worsened.text
    (reason,) = [reason for reason in worsened.record.reasons if "test_fails_anyway" in reason]
    assert "XID 79" not in reason


def test_what_the_kernel_logs_belongs_to_the_check_in_which_it_came(worsened):
    """Also what a process leaves behind that failed by itself."""
    of_host = [fault for fault in worsened.record.faults if fault.kind.number in range(236, 250)]
    assert [
        (fault.check.partition("::")[2], fault.name, *map(str, fault.subjects), fault.watched) for fault in of_host
    ] == [
        ("test_pcie_error_of_a_gpu", "pcie_error_logged", "gpu2", True),
        ("test_processor_that_stands_still", "hung_task", "node", True),
    ]
    left = [fault.check.partition("::")[2] for fault in worsened.record.faults if fault.name == "xid_of_process"]
    assert left == ["test_xid", "test_fails_by_itself"]


def test_errors_that_were_corrected_are_counted_and_shown(worsened):
    (shown,) = worsened.record.noticed
    assert (shown.name, shown.subjects, shown.check.partition("::")[2]) == (
        "pcie_corrected_logged", (place.gpu(2),), "test_flood_of_corrected_errors",
    )  # fmt: skip
    assert "10,000 times" in shown.what


def test_what_gets_worse_rejects_the_machine_whatever_becomes_of_the_check(worsened):
    """Here pytest itself takes the failure for an expected one."""
    (reason,) = [reason for reason in worsened.record.reasons if "test_is_expected_to_fail" in reason]
    assert reason.startswith(f"while test_inner.py::test_is_expected_to_fail ran: GPU 2 NVIDIA H200, {SERIAL}")


@pytest.mark.parametrize(
    ("reasons", "bits", "of_t4"),  # the power cap, 0x4, is normal
    [(0x4, [], []), (0x8, [0x8], [0x8]), (0x20, [0x20], []), (0x40, [0x40], [0x40]), (0x60, [0x20, 0x40], [0x40])],
)
def test_a_t4_may_slow_down_for_heat_until_its_hardware_does(reasons, bits, of_t4):
    for model, wanted in (("NVIDIA H200", bits), ("Tesla T4", of_t4)):
        gpu = Gpu(2, {"name": model})
        found = slowdowns(gpu, gpu, [reasons])
        assert [int(fault.what.rpartition(" ")[2].rstrip(")"), 16) for fault in found] == wanted


def test_lost_telemetry_is_reported_and_leaves_the_verdict_incomplete(on_recorded):
    inner = """
    from pytest_gpufleet.machine import health_watch
    from pytest_gpufleet.plugin.keys import RUN

    def broken(self, sample):
        raise RuntimeError("no room for it")

    health_watch.Guard.note = broken

    def test_during(pytestconfig):
        while not pytestconfig.stash[RUN]._sampler.trouble:
            pass
    """
    run = on_recorded(inner, "--fleet-interval=0.05")
    assert (run.record.verdict, run.status) == ("INCOMPLETE", 10), run.text
    assert "telemetry lost samples: RuntimeError: no room for it" in run.record.reasons


def test_too_hot_during(on_recorded):
    """Also where one of its thresholds cannot be read."""
    inner = """
    from pytest_gpufleet.plugin.keys import RUN

    def test_during(pytestconfig):
        while not any(pytestconfig.stash[RUN].health._reasons):  # until the first sample of telemetry
            pass
    """
    change = """
for gpu in gpus:
    gpu.update(temperature_c=60, memory_temperature_c=70)
gpus[1]["temperature_limits_c"]["memory_max"] = None
gpus[2]["temperature_limits_c"]["gpu_max"] = None
gpus[1]["temperature_c"] = gpus[2]["temperature_c"] = 91
"""
    run = on_recorded(inner, CHANGE=change)
    of_1, of_2 = run.check("test_during").message.splitlines()
    assert (named(of_1), named(of_2)) == ({1}, {2})
    assert "temperature_c reached 91, the device's own limit is 87" in of_1
    assert "temperature_c reached 91, the device's own limit is 89" in of_2
    assert run.record.telemetry[0].gpus[2]["temperature_c"] == 91


def test_a_gpu_that_does_not_answer_is_reported_and_hangs_nothing(on_recorded):
    inner = """
    import threading
    from pytest_gpufleet.machine import nvml, telemetry
    from tests.machine.recorded import Recorded

    def test_during():
        ask = Recorded.ask
        def hanging(self, index, fact):
            if index == 2:
                threading.Event().wait()
            return ask(self, index, fact)
        Recorded.ask = hanging
        nvml.ANSWER_SECONDS = 0.5
        telemetry.LONGEST_GAP = 0.01  # at an interval of 10 s
    """
    run = on_recorded(inner, "--fleet-interval=10")
    message = run.check("test_during").message
    assert named(message) == {2}
    assert "no answer from the driver within 0.5 s" in message
    assert "telemetry lost samples: no answer from the driver for" in "\n".join(run.record.reasons)

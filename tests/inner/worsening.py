"""On a recorded machine: GPU 2 gets worse in one test after the other. What is worse stays so; only the test in which
it got worse fails."""

import pytest

from pytest_gpufleet import not_applicable
from pytest_gpufleet.model.gpu import Missing
from tests.machine.recorded import Recorded, recorded

FACTS = recorded.gpus[2].facts


def kernel(line):
    with open("kernel-log", "a") as log:
        log.write(line + "\n")


def fall_off_the_bus():
    kernel("NVRM: Xid (PCI:0000:00:08): 79, GPU has fallen off the bus.")


def test_uncorrectable_error():
    FACTS["ecc_uncorrected_volatile"] += 1


def test_nothing_more():
    pass


def slow_down(**more):
    FACTS["slowdown_ns"] = {name: spent + more.get(name, 0) for name, spent in FACTS["slowdown_ns"].items()}


def test_heat_between_two_samples():
    slow_down(hw_thermal=12_000_000)


def test_power_brake_between_two_samples():
    slow_down(power_brake=3_500_000_000)


def test_nothing_slowed_it_down():
    """The counters stay where they were, and the reason of the moment is the power cap."""
    slow_down()
    FACTS.update(clock_event_reasons=0x4)


def test_slowdown(monkeypatch):
    monkeypatch.setitem(FACTS, "clock_event_reasons", 0x60)


@pytest.mark.parametrize("number", range(5))
def test_few_replays(number):
    FACTS["pcie_replays"] += 30  # a minute on 16 lanes of generation 5; a shorter check may have as many


def test_many_replays():
    FACTS["pcie_replays"] += 31


def test_counter_that_is_gone():
    FACTS["remapped_rows"] = Missing("NVML: GPU is lost")


def test_counter_that_stays_away():
    pass


def test_xid():
    kernel("NVRM: Xid (PCI:0000:00:08): 13, pid=7, Graphics Exception")


def test_somebody_was_ended():
    """Another's process, or one of ours that nobody needed any more: nothing against the GPU."""
    kernel("NVRM: Xid (PCI:0000:00:08): 43, pid=7, name=python3, Ch 00000008")
    kernel("NVRM: Xid (PCI:0000:00:08): 45, pid=7, name=python3, Ch 00000008")


def test_fails_by_itself():
    kernel("NVRM: Xid (PCI:0000:00:08): 31, pid=7, name=python3, Ch 00000008, MMU Fault")
    raise ValueError("an illegal memory access")


def test_what_the_failed_one_left_behind():
    for number in (13, 31, 43, 45):
        kernel(f"NVRM: Xid (PCI:0000:00:08): {number}, pid=7, name=python3, Ch 00000008")


def test_xid_that_only_nvml_reports(monkeypatch):
    """As in a container that may not read the kernel log."""
    news = [(2, 79)]
    monkeypatch.setattr(Recorded, "xids", lambda self: [news.pop()] if news else [])


@pytest.mark.parametrize("severity", ["Fatal", "Non-fatal"])
def test_sxid(severity):
    kernel(f"nvidia-nvswitch1: SXid (PCI:0000:86:00.0): 20034, {severity}, Link 30 LTSSM Fault Up")


def test_pcie_error_of_a_gpu():
    kernel("nvidia 0000:00:08.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Data Link Layer, (Receiver ID)")


def test_processor_that_stands_still():
    kernel("watchdog: BUG: soft lockup - CPU#18 stuck for 27s! [python3:2254956]")


def test_flood_of_corrected_errors():
    """They are shown, and reject nothing."""
    for _ in range(10_000):
        kernel("nvidia 0000:00:08.0: PCIe Bus Error: severity=Correctable, type=Data Link Layer, (Transmitter ID)")


def test_does_not_apply():
    fall_off_the_bus()
    not_applicable("no such thing")


def test_is_skipped():
    fall_off_the_bus()
    pytest.skip()


def test_xfails():
    fall_off_the_bus()
    pytest.xfail()


def test_fails_anyway():
    fall_off_the_bus()
    raise ValueError("boom")


@pytest.mark.xfail
def test_is_expected_to_fail():
    fall_off_the_bus()

"""Samples of all GPUs, the thread that takes them, what they amount to. The GPUs are stand-ins, the threads real."""

import itertools
import json
import re
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pynvml
import pytest

from pytest_gpufleet.machine import local_node, nvml
from pytest_gpufleet.machine.gpu_facts import READINGS
from pytest_gpufleet.machine.health import POWER_CAP
from pytest_gpufleet.machine.local_node import LocalNode, Sampler
from pytest_gpufleet.machine.nvml import Watch
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.metric import GpuState
from pytest_gpufleet.model.place import Gpu, GpuTopology, Missing, clock_events
from tests.machine import fake_nvml

MANY_SECONDS = 30  # a deadline for what takes milliseconds


def node(driver):
    return LocalNode(driver, GpuTopology())


class StandIn:
    """GPUs that give their own index for every reading, but for the errors that they are to give. `meanwhile`: what
    they do first where they are asked for their power."""

    def __init__(self, count=2, errors=None, meanwhile=lambda: None):
        self.errors, self.asked = errors or {}, Counter()
        self.count, self._meanwhile = lambda: count, meanwhile

    def ask(self, index, fact):
        self.asked[index, fact] += 1
        if fact == "power_watts":
            self._meanwhile()
        return self.errors.get((index, fact), index)


def sampled(source, count, interval=0.01, on_sample=None):
    """The first `count` samples and the sampler, which was stopped then; each sample is given to `on_sample` too."""
    taken = []
    done = threading.Event()

    def collect(one):
        taken.append(one)
        if len(taken) == count:
            done.set()
        if on_sample:
            on_sample(one)

    sampler = Sampler(node(source), interval, collect)
    sampler.start()
    assert done.wait(MANY_SECONDS)
    sampler.stop()
    return taken, sampler


def test_sample_has_every_reading_of_every_gpu_in_their_order_and_all_at_the_same_time():
    before = time.time()
    taken = node(StandIn(3)).sample()
    assert taken.gpus == tuple(dict.fromkeys(READINGS, index) for index in range(3))
    assert before - 0.001 <= taken.time <= time.time()
    assert json.loads(json.dumps(codec.plain(taken))) == {"time": taken.time, "gpus": list(taken.gpus)}
    meeting = threading.Barrier(3)  # which breaks unless all three are being asked
    assert node(StandIn(3, meanwhile=lambda: meeting.wait(MANY_SECONDS))).sample().gpus[2]["power_watts"] == 2


def test_what_a_gpu_does_not_have_is_asked_once_and_what_failed_is_asked_again():
    absent, lost = Missing("Not Supported", absent=True), Missing("GPU is lost")
    source = StandIn(errors={(1, "memory_temperature_c"): absent, (1, "power_watts"): lost})
    asked = node(source)
    for _ in range(3):
        whole, taken = asked.sample().gpus
        assert taken["memory_temperature_c"] is taken["power_watts"] is None
        assert None not in whole.values()
    assert source.asked[1, "memory_temperature_c"] == 1
    assert source.asked[1, "power_watts"] == source.asked[0, "memory_temperature_c"] == 3


def test_sampler_goes_on_after_failures_and_keeps_the_last():
    moody = StandIn()
    moody.count = Mock(side_effect=itertools.cycle([1, RuntimeError("the driver is being reloaded")]))
    on_sample = Mock(side_effect=itertools.chain([OSError("disk full")], itertools.repeat(None)))
    _, sampler = sampled(moody, 3, on_sample=on_sample)
    assert sampler.trouble == "RuntimeError: the driver is being reloaded"


def test_sampler_keeps_its_rhythm_though_each_sample_takes_time(monkeypatch):
    """By a clock of its own, in seconds: a sample takes 0.4 intervals, and the tenth 2.4, which costs two beats."""
    clock, taken = [0.0], []

    def passes(seconds):
        clock[0] += seconds
        return len(taken) == 20

    slow = SimpleNamespace(sample=lambda: passes(2.4 if len(taken) == 9 else 0.4))
    monkeypatch.setattr(local_node, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    sampler = Sampler(slow, 1.0, lambda _: taken.append(clock[0]))
    sampler._stopped = SimpleNamespace(wait=passes, is_set=lambda: False)
    sampler._run()
    assert taken == pytest.approx([*(beat + 0.4 for beat in range(9)), 11.4, *(beat + 0.4 for beat in range(12, 22))])


def test_stop_comes_before_the_next_sample_and_twice_and_without_start():
    first = threading.Event()
    sampler = Sampler(node(StandIn()), 3600, lambda _: first.set())
    sampler.start()
    assert first.wait(MANY_SECONDS), "the first sample is taken at once"
    before = time.monotonic()
    sampler.stop()
    sampler.stop()
    Sampler(node(StandIn()), 1, print).stop()
    assert time.monotonic() - before < MANY_SECONDS


def test_a_gap_in_the_samples_is_reported(monkeypatch):
    monkeypatch.setattr(local_node, "LONGEST_GAP", 0.1)
    taken = []
    late = StandIn(meanwhile=lambda: len(taken) == 1 and time.sleep(0.2))  # a driver that is slow for once
    _, sampler = sampled(late, 2, on_sample=taken.append)
    assert re.fullmatch(r"no answer from the driver for \d\.\d s", sampler.trouble)


def test_clock_event_reasons_in_words():
    words = "hw thermal slowdown, hw power brake slowdown, hw slowdown, sw thermal slowdown, sw power cap"
    more = "applications clocks setting, sync boost, display clock setting, gpu idle, unknown reason 0x1000"
    assert clock_events(0x11FF) == f"{words}, {more}".split(", ")
    assert (clock_events(0), clock_events(0x48)) == ([], ["hw thermal slowdown", "hw slowdown"])


# A GPU that is watched while something works on it. NVML is made up, the thread is real.
def watched(monkeypatch, *power, unsupported=(), lost=()):
    """What was seen of GPU 1 of two, of which each of its powers in W was read once; above 500 W the driver's power cap
    holds it."""
    watts, reasons, all_read = iter(power), iter(power), threading.Event()

    def next_power(nvml, card):
        assert card.index == 1
        if (read := next(watts, None)) is None:
            all_read.set()
            fake_nvml.failed(pynvml.NVML_ERROR_UNKNOWN)
        return 1000 * read

    millijoules = itertools.count(7_000_000, 1000)
    answers = {
        "nvmlDeviceGetTotalEnergyConsumption": lambda nvml, card: next(millijoules),
        "nvmlDeviceGetTemperature": lambda nvml, card, sensor: 61,
        "nvmlDeviceGetClockInfo": lambda nvml, card, clock: 1410,
        "nvmlDeviceGetPowerUsage": next_power,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda nvml, card: POWER_CAP if next(reasons, 0) > 500 else 1,
    }
    monkeypatch.setattr(nvml, "INTERVAL_SECONDS", 0.001)
    for name, answer in answers.items():
        monkeypatch.setitem(fake_nvml.ANSWERS, name, answer)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml.plain(2, unsupported=unsupported, lost=lost))
    with Watch(Gpu(1)) as watching:
        if not (lost or "nvmlDeviceGetPowerUsage" in unsupported):
            assert all_read.wait(30)
    return watching


def test_its_state_is_the_mean_of_what_can_be_read_and_the_energy_of_the_block(monkeypatch):
    """In the medians no spike counts. A lost GPU has none, and ends nothing."""
    watch = watched(monkeypatch, 300, 301, 525, 299, 300)
    assert (watch.state().power_watts, watch.medians.power_watts) == (345, 300)
    assert 5 <= (watch.state().energy_joules or 0) < 7000  # six readings and what follows, one joule apart
    neither = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption")
    alone = watched(monkeypatch, unsupported=neither).state()
    assert alone == GpuState(temperature_c=61, sm_clock_mhz=1410)
    assert watched(monkeypatch, lost=(1,)).state() is None


@pytest.mark.parametrize(("watts", "held"), [((700, 700, 300), True), ((700, 300, 300), False)])
def test_the_power_cap_holds_it_that_is_there_half_of_the_time(monkeypatch, watts, held):
    assert watched(monkeypatch, *watts).held_by(POWER_CAP) == held


def test_neither_has_a_cpu_rank_nor_a_gpu_without_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml.plain(1, broken=pynvml.NVML_ERROR_DRIVER_NOT_LOADED))
    for gpu in (None, Gpu(0)):
        with Watch(gpu) as watch:
            pass
        assert watch.state() is None

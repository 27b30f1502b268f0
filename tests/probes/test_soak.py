"""What the soak and its products amount to: planted faults are found at their GPU, healthy machines pass."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from pytest_gpufleet.model import place
from pytest_gpufleet.model.metric import GpuState, Measurement, Reading
from pytest_gpufleet.model.place import Gpu
from pytest_gpufleet.probes.compute.corruption import Soaked, soak_figures
from pytest_gpufleet.probes.compute.rate import relative_rate
from pytest_gpufleet.verdict.judgement import judge
from pytest_gpufleet.verdict.profile import for_gpu
from tests.machines import recorded

PLACES = [place.gpu(index) for index in range(4)]
PROFILE = for_gpu("NVIDIA H200")

# At bf16, of h200x4-c: C, MHz, W.
HEALTHY = [(63.0, 1425.0, 690.0), (56.0, 1485.0, 691.0), (54.0, 1470.0, 693.0), (63.0, 1425.0, 691.0)]


def slow_places(measurement):
    finding = judge(measurement, PROFILE, recorded().topology, "a check", rehearsal=False, required=False)
    return {*finding.missed, *(finding.slower_than_peers or ())}


# ---------------- temperature, clock and power at the end of the soak
def soaked(*states):
    """By metric, the places that are worse than their peers."""
    return {figure.metric: slow_places(figure) for figure in figures(*(state and GpuState(*state) for state in states))}


def figures(*states, halves=(), model="NVIDIA H200"):
    """`halves`: the NUMA node of each GPU, if anybody knows."""
    facts = {"name": model, "power_limit_watts": 700.0}
    masks = [{"cpu_affinity": [half]} for half in halves] or [{}] * len(states)
    gpus = tuple(Gpu(index, {**facts, **mask}) for index, mask in enumerate(masks))
    world = SimpleNamespace(places=tuple(gpu.place for gpu in gpus), gpus=gpus, size=len(gpus))
    return soak_figures(world, [Soaked(None, Reading("gemm", 1.0, {}), state) for state in states])


def test_a_healthy_board_passes_the_soak():
    warmer = [(temperature + 8, clock, power) for temperature, clock, power in HEALTHY]
    needs_less = [(60.0, 1980.0, 400.0), (58.0, 1980.0, 385.0), (61.0, 1980.0, 395.0), (55.0, 1980.0, 345.0)]
    # One is warmer by 8 K more than its board ever showed; chips below their limit need more power or less.
    for board in (HEALTHY, warmer, [warmer[0], *HEALTHY[1:]], needs_less):
        assert not any(soaked(*board).values()), board


# Degrees Celsius of GPUs, all at 690 W; where they are known to be halves, of the first and the second half. The same
# without a hot one, and chips that draw 5 % less, are planted for docs/planted-faults.md.
WATER = (33, 33, 33, 33, 44, 44, 44, 44)  # in series
REAR = (55, 56, 54, 57, 63, 64, 62, 65)  # air that the others have warmed


@pytest.mark.parametrize(("celsius", "halves", "hot"), [
    ((40, 41, 53), (), {2}),
    ((49, 59), (), set()),  # two H200 of 2026-11-23
    ((49, 61), (), {1}),
    ((*WATER[:7], 56), (), {7}),
    ((45, *WATER[1:]), (), set()),  # as warm as the second half: nobody knows that it is of the first
    ((45, *WATER[1:]), (1, 1, 1, 1, 2, 2, 2, 2), {0}),
    (REAR, (1, 2, 1, 2, 1, 2, 1, 2), set()),
    ((*REAR[:7], 77), (), {7}),
    ((55, 56, 54, 63), (), set()),  # one of four stands in the rear
])  # fmt: skip
def test_a_gpu_is_too_warm_beside_those_that_stand_as_it_does(celsius, halves, hot):
    every = figures(*(GpuState(each, 1400.0, 690.0) for each in celsius), halves=halves)
    (excess,) = (each for each in every if each.metric == "soak_excess")
    assert slow_places(excess) == {place.gpu(index) for index in hot}


def test_of_two_cards_the_upper_one_is_warmer_and_who_is_warm_though_it_draws_less_is_the_worse():
    states = [GpuState(each, 2700.0, 440.0) for each in (62.0, 79.0, 78.0)]
    for count, most in ((2, 0.0), (3, 1.0)):
        *_, excess = figures(*states[:count], model="NVIDIA GeForce RTX 4090")
        assert max(excess.values.values()) == pytest.approx(most)
    states = [GpuState(each, 1400.0, watts) for each, watts in ((55.0, 690.0), (56.0, 690.0), (65.0, 500.0))]
    (excess,) = (each for each in figures(*states) if each.metric == "soak_excess")
    assert excess.values[place.gpu(2)] == pytest.approx(9 / 500 * 690)


@pytest.mark.parametrize(("planted", "metric"), [
    ((82.0, 1400.0, 691.0), "soak_excess"),  # its cold plate does not sit flat
    ((58.0, 1200.0, 690.0), "soak_clock"),  # it throttles
    ((48.0, 1410.0, 520.0), "soak_power"),  # it does not draw power
])  # fmt: skip
def test_a_gpu_that_differs_from_its_peers_in_the_soak_is_found(planted, metric):
    worse = soaked(HEALTHY[0], planted, *HEALTHY[2:])
    assert {name: places for name, places in worse.items() if places} == {metric: {PLACES[1]}}


def test_what_nvml_does_not_know_is_no_figure():
    found = figures(GpuState(temperature_c=60.0), None, None)
    known = {"soak_temperature": {PLACES[0]: 60.0}, "soak_clock": {}, "soak_power": {}, "soak_excess": {}}
    assert {figure.metric: figure.values for figure in found} == known


# ---------------- rates over all precisions
def test_the_mean_over_precisions_has_its_temperature():
    """Of h200x4-c: TFLOP/s of each GPU. What a slow or a warm GPU makes of it is planted in tests/planted.py."""
    tflops = {"fp64": (52.27, 54.60, 54.78, 52.99), "bf16": (675.8, 681.9, 697.0, 680.9)}
    states = {at: GpuState(state[0]) for at, state in zip(PLACES, HEALTHY, strict=True)}
    rates = [
        Measurement("gemm", dict(zip(PLACES, each, strict=True)), {"precision": precision}, gpu_states=states)
        for precision, each in tflops.items()
    ]
    relative = relative_rate(rates)
    assert relative.values[PLACES[2]] == 1.0  # the fastest in all
    assert relative.values[PLACES[0]] == pytest.approx((52.27 / 54.78 + 675.8 / 697.0) / 2)
    assert relative.gpu_states[PLACES[0]] == GpuState(temperature_c=63.0)
    assert relative_rate([replace(each, gpu_states={}) for each in rates]).gpu_states == {}


# ---------------- parts of a window
# 2x H200, fp64: eight parts of half a second, of the power controller's transient (2026-11-22).
COURSE = (1.035, 0.980, 1.012, 0.984, 1.017, 0.988, 1.011, 0.990)


def window(*factors):
    samples = {
        at: tuple(52.0 * common * own for common, own in zip(COURSE, each, strict=True))
        for at, each in zip(PLACES, factors, strict=False)
    }
    return Measurement(
        "gemm", dict.fromkeys(samples, 52.0), {"precision": "fp64", "at_once": "all", "method": "one window"}, samples
    )


STEADY = (1.002, 0.998, 1.001, 0.999, 1.0, 1.001, 0.999, 1.0)
DISTURBED = (1.0, 1.0, 1.0, 0.9, 0.9, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_spread_is_what_gpus_do_not_have_in_common(count):
    spread = window(*[STEADY] * count).spread
    assert len(spread) == count
    assert max(spread.values()) < 0.01
    assert max(window(STEADY).spread.values()) > 0.05  # alone, nobody can tell
    disturbed = window(DISTURBED, *[STEADY] * (count - 1)).spread
    assert {at for at, each in disturbed.items() if each > 0.05} == {PLACES[0]}

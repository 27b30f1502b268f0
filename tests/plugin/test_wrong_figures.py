"""What authors of own checks measure and record, figures and losses, and get wrong: it fails with a sentence, and run
and report are none the worse."""

import subprocess
import sys

import numpy
import pytest
import torch

from pytest_gpufleet import Measurement, Metric, Reading
from pytest_gpufleet.model.place import WORLD, Place

SORTING = Metric("sort_rate", "Mkeys/s", "higher", "sorting")
WRONG = [
    (lambda: Reading(SORTING, "5", {}), "the value of sort_rate must be a number, not '5'"),
    (lambda: Reading(SORTING, True, {}), "the value of sort_rate must be a number, not True"),
    (lambda: Reading(SORTING, torch.ones(3), {}), "the value of sort_rate must be a number, not tensor("),
    (lambda: Reading(SORTING, 5.0, {}, ("1", "2")), "each of the samples of sort_rate must be a number"),
    (lambda: Reading(SORTING, 5.0, {}, 5.0), "the samples of sort_rate must be a tuple of numbers, not"),
    (lambda: Reading(SORTING, 5.0, {"keys": None}),
     '"keys" in the conditions of sort_rate must be a text, a number, true or false, not None'),
    (lambda: Measurement("busbw", {"world": 5.0}, {"shape": torch.Size([3])}),
     '"shape" in the conditions of busbw must be a text, a number, true or false, not torch.Size([3])'),
    (lambda: Reading(SORTING, 5.0, {3: 4}), "names in the conditions of sort_rate must be texts, not 3"),
    (lambda: Reading(SORTING, 5.0, "fast"), "the conditions of sort_rate must be a dict like"),
    (lambda: Reading(SORTING, 5.0, {}, details={"dtype": torch.half}), '"dtype" in the details of sort_rate'),
    (lambda: Reading(SORTING, 5.0, {}, place=3), 'be a place or its text, like "gpu0" or "world", not 3'),
    (lambda: Reading(7, 5.0, {}), "the metric of a Reading must be a Metric or the name of one, not 7"),
    (lambda: Measurement("busbw", 5.0, {}), "the value of busbw must be given by place, like"),
    (lambda: Measurement("busbw", {"world": None}, {}), "the value of busbw at world must be a number, not None"),
    (lambda: Metric("x", "s", "smaller", "x"), """metric x: better must be "higher" or "lower", not 'smaller'"""),
    (lambda: Metric("x", " ", "lower", "x"), "the unit of metric 'x' must be a text that is not blank, not ' '"),
    (lambda: Metric("", "s", "lower", "x"), "the name of metric '' must be a text that is not blank"),
    (lambda: Metric("x", "s", "lower", "x", -0.1), "metric x: peer_tolerance must be 0 or more, not -0.1"),
]  # fmt: skip

# The body of a check, and what its failure says.
WRONG_CHECKS = {
    "returns_number": ("judge(measure(world, sort_rate))", "sort_rate must return a Reading or a list of them, not 3."),
    "metric_unknown": ("measured(world, judge, 'length', 1.0)", "there is no metric 'length': use one of busbw, "),
    "judges_list": ("judge([])", "judge() takes Measurements, not []"),
    "judges_nothing": ("judge()", "judge() was given no measurement: nothing was judged"),
    "shows_number": ("judge(shown=[5])", "judge() takes Measurements, not 5"),
    "losses_text": ("world.run(lambda rank: rank.record_losses({'model': 'mine'}, {1: 'low'}))",
                    "a loss must be a number, not 'low'"),
    "contradicts_profile": ("measured(world, judge, Metric('decode_rate', 'ms', 'lower', 'x'), 5.0)",
        "decode_rate was measured in ms, where lower is better, but by my.toml it is in tokens/s, and higher is"),
    "contradicts_suite": ("measured(world, judge, Metric('gemm', 'FOO/s', 'higher', 'x'), 5.0)",
                          "gemm was measured in FOO/s, where higher is better, but by my.toml it is in TFLOP/s"),
}  # fmt: skip

HEAD = """
import pytest
import torch
from pytest_gpufleet import WORLD, Measurement, Metric, Reading, measure

SORTING = Metric("sort_rate", "Mkeys/s", "higher", "sorting")

def sort_rate(rank):
    return 3.0

def measured(world, judge, metric, value):
    judge(measure(world, lambda rank: Reading(metric, value, {})))

def test_right(world, judge):
    judge(measure(world, lambda rank: Reading(SORTING, torch.tensor(5.0), {"keys": torch.tensor(8)}, (torch.ones(2)))))

def train(rank):
    rank.record_losses({"model": "mine", "ranks": 1}, {1: 2.0 + rank.index, 2: float("nan"), 3: 1.5})

def test_losses_alone(world):
    world.run(train)

@pytest.mark.spmd
def test_fails_after_losses(rank):
    if rank.index == 0:
        rank.record_losses({"model": "mine", "ranks": rank.size}, {10: 0.5}, WORLD)
    assert False

def test_losses_of_nobody(world):
    world.run(lambda rank: None)
"""

PROFILE = """
name = "Mine"
match = ["NVIDIA X9000"]
[metric.decode_rate]
unit = "tokens/s"
better = "higher"
title = "decode rate"
[[limit]]
metric = "decode_rate"
min = 9.0
unit = "tokens/s"
grade = "contract"
source = "order 4711"
when = { batch = 4096 }  # which no rehearsal has
"""


@pytest.fixture(scope="module")
def run(fleet):
    checks = [f"def test_{name}(world, judge):\n    {body}\n" for name, (body, _) in WRONG_CHECKS.items()]
    return fleet("\n".join([HEAD, *checks]), "--fleet-profile=my.toml", files={"my.toml": PROFILE})


def test_only_the_wrong_checks_fail(run):
    assert run.status == 1, run.text
    right = dict.fromkeys(("test_right", "test_losses_alone", "test_losses_of_nobody"), "passed")
    assert run.outcomes == {**right, **{f"test_{name}": "failed" for name in ("fails_after_losses", *WRONG_CHECKS)}}
    assert "INTERNALERROR" not in run.text
    (folder,) = run.folders
    assert (folder / "report.html").exists()


@pytest.mark.parametrize("name", WRONG_CHECKS)
def test_a_wrong_check_says_what_is_wrong(run, name):
    assert WRONG_CHECKS[name][1] in run.check(f"test_{name}").message


@pytest.mark.parametrize(("make", "words"), WRONG)
def test_what_is_wrong_is_said_where_it_is_made(make, words):
    with pytest.raises((TypeError, ValueError)) as wrong:
        make()
    assert words in str(wrong.value)


def test_losses_are_on_record_whatever_becomes_of_the_check_and_a_tensor_without_dimensions_is_a_number(run):
    recorded = [(each.check.rsplit("::", 1)[-1], str(each.curve.place), each.curve.steps, each.curve.losses)
            for each in run.record.losses]  # fmt: skip
    assert recorded == [
        ("test_losses_alone", "cpu0", (1, 3), (2.0, 1.5)),
        ("test_losses_alone", "cpu1", (1, 3), (3.0, 1.5)),
        ("test_fails_after_losses", "world", (10,), (0.5,)),
    ]
    assert run.record.losses[2].curve.training == {"model": "mine", "ranks": 2}
    (finding,) = run.record.findings
    assert finding.measurement.values == {Place(0, "cpu", 0): 5.0, Place(0, "cpu", 1): 5.0}
    assert finding.measurement.samples == dict.fromkeys(finding.measurement.values, (1.0, 1.0))
    assert finding.measurement.conditions == {"keys": 8}


@pytest.mark.parametrize("five", [5, 5.0, numpy.float32(5), numpy.int64(5), numpy.array(5.0), torch.tensor(5)])
def test_every_kind_of_number_is_a_float(five):
    reading = Reading("busbw", five, {}, [five])
    measurement = Measurement("busbw", {"world": five}, {"keys": five}, {"world": [five]})
    for value in (reading.value, *reading.samples, *measurement.values.values(), *measurement.samples[WORLD]):
        assert (type(value), value) == (float, 5.0)
    assert type(measurement.conditions["keys"]) in (int, float)


def test_readings_load_neither_torch_nor_numpy():
    program = "import sys, pytest_gpufleet.model.metric; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"

"""Power steps: what their turns amount to, what ends them, and all of it on CPU ranks."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from pytest_gpufleet.model import place
from pytest_gpufleet.model.fault import Fault, Faults
from pytest_gpufleet.probes import endurance
from pytest_gpufleet.probes.endurance import Step, StepTurn as Turn
from pytest_gpufleet.verdict.judgement import judge
from pytest_gpufleet.verdict.profile import for_gpu
from tests.acceptance.checks import ranks
from tests.conftest import ACCEPTANCE
from tests.machines import recorded

TOPOLOGY = recorded().topology
STEPS = f"{ACCEPTANCE / 'test_9_endurance.py'}::test_power_steps"


def turn(off=0.0005, last=16, trouble="", top=695.0):
    """Twenty steps at 10 Hz on a healthy GPU, but for what is given; `last`: matmuls of each in the second half."""
    steps = [Step(off, off, 0.05, matmuls) for matmuls in (16, last) for _ in range(10)]
    return Turn(tuple(steps), trouble, top, None if top is None else 118.0)


def a_world(results=None):
    """Ranks that give these results to each turn, and nothing to other calls."""
    return ranks(4, lambda probe, *_: next(results) if probe.__name__ == "_step_turn" else None, gpus=TOPOLOGY.gpus)


def worse(planted):
    """By figure, the GPUs that miss its limit, where GPU 2 did this."""
    findings = [
        judge(figure, for_gpu("NVIDIA H200"), TOPOLOGY, "a check", rehearsal=False)
        for figure in endurance.step_figures(a_world(), {10.0: with_gpu_2(planted)})
        if figure.metric != "power_swing"
    ]
    assert {finding.state for finding in findings} <= {"met", "missed"}
    return {finding.measurement.metric: set(finding.missed) for finding in findings if finding.missed}


def with_gpu_2(planted):
    return [turn(), turn(), planted, turn()]


def test_a_healthy_machine_meets_all():
    held_up_once = Turn((Step(0.04, 0.0, 0.01, 3), *turn(last=15).steps[1:]), "", 690.0, 120.0)
    assert worse(held_up_once) == {}


@pytest.mark.parametrize(("planted", "metric"), [
    (turn(off=0.02), "step_skew"),  # steps when the others rest
    (turn(last=8), "step_retention"),  # half the clock, as with a power brake
    (turn(top=400.0), "step_power"),  # a load that proves nothing
])  # fmt: skip
def test_a_gpu_that_does_not_step_with_the_others_is_named(planted, metric):
    assert worse(planted) == {metric: {place.gpu(2)}}


def test_the_swing_is_in_watts_and_no_power_is_no_figure():
    figures = {each.metric: each for each in endurance.step_figures(a_world(), {0.1: [turn()] * 4})}
    assert set(figures["power_swing"].values.values()) == {577.0}
    figures = {each.metric: each.values for each in endurance.step_figures(a_world(), {0.1: [turn(top=None)] * 4})}
    assert not figures["step_power"]
    assert not figures["power_swing"]
    without = endurance.step_figures(SimpleNamespace(gpus=[], places=[place.gpu(0)]), {5.0: [turn()]})
    assert [each.metric for each in without] == ["step_skew", "step_retention"]


@pytest.fixture(autouse=True)
def prepared(monkeypatch):
    monkeypatch.setattr(endurance, "_prepare_all_steps", lambda world: None)


def test_a_fault_a_wrong_bit_or_a_gpu_that_becomes_slow_ends_the_steps_at_once():
    after_turn = Mock(side_effect=Faults([Fault("gpu_lost", (place.gpu(1),), "fell off the bus")]))
    with pytest.raises(Faults):
        endurance.power_steps(a_world(results=iter([[turn()] * 4] * 99)), after_turn)
    assert [call.args[0] for call in after_turn.mock_calls] == ["power steps at 0.1 Hz"]
    results = iter([[turn()] * 4, with_gpu_2(turn(trouble="1 of 160 matmuls at 0.1 Hz differ from the first"))])
    with pytest.raises(Faults) as found:
        endurance.power_steps(a_world(results=results), lambda *of_turn: None)
    assert [(fault.name, fault.subjects) for fault in found.value.faults] == [
        ("matmul_nondeterministic", (place.gpu(2),))
    ]
    results = iter([[turn()] * 4, with_gpu_2(turn(last=8))])
    figures = {each.metric: each for each in endurance.power_steps(a_world(results=results), lambda *of_turn: None)}
    kept = figures["step_retention"].values
    assert {where for where, value in kept.items() if value < 0.9} == {place.gpu(2)}


def test_all_of_it_on_cpu_ranks(run_pytest):
    run = run_pytest(STEPS, "--rehearse", "--fleet-level=burnin", "--fleet-dir=runs")
    assert run.status == 0, run.text
    (name,) = run.record.progress
    assert name.endswith("test_power_steps")
    assert {finding.measurement.metric for finding in run.record.findings} == {"step_skew", "step_retention"}

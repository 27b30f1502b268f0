"""What the model says is found and rejected, held against machines made by chance; docs/power.md."""

import random
import runpy
from dataclasses import astuple, replace
from statistics import NormalDist, fmean

import pytest

from pytest_gpufleet.cli import main
from pytest_gpufleet.model.metric import Measurement
from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.verdict import power
from pytest_gpufleet.verdict.judgement import comparisons
from pytest_gpufleet.verdict.noise import REJECTED, Line, Spread, factor
from pytest_gpufleet.verdict.power import found, rejected, size_found
from pytest_gpufleet.verdict.profile import for_gpu
from tests.conftest import ROOT
from tests.recorded.test_recorded import HERE, RUNS

H200 = for_gpu("NVIDIA H200")

KNOWN = Spread(0.008, 0.01, within_df=10_000, between_df=10_000)  # as good as certain
MACHINES, GPUS, DRAWN = 3, 8, 4000


def machine(by_chance, slow, gpus):
    mean = 1 + by_chance.gauss(0, KNOWN.between)
    every = [mean + by_chance.gauss(0, KNOWN.within) for _ in range(GPUS)]
    return [value * (1 - slow) if number < gpus else value for number, value in enumerate(every)]


@pytest.mark.parametrize("size", [0.0, 0.015, 0.03])
def test_as_many_are_found_as_the_model_says(size):
    by_chance, line = random.Random(31), 0.02
    of_one, of_all = KNOWN.gpu_line(GPUS, 1), KNOWN.machine_line(MACHINES, GPUS, 1)
    one = every_one = 0
    for _ in range(DRAWN):
        values = machine(by_chance, size, 1)
        one += values[0] < fmean(values[1:]) * (1 - line)
        reference = fmean(fmean(machine(by_chance, 0, 0)) for _ in range(MACHINES))
        every_one += fmean(machine(by_chance, size, GPUS)) < reference * (1 - line)
    for seen, expected in ((one, of_one), (every_one, of_all)):
        assert seen / DRAWN == pytest.approx(found(size, replace(expected, at=line)), abs=0.03)
    assert rejected(of_one) == pytest.approx(0.001, rel=0.1)


def test_a_spread_of_few_machines_may_be_larger_and_no_probability_is_above_what_either_says():
    unsure = Spread(0.01, 0.01, within_df=10, matters=0.02).gpu_line(2, 100)
    assert unsure.most / unsure.sd == pytest.approx(1.593, abs=0.01)  # sqrt(10 / 3.94), by tables of chi2
    assert found(unsure.at - unsure.sd, unsure) == pytest.approx(0.159, abs=0.001)
    assert found(unsure.at + unsure.most, unsure) == pytest.approx(0.841, abs=0.001)
    assert found(size_found(0.95, unsure), unsure) == pytest.approx(0.95)
    assert [found(size, Line(0.01, 0, 1)) for size in (0.005, 0.02)] == [0, 1]


def test_the_page_is_current_and_as_many_recorded_machines_as_it_says_are_rejected():
    made = runpy.run_path(str(ROOT / "docs" / "make_power.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), f"run `{made['COMMAND']}`"
    healthy = RUNS.keys() - {"h200x4-neighbour"}
    today = [(HERE / name / "expected" / "today.txt").read_text(encoding="utf-8") for name in healthy]
    assert len(today) == power.RECORDED_HEALTHY
    assert sum(text.startswith("REJECTED") for text in today) == power.RECORDED_REJECTED


def test_a_profile_makes_the_comparisons_of_its_references_and_of_peers():
    made, count = power.of_profile(H200, 8, 1, "standard"), comparisons(shipped(), "standard", 8, 1)
    assert power.rejected_by_chance(made)[0] < REJECTED
    all_reduce = next(each for each in made if {("collective", "all_reduce"), ("nvls", False)} <= set(each.conditions))
    under = Measurement("busbw", {"world": 1.0}, dict(all_reduce.conditions))
    known, limit = H200.spread_for(under, "nvswitch"), H200.limit_for(under, "nvswitch")
    line = known.machine_line(limit.reference.machines, 1, count)
    assert astuple(all_reduce.line) == pytest.approx(astuple(line))
    assert {each.held for each in power.of_profile(H200, 1, 1, "standard")} == {"reference"}


@pytest.mark.parametrize("nodes", [2, 64])
def test_between_nodes_that_show_themselves_how_much_they_differ_few_healthy_ones_are_rejected(nodes, capsys):
    made = [each for each in power.of_profile(H200, 8, nodes, "standard") if each.nodes > 1]
    rails = next(each for each in made if each.metric == "rail_bandwidth")
    assert (rails.often, rails.line.sd) == (8 * nodes, pytest.approx(0.03, rel=0.05))  # as the default says
    assert all(chance < 2 * REJECTED for chance in power.rejected_by_chance(made))
    assert main(["power", "h200", "--nodes", f"{nodes}"]) == 0
    (one_node, any_node, between, _) = [line for line in capsys.readouterr().out.split("\n") if "healthy" in line]
    assert one_node.startswith(
        "healthy and rejected, by the model: below 0.001 of 1,000 by the spreads that are known, 4"
    )
    assert any_node.endswith({2: "at most 0.91%", 64: "at most 25.25%"}[nodes])
    assert between.startswith(f"{nodes} healthy nodes and rejected between them, by the model: 0.0")


def test_the_command_prints_and_plots_a_profile_or_a_run_and_refuses_what_is_neither(tmp_path, capsys):
    drawn = tmp_path / "power.svg"
    assert main(["power", "h200", "--plot", str(drawn)]) == 0
    assert main(["power", str(RUNS["h200x2-g"]), "--nodes", "64"]) == 0
    out = capsys.readouterr().out
    assert out.count("one memory") == 2
    assert "0 of 8 machines, so at most 38%" in out
    assert drawn.read_text(encoding="utf-8").startswith("<svg ")
    with pytest.raises(SystemExit):
        main(["power", "h200", "--gpus", "0"])
    assert main(["power", "h201"]) == 1
    assert "no profile that is shipped" in capsys.readouterr().err


# Factors of one-sided tolerance intervals.
Z = NormalDist().inv_cdf(0.999)
# By another way: the 95 % quantile of (z + U / sqrt(n)) / sqrt(chi2 / (n - 1)), from four million draws each.
FACTORS = {2: 49.43, 4: 9.201, 8: 5.689, 13: 4.787, 24: 4.170, 64: 3.673, 10**7: Z}  # with endless data the quantile


@pytest.mark.parametrize("n", FACTORS)
def test_factors_are_those_that_were_drawn(n):
    assert factor(Z, n, n - 1) == pytest.approx(FACTORS[n], rel=0.004)

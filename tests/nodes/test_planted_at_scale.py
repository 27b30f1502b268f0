"""The twenty faults of benchmarks/thousand_nodes.py, on a fifth of its nodes: each is named, and nobody else."""

import importlib.util
from pathlib import Path

import pytest

from pytest_gpufleet.model.place import Place

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "thousand_nodes.py"
spec = importlib.util.spec_from_file_location("thousand_nodes", SCRIPT)
planted = importlib.util.module_from_spec(spec)
spec.loader.exec_module(planted)
NODES = 200


def test_what_shows_beside_the_others_and_in_own_runs():
    assert planted.alone(NODES) == {
        ("gf0007", "slow"), ("gf0012", "slow"), ("gf0013", "slow"), ("gf0020", "unlike"), ("gf0031", "rejected"),
        ("gf0033", "missing"),
    }  # fmt: skip
    assert planted.hung(NODES, (44, 60)) == {44, 60}
    assert planted.cables(NODES) == {(50, "cable_swapped")}


@pytest.mark.parametrize("seed", range(3))
def test_what_shows_between_nodes(seed):
    found, links, fabric = planted.pairs(NODES, seed)
    assert (found.nodes, found.links) == (tuple(planted.SLOW), tuple(sorted(links)))
    assert {min(each, key=len) for each in found.between} == {tuple(planted.LEAF), tuple(planted.HALF_A_RACK)}
    assert fabric.calls <= 16
    subjects = {subject for fault in planted.rails(NODES, seed) for subject in fault.subjects}
    assert subjects == {Place(node, "rail", rail) for node, rail in planted.SLOW_RAILS}

"""Nodes of one run beside each other: who is unlike, who is slow, whose clock is off. Nodes 0, 2, 5 and 7 take part."""

from dataclasses import replace

import pytest

from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.place import Place, gpu
from pytest_gpufleet.verdict.fleet.fleet_peers import (
    clocks_apart,
    minority,
    nodes_unlike_others,
    slower_than_other_nodes,
)
from tests.fleets import fleet_of, host_run, slower

NUMBERS = (0, 2, 5, 7)


def nodes(**differing):
    return dict(zip(NUMBERS, fleet_of(4, **differing), strict=True))


def other_driver(topology):
    return replace(topology, driver="570.86.15")


def other_gsp(topology):
    return replace(topology, gpus=tuple(Gpu(each.index, {**each.facts, "gsp_firmware": "1"}) for each in topology.gpus))


def other_power_limit(topology):
    first, *others = topology.gpus
    return replace(topology, gpus=(Gpu(0, {**first.facts, "power_limit_watts": 500.0}), *others))


def test_nodes_that_are_alike_have_no_fault_and_no_minority():
    assert nodes_unlike_others(nodes()) == []
    assert slower_than_other_nodes(nodes()) == []
    assert minority(nodes()) == {}


@pytest.mark.parametrize("change", [other_driver, other_gsp])
def test_a_node_with_other_software_or_firmware_is_named_and_left_out(change):
    runs = nodes(node_003=host_run("node-003", machine=change))
    (fault,) = nodes_unlike_others(runs)
    assert (fault.code, fault.subjects) == ("host_unlike_others", (Place(5, "node"),))
    assert minority(runs).keys() == {5}


def test_a_node_with_another_setting_is_named_and_works_with_the_others():
    runs = nodes(node_003=host_run("node-003", machine=other_power_limit))
    assert [fault.subjects for fault in nodes_unlike_others(runs)] == [(Place(5, "node"),)]
    assert minority(runs) == {}


def test_of_two_halves_nobody_is_the_minority():
    other = {f"node_00{n}": host_run(f"node-00{n}", machine=other_driver) for n in (1, 2)}
    assert [fault.subjects for fault in nodes_unlike_others(nodes(**other))] == [()]
    assert minority(nodes(**other)) == {}


def test_a_gpu_that_is_slower_than_those_of_all_nodes_is_named_with_its_node():
    runs = nodes(node_004=host_run("node-004", change=slower(0.1, 1)))
    faults = slower_than_other_nodes(runs)
    assert {fault.code for fault in faults} == {"slower_than_peers"}
    assert all(gpu(1, 7) in subject.parts for fault in faults for subject in fault.subjects)


@pytest.mark.parametrize(
    ("ahead", "off"),
    [
        ({0: 0.0, 2: 0.049, 5: -0.049}, []),
        ({0: 0.0, 2: 0.2, 5: 0.001}, [2]),
        ({0: 5.0, 2: 5.0, 5: -3.0}, [5]),
        ({0: 0.0, 2: 0.06}, [0, 2]),
        ({0: 0.0, 2: 0.04}, []),
        ({}, []),
    ],
    ids=str,
)
def test_the_clock_of_a_node_is_held_against_those_of_most(ahead, off):
    assert [(fault.code, fault.subjects) for fault in clocks_apart(ahead)] == [
        ("clock_off", (Place(node, "node"),)) for node in off
    ]

"""The network's ports after all nodes have used them together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from pytest_gpufleet import Judge, LiveMachine, Measurement, Place, expect_none, not_applicable, not_judged
from pytest_gpufleet.model.gpu import Missing
from pytest_gpufleet.model.machine import Machine
from pytest_gpufleet.model.place import Where
from pytest_gpufleet.verdict import port_rules

pytestmark = [
    pytest.mark.chapter("Ports", "Did the network between the nodes stay free of errors?"),
    pytest.mark.level("standard"),
    pytest.mark.needs(nodes=2),
    pytest.mark.at_the_end,
]


class Ports(NamedTuple):
    """A node's machine, and its ports when the run began and now; Missing if it does not answer any more."""

    machine: Machine
    before: Sequence[Mapping[str, Any]]
    now: Sequence[Mapping[str, Any]] | Missing


@pytest.fixture
def ports(machine: LiveMachine) -> list[Ports]:
    """Of each node that takes part."""
    there = [(node.machine, node) for node in machine.nodes if node.machine]
    return [Ports(each, each.host["network_ports"] or (), node.now("network_ports") or ()) for each, node in there]


def require_answers(ports: Iterable[Ports]) -> None:
    if silent := [f"node {each.machine.node}: {each.now}" for each in ports if isinstance(each.now, Missing)]:
        not_judged("\n".join(silent))


def test_ports_stayed_clean(ports: list[Ports]) -> None:
    """No network port went down or counted more errors than a healthy one while all nodes worked together

    A cable, transceiver or switch port that is bad shows under load: errors are sent again and cost bandwidth, until
    the link goes down and takes a job with it. Look at cable, transceiver and switch port of the one that is named:
    `ibstat`, `perfquery`, `mlxlink -d mlx5_0 -c -e`; exchange the cable first.
    """
    if not any(port.get("errors") for each in ports for port in each.before if "ACTIVE" in port["state"]):
        not_applicable("no active network port of these nodes counts errors")
    expect_none(
        replace(fault, subjects=(Place(each.machine.node, "node"),))
        for each in ports
        if not isinstance(each.now, Missing)
        for fault in port_rules.port_errors(each.before, each.now, each.machine.seconds_ago)
    )
    require_answers(ports)


@pytest.mark.figures("port_events")
def test_what_ports_waited_for(judge: Judge, ports: list[Ports]) -> None:
    """How often network ports had to wait, discard or send again, by node

    For information: congestion makes these grow as well as a fault does. One node or one kind of counter far above the
    others points to a slow receiver, a missing route, or, with RoCE, to a network that is not lossless as it should be
    (PFC and ECN of switches and adapters).
    """
    grown: dict[Where, dict[str, int]] = {
        Place(each.machine.node, "node"): port_rules.port_traffic(each.before, each.now)
        for each in ports
        if not isinstance(each.now, Missing)
    }
    names = sorted({name for counters in grown.values() for name in counters})
    if not names:
        not_applicable("no active network port of these nodes counts what it waits for")
    for name in names:
        values = {place: counters[name] for place, counters in grown.items() if name in counters}
        judge(Measurement("port_events", values, {"counter": name}), required=False)

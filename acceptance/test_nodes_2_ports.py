"""The network's ports after all nodes have used them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pytest_gpufleet import Judge, Machine, Measurement, Place, expect_none, not_applicable
from pytest_gpufleet.model.place import Where
from pytest_gpufleet.verdict import port_rules

pytestmark = [
    pytest.mark.chapter("Ports", "Did the network between the nodes stay free of errors?"),
    pytest.mark.level("standard"),
    pytest.mark.needs(nodes=2),
    pytest.mark.at_the_end,
]


def ports(machine: Machine) -> Sequence[Mapping[str, Any]]:
    return machine.host["network_ports"] or ()


def test_ports_stayed_clean(machines: Sequence[Machine], hosts_now: Callable[[str], Mapping[int, Any]]) -> None:
    """No network port went down or counted more errors than a healthy one while all nodes worked together

    A cable, transceiver or switch port that is bad shows under load: errors are sent again and cost bandwidth, until
    the link goes down and takes a job with it. Look at cable, transceiver and switch port of the one that is named:
    `ibstat`, `perfquery`, `mlxlink -d mlx5_0 -c -e`; exchange the cable first.
    """
    if not any(port.get("errors") for machine in machines for port in ports(machine) if "ACTIVE" in port["state"]):
        not_applicable("no active network port of these nodes counts errors")
    now = hosts_now("network_ports")
    expect_none(
        replace(fault, subjects=(Place(machine.node, "node"),))
        for machine in machines
        if machine.node in now
        for fault in port_rules.port_errors(ports(machine), now[machine.node] or (), machine.seconds_ago)
    )


@pytest.mark.figures("port_events")
def test_what_ports_waited_for(
    judge: Judge, machines: Sequence[Machine], hosts_now: Callable[[str], Mapping[int, Any]]
) -> None:
    """How often network ports had to wait, discard or send again, by node

    For information: congestion makes these grow as well as a fault does. One node or one kind of counter far above the
    others points to a slow receiver, a missing route, or, with RoCE, to a network that is not lossless as it should be
    (PFC and ECN of switches and adapters).
    """
    now = hosts_now("network_ports")
    grown: dict[Where, dict[str, int]] = {
        Place(machine.node, "node"): port_rules.port_traffic(ports(machine), now[machine.node] or ())
        for machine in machines
        if machine.node in now
    }
    names = sorted({name for counters in grown.values() for name in counters})
    if not names:
        not_applicable("no active network port of these nodes counts what it waits for")
    for name in names:
        values = {place: counters[name] for place, counters in grown.items() if name in counters}
        judge(Measurement("port_events", values, {"counter": name}), required=False)

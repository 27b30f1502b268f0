"""Nodes reach each other, before ranks of several meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pytest_gpufleet import Fault, LiveMachine, expect_none
from pytest_gpufleet.plugin import assertions

pytestmark = [
    pytest.mark.chapter("Between nodes: reachability", "Do nodes reach each other where NCCL and Gloo will?"),
    pytest.mark.level("quick"),
    pytest.mark.needs(nodes=2),
]


def test_nodes_reach_each_other(cut_off: Callable[..., Sequence[Fault]]) -> None:
    """Nodes reach each other over TCP

    Of up to 16 nodes each connects to all others, of more to three and the first one, on the interfaces and ports that
    NCCL and Gloo use, and 64 KiB go each way. Who is cut off makes all others hang for minutes. A node is named if it
    fails with two that reach others, else the two. Look at firewall, cable, VLAN, MTU and routes; the run goes on
    without one of them.
    """
    expect_none(cut_off())


def test_nodes_write_to_each_other_by_rdma(cut_off: Callable[..., Sequence[Fault]], machine: LiveMachine) -> None:
    """Nodes reach each other by RDMA on each rail

    Each node writes 6 MB to the others through each InfiniBand or RoCE port of its GPUs, by `ib_write_bw` of perftest
    23.07 or newer; it does not apply where that is not installed. A rail that cannot connect makes NCCL hang or fall
    back to sockets. The fault says node, adapter and port, what perftest said and what to look at; the run goes
    on without one of the nodes. Of more than 16 nodes each tries three others.
    """
    expect_none(cut_off(rdma=[*assertions.rdma_rails(machine.nodes).values()]))

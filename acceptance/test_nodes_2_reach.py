"""Nodes reach each other, before ranks of several meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pytest_gpufleet import Fault, expect_none

pytestmark = [
    pytest.mark.chapter("Between nodes: reachability", "Do nodes reach each other where NCCL and Gloo will?"),
    pytest.mark.level("quick"),
    pytest.mark.needs(nodes=2),
]


def test_nodes_reach_each_other(cut_off: Callable[[], Sequence[Fault]]) -> None:
    """Nodes reach each other over TCP

    Of up to 16 nodes each connects to all others, of more to three and the first one, on the interfaces and ports that
    NCCL and Gloo use, and 64 KiB go each way. Who is cut off makes all others hang for minutes. A node is named if it
    fails with two that reach others, else the two. Look at firewall, cable, VLAN, MTU and routes; the run goes on
    without one of them. RDMA is not tried here: the next checks use it.
    """
    expect_none(cut_off())

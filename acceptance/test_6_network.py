"""Network adapters, cables and transceivers of this machine, before another one is asked to answer."""

from __future__ import annotations

from functools import partial

import pytest

from pytest_gpufleet import Judge, LiveMachine, World, expect_none, not_applicable
from pytest_gpufleet.machine import optics, rdma
from pytest_gpufleet.model.machine import fastest_ports
from pytest_gpufleet.plugin import assertions
from pytest_gpufleet.probes import adapter_loopback
from pytest_gpufleet.verdict import port_rules

pytestmark = [
    pytest.mark.chapter("Network adapters", "Are adapters, cables and transceivers fast and free of errors?"),
    pytest.mark.level("standard"),
]
needs_gpus = pytest.mark.needs(gpus=True)


@needs_gpus
@pytest.mark.proves_sound
def test_transceivers_are_well(machine: LiveMachine) -> None:
    """Transceivers report no fault and work within their own limits

    Temperature, voltage, laser current and light of each lane, against the limits that the module itself has, and the
    flags that it raises. A module that is too hot or gets too little light goes on for weeks, until its link flaps. Too
    little light: clean the connectors, look for a bent fibre, exchange the cable. Too hot: look at the airflow through
    its cage. Copper cables have no light, and pass with what they have. Needs `mlxlink` (MFT) or `mstlink`, and root.
    """
    ports = assertions.of_host(machine.now, optics.OPTICS)
    expect_none(port_rules.module_faults(ports))
    assertions.require_answers(ports)


@needs_gpus
@pytest.mark.proves_sound
def test_links_have_few_bit_errors(machine: LiveMachine) -> None:
    """Network links have no more bit errors than healthy ones, and stay up

    What is left of bit errors after correction, by the limits from which NVIDIA calls a link faulty, and how often the
    link went down since its counters were cleared. Errors cost bandwidth first, and then the job. Clean and reseat the
    connectors at both ends, then exchange the cable, then look at the switch port: `mlxlink -d mlx5_0 -c`. Rates are
    judged once a link was up for 125 minutes. It needs `mlxlink` (MFT) or `mstlink`, and root.
    """
    ports = assertions.of_host(machine.now, optics.OPTICS)
    expect_none(port_rules.links_with_errors(ports))
    assertions.require_answers(ports)


@pytest.mark.host_alone
@needs_gpus
@pytest.mark.figures("nic_bandwidth", required=("nic_bandwidth",), peers="which are the adapters at the highest rate")
def test_adapters_write_to_themselves(machine: LiveMachine, judge: Judge) -> None:
    """Each network adapter writes to itself as fast as its port can

    By ib_write_bw of perftest, server and client on this machine: the adapter and its way to memory, without cable,
    switch or another machine. Of the InfiniBand and RoCE ports that are up, those at the highest rate, which GPUs use.
    Low for one: look at its PCIe link (`lspci -vv`), reseat or exchange it. Low for all: IOMMU and ACS, or processors
    that save power. perftest from 23.07 on has to be installed.
    """
    ports = assertions.of_host(machine.now, rdma.RDMA_WRITES)
    wrote = [port for port in ports if "why" not in port]
    figures = {port["port"]: [port["gigabits"] / 8] for port in wrote}
    written = adapter_loopback.adapter_bandwidth(
        figures, machine.host["network_ports"] or (), "ib_write_bw", wrote[0]["bytes"]
    )
    judge(written, on_miss=partial(port_rules.slow_adapters, written))
    expect_none(port_rules.adapters_that_fail(ports))


@pytest.mark.level("burnin")
@pytest.mark.host_alone
@pytest.mark.needs(ranks=2)
@pytest.mark.figures("nic_bandwidth", required=("nic_bandwidth",), peers="which are the adapters at the highest rate")
def test_gpus_reach_each_other_through_each_adapter(machine: LiveMachine, world: World, judge: Judge) -> None:
    """GPUs of this machine exchange data through each network adapter as fast as its port can

    NCCL between two GPUs to which one adapter alone is left, neither NVLink nor shared memory: out through the adapter
    and back in, one adapter after the other, then as many as there are pairs of GPUs at once. So a slow adapter, a bad
    PCIe way or missing GPUDirect RDMA is found without a second machine. A figure counts if the counters of the port
    have grown by what was sent. Low for one: its PCIe link, then the adapter itself. Low for all: GPUDirect RDMA
    (nvidia-peermem or dma-buf), IOMMU and ACS, NCCL_* variables. Ranks are started anew for it, so it is part of level
    burnin. A rehearsal sends through the loopback interface.
    """
    every = machine.host["network_ports"] or () if world.gpus else [adapter_loopback.LOOPBACK_INTERFACE]
    ports = fastest_ports(every) if world.gpus else every
    if not ports:
        not_applicable("no InfiniBand or RoCE port is active")
    found = adapter_loopback.adapters_in_loopback(world, ports)
    for figures, method in ((found.alone, "nccl"), (found.at_once, "nccl at once")):
        if figures:
            sent = adapter_loopback.adapter_bandwidth(figures, every, method, adapter_loopback.LOOPBACK_BYTES.on(world))
            judge(sent, on_miss=partial(port_rules.slow_adapters, sent))
    uncounted = [{"port": name, "why": "its counters did not grow by what was sent"} for name in found.unseen]
    expect_none(port_rules.adapters_that_fail([*found.failed, *(uncounted if found.alone else ())]))
    if not found.alone:
        not_applicable(f"the counters of {', '.join(found.unseen)} did not grow by what was sent: nobody knows its way")

"""Network adapters, cables and transceivers of this machine, before another one is asked to answer."""

from __future__ import annotations

from functools import partial

import pytest

from pytest_gpufleet import Judge, LiveMachine, Measurement, World, expect_none, not_applicable, not_judged
from pytest_gpufleet.machine import network_ports, optics, rdma
from pytest_gpufleet.model.events import NO_NETWORK, Order
from pytest_gpufleet.plugin import assertions
from pytest_gpufleet.probes import adapter_loopback
from pytest_gpufleet.verdict import orders

pytestmark = [
    pytest.mark.chapter("Network adapters", "Are adapters, cables and transceivers fast and free of errors?"),
    pytest.mark.level("standard"),
]
needs_gpus = pytest.mark.needs(gpus=True)


@needs_gpus
@pytest.mark.proves_sound
def test_transceivers_are_well(machine: LiveMachine) -> None:
    """Transceivers (optics): no fault, within their thresholds

    Temperature, voltage, laser current and light of each lane, against the limits that the module itself has, and the
    flags that it raises. A module that is too hot or gets too little light goes on for weeks, until its link flaps. Too
    little light: clean the connectors, look for a bent fibre, exchange the cable. Too hot: look at the airflow through
    its cage. Copper cables have no light, and pass with what they have. Needs `mlxlink` (MFT) or `mstlink`, and root.
    """
    ports = assertions.of_host(machine.now, optics.OPTICS)
    expect_none(optics.module_faults(ports))
    assertions.require_answers(port.silent for port in ports)


@needs_gpus
@pytest.mark.proves_sound
def test_links_have_few_bit_errors(machine: LiveMachine) -> None:
    """Network links: bit error rate is normal, no link flaps

    Bit errors that remain after correction, judged by the limits at which NVIDIA calls a link faulty, and how often the
    link went down since its counters were cleared. Errors cost bandwidth first, and then the job. Clean and reseat the
    connectors at both ends, then exchange the cable, then look at the switch port: `mlxlink -d mlx5_0 -c`. Rates are
    judged once a link has been up for 125 minutes. It needs `mlxlink` (MFT) or `mstlink`, and root.
    """
    ports = assertions.of_host(machine.now, optics.OPTICS)
    expect_none(optics.links_with_errors(ports))
    assertions.require_answers(port.silent for port in ports)


@needs_gpus
@pytest.mark.proves_sound
def test_infiniband_links_stayed_up_for_a_day(machine: LiveMachine) -> None:
    """InfiniBand links went down at most once in the last 24 hours

    A link that goes down twice in a day ends jobs, and in a long uptime its counter still looks small. Its network
    interface (IPoIB) loses its carrier with it, which systemd-networkd writes into the system log (`journalctl -t
    systemd-networkd`); the first half hour after a start is excused. Without such a log a port passes that went down at
    most once since its adapter was reset. Reseat the cable at both ends, exchange it, then look at the switch port.
    """
    found = assertions.of_host(machine.now, network_ports.LINK_FLAPS)
    expect_none(network_ports.flapping(found))
    if unknown := [port for port, times in found.items() if times is None]:
        away = "have systemd-networkd manage it, or clear the counters (`perfquery -R`) and run again after a day"
        not_judged(f"no log of this machine says when the link of {', '.join(unknown)} went down; {away}")


@needs_gpus
@pytest.mark.proves_sound
def test_ports_run_at_the_rate_of_their_board(
    machine: LiveMachine, fleet_order: Order | None, fleet_network: str
) -> None:
    """Network ports run at more than half the rate of their board

    If all ports run at half their rate they look alike, and every transfer between nodes takes twice as long: a switch
    or its ports are configured slower, cables or splitters are those of a slower network, or half of the lanes are
    dead. Of the InfiniBand and RoCE ports that are up, those at the highest rate, and those of which there is one for
    each GPU, are compared with the rate of their board (by its PSID) or, with `mlxlink`, of board and cable. If the
    network was built slower, give its rate in the order (--fleet-order) or by --fleet-network.
    """
    if fleet_network == NO_NETWORK:
        not_applicable("--fleet-network none")
    if not (there := network_ports.of_gpus(assertions.ports_in_use(machine), machine.gpus)):
        not_applicable("no InfiniBand or RoCE port is active")
    stated = {*orders.rates_of_ports(fleet_order), *([float(fleet_network)] if fleet_network else [])}
    ports = [port for port in there if port.gigabits not in stated]
    expect_none(network_ports.below_their_board(ports, {}))
    if all(network_ports.rate_of_board(port, {}) for port in ports):
        return
    able = {each.port: each.able for each in assertions.of_host(machine.now, optics.OPTICS) if each.able}
    expect_none(network_ports.below_their_board(ports, able))
    fastest = network_ports.fastest_ports(ports)
    if unknown := [port.port for port in fastest if not network_ports.rate_of_board(port, able)]:
        not_judged(f"nobody knows the rate of the boards of {', '.join(unknown)}: say it in the order (--fleet-order)")


@needs_gpus
@pytest.mark.proves_sound
def test_ports_have_one_mtu(machine: LiveMachine) -> None:
    """Network ports in the same role have the same MTU

    One port with a smaller MTU makes its rail slower than the others, or drops what they send. It is compared with
    those of its kind and rate, next to GPUs or not: `ip link`, `ibv_devinfo` (active_mtu). Set it in the network
    configuration, also at the switch port.
    """
    ports = assertions.ports_in_use(machine)
    if not any(port.mtu for port in network_ports.active(ports)):
        not_applicable("no active RoCE port has a network interface here, which has the MTU")
    expect_none(network_ports.other_mtu(ports, machine.gpus))


@pytest.mark.host_alone
@needs_gpus
@pytest.mark.figures("nic_bandwidth", required=("nic_bandwidth",), peers="which are the adapters at the highest rate")
def test_adapters_write_to_themselves(machine: LiveMachine, judge: Judge) -> None:
    """RDMA loopback write bandwidth of each network adapter

    By ib_write_bw of perftest, server and client on this machine: the adapter and its path to memory, without cable,
    switch or another machine. Of the InfiniBand and RoCE ports that are up, those at the highest rate, which GPUs use,
    against their line rate. Low for one: look at its PCIe link (`lspci -vv`), reseat or exchange it. Low for all: IOMMU
    and ACS, or CPU power saving. Needs perftest 23.07 or newer.
    """
    failed: dict[str, str] = {}
    written: list[Measurement] = []

    def measured() -> Measurement:
        ports = assertions.of_host(machine.now, rdma.RDMA_WRITES)
        failed.clear()  # what a first measurement could not and the second can was a disturbance
        failed.update({port.port: port.why for port in ports if port.why})
        rates = {port.port: [port.gigabits / 8] for port in ports if not port.why}
        known = network_ports.ports_of(machine.host)
        written.append(adapter_loopback.adapter_bandwidth(rates, known, "ib_write_bw", rdma.NBYTES))
        return written[-1]

    judge(measured, on_miss=lambda: rdma.slow_adapters(written[-1]))
    expect_none(rdma.adapters_that_fail(failed))


@pytest.mark.level("burnin")
@pytest.mark.host_alone
@pytest.mark.needs(ranks=2)
@pytest.mark.figures("nic_bandwidth", required=("nic_bandwidth",), peers="which are the adapters at the highest rate")
def test_gpus_reach_each_other_through_each_adapter(machine: LiveMachine, world: World, judge: Judge) -> None:
    """NCCL bandwidth between GPUs through each network adapter

    NCCL between two GPUs restricted to one adapter, without NVLink and shared memory: out through the adapter and back
    in, one adapter after the other, then as many as there are pairs of GPUs at once, against their line rate. This
    finds a slow adapter, a bad PCIe path or missing GPUDirect RDMA without a second machine. A measurement counts if
    the counters of the port have grown by what was sent. Low for one: its PCIe link, then the adapter itself. Low for
    all: GPUDirect RDMA (nvidia-peermem or dma-buf), IOMMU and ACS, NCCL_* variables. It restarts the ranks, so it is
    part of level burnin. A rehearsal sends through the loopback interface.
    """
    every = network_ports.ports_of(machine.host) if world.gpus else [adapter_loopback.LOOPBACK_INTERFACE]
    ports = network_ports.fastest_ports(every) if world.gpus else every
    if not ports:
        not_applicable("no InfiniBand or RoCE port is active")
    found = adapter_loopback.adapters_in_loopback(world, ports)
    for figures, method in ((found.alone, "nccl"), (found.at_once, "nccl at once")):
        if figures:
            sent = adapter_loopback.adapter_bandwidth(figures, every, method, adapter_loopback.LOOPBACK_BYTES.on(world))
            judge(sent, on_miss=partial(rdma.slow_adapters, sent))
    uncounted = dict.fromkeys(found.unseen if found.alone else (), "its counters did not grow by what was sent")
    expect_none(rdma.adapters_that_fail({**found.failed, **uncounted}))
    if not found.alone:
        not_judged(f"the counters of {', '.join(found.unseen)} did not grow by what was sent: nobody knows its way")

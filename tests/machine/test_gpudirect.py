"""Adapters that are next to other GPUs than their own, on machines of eight GPUs that are described here."""

import pytest

from pytest_gpufleet.machine.gpudirect import misplaced_adapters
from pytest_gpufleet.machine.network_ports import Port
from pytest_gpufleet.machine.pcie import Device
from pytest_gpufleet.model.gpu import Gpu

ON_TWO_SOCKETS = (0, 0, 0, 0, 1, 1, 1, 1)
BY_TWO = (0, 0, 1, 1, 2, 2, 3, 3)


def machine(gpus, adapters, switches=True, slow=(), cards=None):
    """The switch (two of them at a NUMA node), or without switches the NUMA node, of each GPU and adapter."""
    devices = {}
    for kind, numbers in (("gpu", gpus), ("adapter", adapters)):
        for number, group in enumerate(numbers):
            bus = (0x10 if kind == "gpu" else 0x80) + (cards or range(99))[number]
            function = number - (cards or range(99)).index((cards or range(99))[number]) if kind == "adapter" else 0
            root = f"0000:f{group}:01.0" if switches else f"0000:{bus:02x}:0f.0"
            numa = group // 2 if switches else group
            devices.setdefault(root, Device(name=root, numa_node=numa))
            name = f"mlx5_{number}" if kind == "adapter" else ""
            devices[f"0000:{bus:02x}:00.{function}"] = Device(kind=kind, name=name, above=root, numa_node=numa)
    rates = ["100 Gb/sec" if number in slow else "400 Gb/sec" for number in range(len(adapters))]
    ports = [Port(f"mlx5_{n}/1", "4: ACTIVE", rate, "InfiniBand") for n, rate in enumerate(rates)]
    return (
        [Gpu(index, {"pci_bus_id": f"00000000:{0x10 + index:02X}:00.0"}) for index in range(len(gpus))],
        devices,
        ports,
    )


def accused(*described, **how):
    return [str(place) for fault in misplaced_adapters(*machine(*described, **how)) for place in fault.subjects]


def test_an_adapter_of_another_switch_or_socket_is_found():
    assert accused(BY_TWO, (0, 1, 1, 1, 2, 2, 3, 3)) == ["rail0", "rail1"]
    assert accused(BY_TWO, (0, 1, 1, 1, 2, 2, 3, 3, 4, 4)) == ["rail0", "rail1"]  # beside two for storage
    assert accused(ON_TWO_SOCKETS, (0, 0, 0, 0, 0, 1, 1, 1), switches=False) == ["rail4", "rail5", "rail6", "rail7"]
    (fault,) = misplaced_adapters(*machine(ON_TWO_SOCKETS, (0, 0, 0, 0, 0, 1, 1, 1), switches=False))
    assert fault.what == "NUMA node 1 has 3 adapters in use for 4 GPUs, and NUMA node 0 has more than GPUs"


@pytest.mark.parametrize(
    ("gpus", "adapters", "how"),
    [
        (BY_TWO, BY_TWO, {}),
        (ON_TWO_SOCKETS, ON_TWO_SOCKETS, {"switches": False}),
        (ON_TWO_SOCKETS, (*ON_TWO_SOCKETS, 0), {"switches": False}),  # one more at the same rate, for storage
        (BY_TWO, (*BY_TWO, 1), {"slow": [8]}),
        (ON_TWO_SOCKETS, (0, 0, 0, 0, 0, 0, 1, 1), {"switches": False}),  # built so
        (BY_TWO, (0, 1, 2, 3), {}),  # one for two GPUs
        ((0, 0, 1, 1), (0, 0, 0, 1), {"switches": False}),  # two for storage
        (BY_TWO, (0, 0, 1, 1, 2, 2, 3, 3, 3, 3), {"cards": (0, 1, 2, 3, 4, 5, 6, 7, 8, 8)}),  # a card with two ports
    ],
)
def test_what_was_built_so_is_none(gpus, adapters, how):
    assert accused(gpus, adapters, **how) == []

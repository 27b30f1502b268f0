"""Network ports as /sys describes them, in a folder in its place."""

import os

import pytest

from pytest_gpufleet.machine import network_ports
from pytest_gpufleet.model.machine import active

COUNTERS = {
    "link_downed": "1\n", "link_error_recovery": "0\n", "symbol_error": "17\n", "port_rcv_errors": "14\n",
    "local_link_integrity_errors": "0\n", "excessive_buffer_overrun_errors": "15\n", "port_xmit_discards": "99\n",
}  # fmt: skip


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    """A ConnectX-7 in a slot of eight lanes, with one port."""
    slot = tmp_path / "0000:15:01.0"
    device, port = slot / "0000:1b:00.0", tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    device.mkdir(parents=True)
    for folder in (port / "counters", port / "hw_counters", device / "net" / "ib0"):
        folder.mkdir(parents=True)
    (tmp_path / "infiniband" / "mlx5_0" / "device").symlink_to(device)
    files = {
        port: {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"},
        port / "counters": COUNTERS,
        port / "hw_counters": {"out_of_sequence": "3", "lifespan": "10"},
        port.parents[1]: {"hca_type": "MT4129", "fw_ver": "28.39.1002"},
        device / "net" / "ib0": {"carrier_changes": "2"},
        device: {"current_link_width": "8", "max_link_width": "16"},
        slot: {"max_link_width": "8", "max_link_speed": "32.0 GT/s PCIe"},
    }
    files[device] |= {"current_link_speed": "32.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe"}
    for folder, contents in files.items():
        for name, text in contents.items():
            (folder / name).write_text(text)
    monkeypatch.setattr(network_ports, "ADAPTERS", tmp_path / "infiniband")
    return port


def test_what_is_read_of_a_port(adapter):
    (port,) = network_ports.read()
    assert (port["port"], port["adapter"], port["function"]) == ("mlx5_0/1", "MT4129", "0")
    assert port["pcie"] == {
        "lanes": 8, "lanes_able": 16, "lanes_of_port": 8, "speed": 32, "speed_able": 32, "speed_of_port": 32,
    }  # fmt: skip
    assert port["errors"] == {name: int(text) for name, text in COUNTERS.items() if name != "port_xmit_discards"}
    assert port["traffic"] == {"port_xmit_discards": 99, "out_of_sequence": 3}
    assert (port["firmware"], port["carrier_changes"]) == ("28.39.1002", 2)


def test_a_virtual_adapter_tells_neither_link_nor_errors(adapter):
    device = (adapter.parents[1] / "device").resolve()
    (device / "current_link_width").write_text("255")
    (device / "current_link_speed").write_text("Unknown")
    for counter in (adapter / "counters").iterdir():
        counter.unlink()
    (port,) = network_ports.read()
    assert (port["pcie"]["lanes"], port["pcie"]["speed"], port["errors"]) == (0, 0, {})


def test_a_counter_that_cannot_be_read_is_no_zero(adapter):
    """None where reading fails, left out where the adapter does not count."""
    (adapter / "counters" / "symbol_error").write_text("nonsense")
    (adapter / "counters" / "link_downed").unlink()
    os.mkdir(adapter / "counters" / "link_downed")
    (port,) = network_ports.read()
    assert port["errors"]["symbol_error"] is None
    assert port["errors"]["link_downed"] is None
    assert port["errors"]["port_rcv_errors"] == 14


def test_a_port_whose_state_cannot_be_read_is_not_active(adapter):
    """Reading it fails where the driver cannot ask the port (drivers/infiniband/core/sysfs.c, state_show)."""
    (adapter / "state").unlink()
    os.mkdir(adapter / "state")
    (port,) = network_ports.read()
    assert port["state"] == "unknown"
    assert active([port]) == []


SWITCH = "pci0000:15/0000:15:01.0/0000:16:00.0"  # a root port, and the switch behind it


@pytest.mark.parametrize(
    ("places", "near"),
    [
        ({"mlx5_0": f"{SWITCH}/0000:17:00.0/0000:18:00.0", "mlx5_1": "pci0000:37/0000:38:00.0"}, ["mlx5_0"]),
        ({"mlx5_0": f"{SWITCH}/0000:17:00.0", "mlx5_1": "pci0000:15/0000:15:02.0"}, ["mlx5_0"]),
        ({"mlx5_0": f"{SWITCH}/0000:17:00.0", "mlx5_1": f"{SWITCH}/0000:17:00.1", "mlx5_2": "pci0000:37"},
         ["mlx5_0", "mlx5_1"]),
        ({"mlx5_0": "pci0000:15/0000:18:00.0"}, ["mlx5_0"]),
        ({"mlx5_0": "pci0000:15/0000:18:00.0", "mlx5_1": "pci0000:15/0000:19:00.0"}, []),  # in a virtual machine
        ({"mlx5_0": "pci0000:37/0000:38:00.0"}, []),
        ({}, []),
    ],
)  # fmt: skip
def test_the_adapter_next_to_a_device_shares_most_of_its_way(tmp_path, monkeypatch, places, near):
    for name, place in places.items():
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / "infiniband" / name).mkdir(parents=True)
        (tmp_path / "infiniband" / name / "device").symlink_to(tmp_path / place)
    monkeypatch.setattr(network_ports, "ADAPTERS", tmp_path / "infiniband")
    assert network_ports.nearest(tmp_path / SWITCH / "0000:19:00.0") == near

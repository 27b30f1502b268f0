"""PCIe devices, and the ports above them, as the kernel shows them."""

import pytest

from pytest_gpufleet.machine import pci_devices, rdma
from pytest_gpufleet.machine.tools import Unreadable
from tests.machine.trees import laid_out

BOARD, VIRTUAL = "hgx-h200-switches", "hgx-h200-virtual"
PORT = "== sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0"


def read(tmp_path, name=BOARD, change=str):
    return pci_devices.read(laid_out(name, tmp_path, change).root)


def test_a_gpu_and_the_ports_above_it(tmp_path):
    devices = read(tmp_path)

    gpu = devices["0000:18:00.0"]
    assert gpu == {
        "kind": "gpu", "name": "0000:18:00.0", "above": "0000:17:00.0", "numa_node": 0, "iommu": "identity",
        "lanes": 16, "lanes_able": 16, "speed": 32, "speed_able": 32,
        "errors": {"corrected": {}, "nonfatal": {}, "fatal": {}},
    }  # fmt: skip
    assert devices["0000:17:00.0"]["above"] == "0000:16:00.0"
    assert devices["0000:16:00.0"]["above"] == "0000:15:01.0"
    assert devices["0000:15:01.0"]["above"] is None
    assert list(devices)[:4] == ["0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:18:00.0"]


def test_an_adapter_is_called_as_infiniband_calls_it(tmp_path):
    devices = read(tmp_path)

    assert {(each["kind"], each["name"]) for each in devices.values() if each["kind"] not in ("gpu", "port")} == {
        ("adapter", f"mlx5_{number}") for number in range(4)
    }


def test_a_virtual_machine_shows_root_ports_alone(tmp_path):
    devices = read(tmp_path, VIRTUAL)

    assert {devices[each["above"]]["above"] for each in devices.values() if each["kind"] != "port"} == {None}
    assert {each["errors"] for each in devices.values()} == {None}
    assert devices["0000:05:00.0"]["iommu"] is None


@pytest.mark.parametrize("name", ["BadTLP", "Bad TLP"])  # today, and in Linux 4.19
def test_errors_are_counted_by_name(tmp_path, name):
    counted = f"{PORT}/aer_dev_correctable\nRxErr 0\n{name} 812\nTOTAL_ERR_COR 640\n"
    devices = read(tmp_path, change=lambda text: text.replace(f"{PORT}/aer_dev_correctable\n", f"{counted}== rest\n"))

    assert devices["0000:17:00.0"]["errors"]["corrected"] == {name: 812}


def test_errors_that_nobody_collects_are_not_told_to_be_none(tmp_path):
    """The firmware keeps them: no service of the root port is there, but of those that it handed over."""

    def kept(text):
        return text.replace("drivers/aer/0000:15:01.0:pcie002", "drivers/pciehp/0000:15:01.0:pcie004")

    def handed_over(text):
        return kept(text).replace("RxErr 0", "RxErr 3", 1)

    assert read(tmp_path / "kept", change=kept)["0000:18:00.0"]["errors"] is None
    devices = read(tmp_path / "handed over", change=handed_over)
    assert [each["errors"]["corrected"] for each in devices.values() if each["errors"]] == [{"RxErr": 3}]


def test_a_link_that_is_not_there_has_no_lanes(tmp_path):
    def down(text):
        text = text.replace(f"{PORT}/current_link_width\n16", f"{PORT}/current_link_width\n255")
        return text.replace(f"{PORT}/current_link_speed\n32.0 GT/s PCIe", f"{PORT}/current_link_speed\nUnknown")

    port = read(tmp_path, change=down)["0000:17:00.0"]
    assert (port["lanes"], port["speed"]) == (None, None)


def test_a_machine_without_such_devices(tmp_path):
    assert pci_devices.read(tmp_path) == {}
    assert pci_devices.acs(tmp_path) == {}


def config_space(control):
    """4096 bytes as linux/pci_regs.h has them: error reporting at 0x100, and ACS behind it where there is a control."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 2 << 16 | (0x150 << 20 if control is not None else 0)).to_bytes(4, "little")
    if control is not None:
        space[0x150:0x154] = (0x000D | 1 << 16).to_bytes(4, "little")
        space[0x156:0x158] = control.to_bytes(2, "little")
    return bytes(space)


def with_config(root, control, length=4096):
    ports = {path.parent for path in (root / "sys/devices").rglob("max_link_width")}
    for port in ports:
        (port / "config").write_bytes(config_space(control)[:length])


# As `lspci -vvv` told them of NVIDIA/nccl, issue 523: SrcValid+ ReqRedir+ CmpltRedir+ UpstreamFwd+, and SrcValid+ alone
@pytest.mark.parametrize("control", [0x1D, 0x01, 0x00, None])
def test_the_control_register_of_access_control_services(tmp_path, control):
    root = laid_out(BOARD, tmp_path).root
    with_config(root, control)

    told = pci_devices.acs(root)
    assert set(told.values()) == {control}
    assert set(told) == {address for address, each in pci_devices.read(root).items() if each["kind"] == "port"}


def test_only_root_may_read_it(tmp_path):
    root = laid_out(BOARD, tmp_path).root
    with_config(root, 0x1D, 64)

    with pytest.raises(Unreadable, match="run as root"):
        pci_devices.acs(root)


def test_a_config_space_without_extended_capabilities(tmp_path):
    root = laid_out(BOARD, tmp_path).root
    with_config(root, 0x1D, 256)

    assert set(pci_devices.acs(root).values()) == {None}


def test_a_list_of_capabilities_that_leads_back_ends(tmp_path):
    root = laid_out(BOARD, tmp_path).root
    with_config(root, None)
    config = next((root / "sys/devices").rglob("config"))
    config.write_bytes(config.read_bytes()[:0x100] + (0x0001 | 2 << 16 | 0x100 << 20).to_bytes(4, "little") + bytes(64))

    assert set(pci_devices.acs(root).values()) == {None}


CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024"


def test_the_ways_to_the_memory_of_gpus(tmp_path):
    assert rdma.read_gpudirect(laid_out(BOARD, tmp_path).root) == {
        "peer_module": "nvidia_peermem",
        "open_modules": True,
    }


def test_a_closed_driver_without_the_module(tmp_path):
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(CLOSED)
    assert rdma.read_gpudirect(tmp_path) == {"peer_module": None, "open_modules": False}


def test_without_a_driver_nobody_can_say_which(tmp_path):
    assert rdma.read_gpudirect(tmp_path) == {"peer_module": None, "open_modules": None}

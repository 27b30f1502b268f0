"""PCIe devices, the ports above them with their ACS, and the ways to the memory of GPUs, as the kernel shows them."""

import msgspec
import pytest

from pytest_gpufleet.machine import gpudirect, pcie
from pytest_gpufleet.machine.gpudirect import GpuDirect, misplaced_adapters
from pytest_gpufleet.machine.network_ports import Port
from pytest_gpufleet.machine.pcie import Device
from pytest_gpufleet.machine.tools import Unreadable
from pytest_gpufleet.model.place import Gpu
from tests.machine.trees import laid_out, replaced, written

BOARD, VIRTUAL = "hgx-h200-switches", "hgx-h200-virtual"
PORT = "== sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024"


def read(tmp_path, name=BOARD, change=str):
    return pcie.read(laid_out(name, tmp_path, change).root)


def test_a_gpu_the_ports_above_it_and_an_adapter_by_its_name_of_infiniband(tmp_path):
    devices = read(tmp_path)
    assert devices["0000:18:00.0"] == Device(
        kind="gpu", name="0000:18:00.0", above="0000:17:00.0", numa_node=0, iommu="identity",
        lanes=16, lanes_able=16, speed=32, speed_able=32, errors={"corrected": {}, "nonfatal": {}, "fatal": {}},
    )  # fmt: skip
    way = ["0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:18:00.0"]
    assert list(devices)[:4] == way == [*pcie.ports_above(devices, way[-1]), way[-1]]
    others = {(each.kind, each.name) for each in devices.values() if each.kind not in ("gpu", "port")}
    assert others == {("adapter", f"mlx5_{number}") for number in range(4)}
    assert pcie.PCI_DEVICES.of({"pci_devices": msgspec.to_builtins(devices)}) == devices


def test_a_virtual_machine_shows_root_ports_alone_and_another_machine_nothing(tmp_path):
    devices = read(tmp_path / "virtual", VIRTUAL)
    assert {devices[each.above].above for each in devices.values() if each.kind != "port"} == {None}
    assert [each.errors for each in devices.values() if each.errors] == []
    assert devices["0000:05:00.0"].iommu is None
    assert pcie.read(tmp_path / "other") == gpudirect.read_acs(tmp_path / "other") == {}


@pytest.mark.parametrize("name", ["BadTLP", "Bad TLP"])  # today, and in Linux 4.19
def test_errors_are_counted_by_name(tmp_path, name):
    counted = f"{PORT}/aer_dev_correctable\nRxErr 0\n{name} 812\nTOTAL_ERR_COR 640\n"
    devices = read(tmp_path, change=lambda text: text.replace(f"{PORT}/aer_dev_correctable\n", f"{counted}== rest\n"))
    assert devices["0000:17:00.0"].errors["corrected"] == {name: 812}


def test_errors_that_nobody_collects_are_unknown_and_a_link_that_is_not_there_has_no_lanes(tmp_path):
    """The firmware keeps them: no service of the root port is there, but of those that it handed over."""
    kept = replaced(("drivers/aer/0000:15:01.0:pcie002", "drivers/pciehp/0000:15:01.0:pcie004"))
    assert read(tmp_path / "kept", change=kept)["0000:18:00.0"].errors is None
    devices = read(tmp_path / "handed over", change=lambda text: kept(text).replace("RxErr 0", "RxErr 3", 1))
    assert [each.errors["corrected"] for each in devices.values() if each.errors] == [{"RxErr": 3}]
    width, speed = f"{PORT}/current_link_width\n", f"{PORT}/current_link_speed\n"
    down = replaced((f"{width}16", f"{width}255"), (f"{speed}32.0 GT/s PCIe", f"{speed}Unknown"))
    port = read(tmp_path, change=down)["0000:17:00.0"]
    assert (port.lanes, port.speed) == (None, None)


def config_space(control, length=4096):
    """As linux/pci_regs.h has it: error reporting at 0x100, and ACS behind it where there is a control."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 2 << 16 | (0x150 << 20 if control is not None else 0)).to_bytes(4, "little")
    if control is not None:
        space[0x150:0x154] = (0x000D | 1 << 16).to_bytes(4, "little")
        space[0x156:0x158] = control.to_bytes(2, "little")
    return bytes(space)[:length]


def with_config(tmp_path, config):
    root = laid_out(BOARD, tmp_path).root
    for folder in (root / "sys/devices").rglob("0000:*"):
        (folder / "config").write_bytes(config)
    return root


LEADS_BACK = config_space(None)[:0x100] + (0x0001 | 2 << 16 | 0x100 << 20).to_bytes(4, "little") + bytes(64)


# As `lspci -vvv` showed them in NVIDIA/nccl, issue 523: SrcValid+ ReqRedir+ CmpltRedir+ UpstreamFwd+, and SrcValid+
# alone; also a config space without extended capabilities, and a list of these that leads back.
@pytest.mark.parametrize(
    ("config", "control"),
    [(config_space(control), control) for control in (0x1D, 0x01, 0x00, None)]
    + [(config_space(0x1D, 256), None), (LEADS_BACK, None)],
)
def test_the_control_register_of_access_control_services(tmp_path, config, control):
    root = with_config(tmp_path, config)
    ports = sorted(address for address, each in pcie.read(root).items() if each.kind == "port")
    assert gpudirect.read_acs(root) == dict.fromkeys(ports, control)


@pytest.mark.parametrize(("contained", "remedy"), [(False, "as root"), (True, "--privileged")])
def test_only_root_may_read_it_and_not_that_of_a_container(tmp_path, contained, remedy):
    root = with_config(tmp_path, config_space(0x1D, 64))
    written(root, {"proc/1/comm": "python3" if contained else "systemd"})
    with pytest.raises(Unreadable) as why:
        gpudirect.read_acs(root)
    assert remedy in why.value.remedy


def test_the_ways_to_the_memory_of_gpus(tmp_path):
    """Of a closed driver without the module, and of no driver at all."""
    closed = written(tmp_path / "closed", {"proc/driver/nvidia/version": CLOSED})
    found = [gpudirect.read(root) for root in (laid_out(BOARD, tmp_path / "a").root, tmp_path / "none", closed)]
    assert found == [GpuDirect("nvidia_peermem", True), GpuDirect(), GpuDirect(None, False)]


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
    return [Gpu(i, {"pci_bus_id": f"00000000:{0x10 + i:02X}:00.0"}) for i in range(len(gpus))], devices, ports


def accused(*described, **how):
    return [str(place) for fault in misplaced_adapters(*machine(*described, **how)) for place in fault.subjects]


def test_an_adapter_of_another_switch_or_socket_is_found():
    assert accused(BY_TWO, (0, 1, 1, 1, 2, 2, 3, 3, 4, 4)) == ["rail0", "rail1"]  # beside two for storage
    assert accused(BY_TWO, (0, 1, 1, 1, 2, 2, 3, 3, 0), slow=[8]) == ["rail0", "rail1"]  # and one in its place
    (fault,) = misplaced_adapters(*machine(ON_TWO_SOCKETS, (0, 0, 0, 0, 0, 1, 1, 1), switches=False))
    assert fault.what == "NUMA node 1 has 3 adapters in use for 4 GPUs, and NUMA node 0 has more than GPUs"


@pytest.mark.parametrize(("gpus", "adapters", "how"), [
    (BY_TWO, BY_TWO, {}),
    (ON_TWO_SOCKETS, ON_TWO_SOCKETS, {"switches": False}),
    (ON_TWO_SOCKETS, (*ON_TWO_SOCKETS, 0), {"switches": False}),  # one more at the same rate, for storage
    (BY_TWO, (*BY_TWO, 1), {"slow": [8]}),
    (ON_TWO_SOCKETS, (0, 0, 0, 0, 0, 0, 1, 1), {"switches": False}),  # built so
    (BY_TWO, (0, 1, 2, 3), {}),  # one for two GPUs
    ((0, 0, 1, 1), (0, 0, 0, 1), {"switches": False}),  # two for storage
    (BY_TWO, (0, 0, 1, 1, 2, 2, 3, 3, 3, 3), {"cards": (0, 1, 2, 3, 4, 5, 6, 7, 8, 8)}),  # a card with two ports
])  # fmt: skip
def test_what_was_built_so_is_none(gpus, adapters, how):
    assert accused(gpus, adapters, **how) == []

"""The checks of PCIe on a recorded server with switches, with one thing wrong, and on its virtual machine."""

import re

import pytest

from pytest_gpufleet.machine import gpudirect, pcie
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.place import Missing
from tests.acceptance.checks import outcomes
from tests.acceptance.test_faulty_machines import port
from tests.machine.test_pcie import BOARD, VIRTUAL, config_space
from tests.machine.trees import laid_out, replaced
from tests.machines import recorded, set_gpu, set_gpus, set_host, set_machine, set_port, then

FULL, CLEAN = "test_links_to_the_root_are_full", "test_pcie_paths_stayed_clean"
RECORDED = "test_no_uncorrected_pcie_error_is_recorded"
NEAR, GPUDIRECT, SWITCHES, P2P = (
    "test_adapters_are_next_to_gpus", "test_gpudirect_rdma_can_work", "test_switches_let_adapters_reach_gpus",
    "test_switches_let_gpus_reach_each_other",
)  # fmt: skip
CHECKS = (FULL, RECORDED, CLEAN, NEAR, GPUDIRECT, SWITCHES, P2P)

ROOT = "sys/devices/pci0000:15/0000:15:01.0"
UP = f"{ROOT}/0000:16:00.0"
TO_GPU, TO_ADAPTER = f"{UP}/0000:17:00.0", f"{UP}/0000:17:01.0"
GPU = f"{TO_GPU}/0000:18:00.0"
SPEED, MAX_SPEED = f"{UP}/current_link_speed", f"{UP}/max_link_speed"
WIDTH, MAX_WIDTH = f"{UP}/current_link_width", f"{UP}/max_link_width"


def machine(tmp_path, *changes, name=BOARD, change=str, control=0):
    """The recorded server after a change of its tree, with this control register at all its ports, and after others."""
    root = laid_out(name, tmp_path, change).root
    for folder in (root / "sys/devices").rglob("0000:*"):
        (folder / "config").write_bytes(config_space(control(folder.name) if callable(control) else control))
    buses = {BOARD: ["18", "2a", "3a", "5d"], VIRTUAL: ["05", "06"]}[name]
    return recorded(
        set_machine(count=len(buses)),
        *(set_gpu(index, pci_bus_id=f"00000000:{bus}:00.0") for index, bus in enumerate(buses)),
        set_host(
            pci_devices=codec.plain(pcie.read(root)),
            pcie_acs=gpudirect.read_acs(root),
            gpudirect=codec.plain(gpudirect.read(root)),
            kernel="6.8.0-54-generic",
            network_ports=[port(number) for number in range(len(buses))],
        ),
        *changes,
    )


def changed(tmp_path, how):
    return machine(tmp_path, **how) if isinstance(how, dict) else machine(tmp_path, how)


def checked(here, now=None):
    return {name: each for name, each in outcomes(here, now=now).items() if name in CHECKS}


def failed(outcomes):
    return {
        name: [(fault.name, [str(subject) for subject in fault.subjects]) for fault in each.faults]
        for name, each in outcomes.items()
        if each.what == "failed"
    }


def set_to(old, new, *paths):
    return replaced(*((f"== {path}\n{old}", f"== {path}\n{new}") for path in paths))


def counted(path, kind, name, count):
    def change(text):
        head, file, rest = text.partition(f"== {path}/aer_dev_{kind}\n")
        assert file
        return head + file + rest.replace(f"{name} 0\n", f"{name} {count}\n", 1)

    return change


def ends(outcome):
    return {name: each.what for name, each in outcome.items()}


def test_a_server_as_it_was_recorded_and_a_virtual_machine_that_shows_the_modules_alone(tmp_path):
    assert ends(checked(machine(tmp_path))) == {**dict.fromkeys(CHECKS, "passed"), P2P: "not applicable"}
    virtual = then(OPEN, set_gpus(virtualization=1))
    there = ends(checked(machine(tmp_path / "with", virtual, name=VIRTUAL)))
    assert there == {**dict.fromkeys(CHECKS, "not applicable"), GPUDIRECT: "passed"}
    without = machine(tmp_path / "without", virtual, set_host(network_ports=[]), name=VIRTUAL)
    assert set(ends(checked(without)).values()) == {"not applicable"}


CLOSED, OPEN = (set_host(gpudirect={"peer_module": None, "open_modules": each}) for each in (False, True))


@pytest.mark.parametrize(("changes", "checks"), [
    ({"change": lambda text: re.sub(r"(/(?:current|max)_link_width)\n16\n", r"\1\n255\n", text)}, {FULL}),
    # the firmware keeps them
    ({"change": replaced(("pci_express/drivers/aer/", "pci_express/drivers/other/"))}, {RECORDED, CLEAN}),
    (set_host(pcie_acs=Missing("only root may read it", remedy="run as root")), {SWITCHES}),
    (set_host(network_ports=Missing("no RDMA driver", remedy="modprobe mlx5_ib")), {NEAR, GPUDIRECT, SWITCHES}),
])  # fmt: skip
def test_what_cannot_be_read_of_a_real_machine_is_not_judged(tmp_path, changes, checks):
    outcome = checked(changed(tmp_path, changes))
    assert {name for name, each in outcome.items() if each.what == "skipped"} == checks
    assert failed(outcome) == {}


OLD = set_host(kernel="5.4.0-200-generic")
RAILS = ["rail0", "rail1", "rail2", "rail3"]
TRANSLATES = [("iommu_not_passthrough", [rail]) for rail in RAILS]


# The adapter of GPU 3 is under a switch of the other socket.
THERE = "pci0000:04/0000:04:01.0/0000:05:00.0"
ELSEWHERE = replaced(
    ("pci0000:59/0000:59:01.0/0000:5a:00.0/0000:5b:00.0/0000:5c:00.0", THERE),
    (f"== sys/devices/{THERE}/numa_node\n1", f"== sys/devices/{THERE}/numa_node\n0"),
)
# Of each six groups the last are GPU and adapter.
GROUPS_OF_OTHERS = [f"sys/kernel/iommu_groups/{number}/type" for number in range(24) if number % 6 < 4]


def with_drives(*speeds):
    """Drives of generation 5 below ports of their own, which run at these speeds."""

    def change(text):
        for number, speed in enumerate(speeds):
            above = f"sys/devices/pci0000:64/0000:64:0{number + 1}.0"
            drive = f"{above}/0000:{65 + number}:00.0"
            text += f"== sys/class/nvme/nvme{number}/device -> ../../../{drive[4:]}\n"
            for path in (above, drive):
                text += f"== {path}/current_link_width\n4\n== {path}/max_link_width\n4\n"
                text += f"== {path}/current_link_speed\n{speed} GT/s PCIe\n== {path}/max_link_speed\n32.0 GT/s PCIe\n"
        return text

    return change


def one_switch(control=0x1D, bus="17", link="PIX"):
    """GPU 1 below the switch of GPU 0, no NVLinks, and no network."""

    def change(machine):
        devices = machine.host["pci_devices"]
        devices["0000:17:02.0"] = {**devices["0000:17:00.0"], "name": "0000:17:02.0"}
        devices["0000:2a:00.0"]["above"] = "0000:17:02.0"
        machine.links = [["X" if a == b else link if a + b == 1 else "SYS" for a in range(4)] for b in range(4)]
        controls = {port: control if port[5:7] == bus else 0 for port in devices}
        machine.host.update(network_ports=[], pcie_acs=controls)

    return change


# What is wrong, with the check that fails, its faults by code and places, and words of what is said.
FAULTY = {
    "a riser costs lanes": (
        {"change": set_to("16", "8", WIDTH)}, FULL, [("pcie_path_reduced", ["gpu0"])],
        "from 0000:15:01.0 to 0000:16:00.0 (it leads to GPU 0, mlx5_0): it runs at 32 GT/s on 8 lanes, and can 32 GT/s",
    ),
    "a riser costs speed": (
        {"change": set_to("32.0", "16.0", SPEED)}, FULL, [("pcie_path_reduced", ["gpu0"])],
        "it runs at 16 GT/s on 16 lanes, and can 32 GT/s on 16",
    ),
    "a riser above two GPUs blames neither": (
        then(one_switch(control=0), lambda machine: machine.host["pci_devices"]["0000:16:00.0"].update(lanes=8)),
        FULL, [("pcie_path_reduced", ["node"])], "GPU 1",
    ),
    # As switches counted it above an H20: Data Link Protocol Error, fatal (NVIDIA/open-gpu-kernel-modules, issue 937).
    "an error since boot that could not be corrected": (
        {"change": counted(TO_GPU, "fatal", "DLP", 1)}, RECORDED, [("pcie_uncorrected", ["gpu0"])],
        "link from 0000:17:00.0 to 0000:18:00.0",
    ),
    "an answer that did not come": (
        {"change": counted(TO_GPU, "nonfatal", "CmpltTO", 2)}, RECORDED, [("pcie_uncorrected", ["gpu0"])], "CmpltTO",
    ),
    "an answer that the root waits for, lost below the switch: only the deepest link is named": (
        {"change": lambda text: counted(ROOT, "nonfatal", "CmpltTO", 2)(counted(TO_GPU, "fatal", "SDES", 1)(text))},
        RECORDED, [("pcie_uncorrected", ["gpu0"])],
        "link from 0000:17:00.0 to 0000:18:00.0",
    ),
    "a drive of three that is slower": (
        {"change": with_drives(32.0, 16.0, 32.0)}, FULL, [("pcie_path_reduced", ["node"])],
        "(it leads to nvme1): it runs at 16 GT/s",
    ),
    "an error of the adapter below blames no GPU": (
        {"change": counted(TO_ADAPTER, "nonfatal", "TLP", 1)}, RECORDED, [("pcie_uncorrected", ["node"])],
        "0000:19:00.0 (it leads to mlx5_0)",
    ),
    "an IOMMU translates": ({"change": replaced(("\nidentity\n", "\nDMA\n"))}, GPUDIRECT, TRANSLATES, ""),
    "an IOMMU translates later": ({"change": replaced(("\nidentity\n", "\nDMA-FQ\n"))}, GPUDIRECT, TRANSLATES, ""),
    "no way to the memory of GPUs": (CLOSED, GPUDIRECT, [("gpudirect_module_missing", RAILS)], ""),
    "a way that this kernel has not": (then(OPEN, OLD), GPUDIRECT, [("gpudirect_module_missing", RAILS)], ""),
    "ports of a switch redirect": (
        {"control": lambda address: 0x1D if address.startswith("0000:17") else 0},
        SWITCHES, [("acs_enabled", ["rail0"])],
        "0000:17:00.0 (0x001d) and 0000:17:01.0 (0x001d)",
    ),
    "ports of a switch redirect what its GPUs send each other": (
        one_switch(), P2P, [("acs_between_gpus", ["gpu0"]), ("acs_between_gpus", ["gpu1"])],
        "by the ACS control of 0000:17:02.0 (0x001d) what it sends to GPU 0 goes over the root",
    ),
    "an adapter is on the other socket": (
        {"change": ELSEWHERE}, NEAR, [("nic_not_local", ["rail3"])],
        "(NUMA node 1); under no GPU's switch are: mlx5_3 (NUMA node 0)",
    ),
    "an adapter whose port is down is not in use": (
        set_port(3, state="1: DOWN"), NEAR, [("nic_not_local", ["rail3"])], "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTY)
def test_one_thing_is_wrong(tmp_path, what):
    changes, check, faults, words = FAULTY[what]
    outcome = checked(changed(tmp_path, changes))
    assert failed(outcome) == {check: faults}
    assert words in outcome[check].message


HARMLESS = {
    "probing for devices at boot": {"change": counted(TO_GPU, "nonfatal", "UnsupReq", 2)},
    "the link of a GPU rests": {"change": set_to("32.0", "2.5", f"{GPU}/current_link_speed")},
    "test_pcie_width_is_full says that": {"change": set_to("16", "8", f"{GPU}/current_link_width")},
    "the lanes of one port are not shown": {"change": set_to("16", "255", WIDTH)},
    "a switch that has no more lanes": {"change": set_to("16", "8", MAX_WIDTH, WIDTH)},
    "links inside a switch": {
        "change": lambda text: set_to("32.0", "5.0", MAX_SPEED)(set_to("32.0", "2.5", SPEED)(text))
    },
    "drives on a backplane of generation 4": {"change": with_drives(16.0, 16.0, 16.0)},
    "a drive that is alone": {"change": with_drives(16.0)},
    "open modules": OPEN,
    "an old kernel": OLD,
    "an IOMMU that is off": {"change": lambda text: text.replace("/iommu_group -> ", "/no_group -> ")},
    "an IOMMU that translates before others alone": {"change": set_to("identity", "DMA-FQ", *GROUPS_OF_OTHERS)},
    "SrcValid+ alone redirects nothing (NVIDIA/nccl, issue 606)": {"control": 0x01},
    "DirectTrans+: on a host of virtual machines, with ATS": {"control": 0x5D},
    "ports that do not tell": {"control": None},
    "roots that redirect": {
        "control": lambda address: 0x1D if address[5:] in ("15:01.0", "26:01.0", "37:01.0", "59:01.0") else 0
    },
    "GPUs of one switch, and above it a root that redirects": one_switch(bus="15"),
    "GPUs of one switch whose driver lets none reach another": then(
        one_switch(), set_gpus(name="NVIDIA GeForce RTX 4090", p2p={"read": [1] * 4})
    ),
    "adapters beside boards that let none reach their memory": then(CLOSED, set_gpus(name="NVIDIA GeForce RTX 4090")),
    "GPUs of one switch with NVLinks": one_switch(link="NV18"),
    "few adapters, and an IOMMU that translates for the GPUs without one": then(
        set_host(network_ports=[port(0), port(1)]),
        lambda machine: [machine.host["pci_devices"][f"0000:{bus}:00.0"].update(iommu="DMA") for bus in ("3a", "5d")],
    ),
}


@pytest.mark.parametrize("what", HARMLESS)
def test_nothing_is_wrong(tmp_path, what):
    assert failed(checked(changed(tmp_path, HARMLESS[what]))) == {}


# ---------------------------------------------------------------- errors
# One wrong bit in 10^12 on 16 lanes of 32 GT/s are 30.7 a minute; the recorded machine was read a moment ago.
@pytest.mark.parametrize(("kind", "name", "at_boot", "now", "code"), [
    ("correctable", "BadTLP", 0, 31, "pcie_corrected"),
    ("correctable", "BadTLP", 0, 30, None),
    ("correctable", "BadTLP", 9000, 9000, None),
    ("correctable", "NonFatalErr", 0, 4000, None),  # a request that the device does not know
    ("fatal", "DLP", 0, 1, "pcie_uncorrected"),
    ("nonfatal", "UnsupReq", 2, 3, "pcie_uncorrected"),  # at boot it comes of probing for devices
])  # fmt: skip
def test_errors_while_the_run_lasted(tmp_path, kind, name, at_boot, now, code):
    machines = [machine(tmp_path / str(place), change=counted(TO_GPU, kind, name, count))
                for place, count in enumerate((at_boot, now))]  # fmt: skip
    assert failed(checked(*machines)) == ({CLEAN: [(code, ["gpu0"])]} if code else {})


def test_a_device_that_is_gone_at_the_end(tmp_path):
    before = machine(tmp_path / "before")
    now = machine(tmp_path / "now", change=lambda text: text.replace("infiniband/mlx5_2/device", "nobody/a/device"))
    del now.machine.host["pci_devices"]["0000:3b:00.0"]
    outcome = checked(before, now)
    assert failed(outcome)[CLEAN] == [("pcie_uncorrected", ["node"])]
    assert "0000:3b:00.0 is gone" in outcome[CLEAN].message


def test_an_interface_that_a_container_took_is_not_gone(tmp_path):
    """Also where nothing else was below its port."""
    before, now = machine(tmp_path / "before"), machine(tmp_path / "now")
    for address in "0000:39:01.0", "0000:3b:00.0":
        del now.machine.host["pci_devices"][address]
    before.machine.host["pci_devices"]["0000:3b:00.0"]["kind"] = "network"
    assert CLEAN not in failed(checked(before, now))


# ---------------------------------------------------------------- GPUDirect RDMA
def test_an_adapter_for_management_alone_asks_for_no_such_way(tmp_path):
    """Two functions of one card, or two slow cards, and no GPU next to them."""

    def one_card(here):
        devices = here.host["pci_devices"]
        devices["0000:0d:00.1"] = {**devices["0000:0d:00.0"], "name": "mlx5_1"}
        del devices["0000:0e:00.0"]

    slow = set_port(link_layer="Ethernet", rate="25 Gb/sec (1X EDR)")
    for folder, changes, end in (
        ("one", [one_card], "not applicable"),
        ("slow", [slow], "not applicable"),
        ("two", [], "failed"),
    ):
        here = machine(tmp_path / folder, CLOSED, *changes, name=VIRTUAL)
        assert checked(here)[GPUDIRECT].what == end

"""NCCL's log: files made from the format strings of its versions, as their first lines say; and what of it is a
fallback, on GPUs that are not here. Each has a healthy look-alike."""

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpufleet.machine.nccl_log import Beside, Choice, Way, contradictions, fallbacks, parse
from pytest_gpufleet.model.place import gpu
from tests.boards import BOARDS, H200

LOGS = Path(__file__).parent / "nccl_logs"
PORTS = Beside(ports={"mlx5_0/1": 10_000})
FOUR, TWO_NODES = [gpu(index) for index in range(4)], [gpu(0), gpu(0, 1)]


def log(name):
    return parse([(LOGS / f"{name}.log").read_text()])


@pytest.mark.parametrize(("name", "version", "kinds", "channels", "multicast", "nvls"), [
    ("2.18.1-p2p-nvls", "2.18.1", {("P2P/IPC", False)}, (24, 16, 32), True, True),
    ("2.18.1-shm", "2.18.1", {("SHM", False)}, (2, 0, 2), None, False),
    ("2.20.5-ib-gpudirect", "2.20.5", {("P2P/CUMEM", False), ("NET/IB", True)}, (8, 0, 8), None, False),
    ("2.21.5-shm", "2.21.5", {("SHM", False)}, (2, 0, 2), False, False),
    ("2.23.4-p2p-nvls", "2.23.4", {("P2P/CUMEM", False)}, (24, 16, 32), True, True),
    ("2.26.2-sockets", "2.26.2", {("NET/Socket", False)}, (2, 0, 2), None, False),
    ("2.26.2-plugins", "2.26.2", {("NET/IBext_v8", True), ("NET/AWS Libfabric", True)}, None, None, None),
    ("2.28.9-nvls-failed", "2.28.9", {("P2P/CUMEM", False)}, (24, 0, 32), True, False),
    ("2.28.9-p2p-nvls", "2.28.9", {("P2P/CUMEM", False)}, (24, 16, 32), True, True),
    ("2.30.7-shm-of-one-pair", "2.30.7", {("P2P/CUMEM", False), ("SHM", False)}, (24, 16, 32), True, True),
])  # fmt: skip
def test_each_version_is_read(name, version, kinds, channels, multicast, nvls):
    found = log(name)
    assert {(way.kind, way.gpudirect) for way in found.ways} == kinds
    assert (found.version, found.channels, found.multicast, found.nvls) == (version, channels, multicast, nvls)
    assert not found.unknown


def test_ways_algorithms_and_nvls():
    """Both ends and all channels are one way; algorithms have names also where the log has numbers; NVLS that is there
    and not chosen is not in use; and lines that nobody knows are left alone."""
    old, new = log("2.20.5-ib-gpudirect"), (LOGS / "2.28.9-p2p-nvls.log").read_text()
    assert old.ways[1:3] == (Way(1, 0, "P2P/CUMEM"), Way(1, 2, "NET/IB", True))
    assert old.choices[0] == Choice("", 262144, "TREE", "LL128")
    assert log("2.23.4-p2p-nvls").choices[1] == Choice("AllGather", 1 << 30, "PAT", "SIMPLE")
    assert [parse([new.replace("Algo NVLS", f"Algo {name}")]).nvls for name in ("RING", "NVLS_TREE")] == [False, True]
    found = parse(["h:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via TELEPORT/0\nh:1:1 [0] NCCL INFO Hello\n"])
    assert (found.ways, found.nvls, len(found.unknown)) == ((), None, 1)


def cards(link, p2p=0):
    """Four RTX A6000 without NVLinks, connected so."""
    found = BOARDS["NVIDIA RTX A6000"].machine(4, "pcie", p2p={way: [p2p] * 4 for way in ("read", "write")})
    return replace(found, links=tuple(tuple("X" if i == j else link for j in range(4)) for i in range(4)))


@pytest.mark.parametrize(("name", "topology", "beside", "places", "faults", "asked"), [
    ("2.28.9-p2p-nvls", H200.machine(4), Beside(), FOUR, {}, {}),
    ("2.28.9-nvls-failed", H200.machine(4), Beside(), FOUR, {"nvls_not_used": 1}, {}),
    ("2.28.9-nvls-failed", H200.machine(4), Beside({"NCCL_NVLS_ENABLE": "0"}), FOUR, {}, {"nvls_not_used": 1}),
    ("2.28.9-nvls-failed", H200.machine(4), Beside({"NCCL_CUMEM_ENABLE": "0"}), FOUR, {}, {"nvls_not_used": 1}),
    ("2.28.9-nvls-failed", H200.machine(4), Beside({"NCCL_ALGO": "allreduce:^nvls"}), FOUR, {}, {"nvls_not_used": 1}),
    ("2.28.9-nvls-failed", H200.machine(4, "nvlink"), Beside(), FOUR, {}, {}),
    ("2.30.7-shm-of-one-pair", H200.machine(4), Beside(), FOUR, {"p2p_not_used": 2}, {}),
    ("2.30.7-shm-of-one-pair", H200.machine(4), Beside({"NCCL_P2P_DISABLE": "1"}), FOUR, {}, {"p2p_not_used": 2}),
    ("2.30.7-shm-of-one-pair", H200.machine(4), Beside({"NCCL_P2P_DISABLE": "0"}), FOUR, {"p2p_not_used": 2}, {}),
    ("2.21.5-shm", cards("PIX"), Beside(), FOUR, {"p2p_not_used": 12}, {}),
    ("2.21.5-shm", cards("PIX", p2p=1), Beside(), FOUR, {}, {}),  # the driver does not let them, as GeForce's
    ("2.21.5-shm", cards("NODE"), Beside(), FOUR, {}, {}),  # too far apart for NCCL
    ("2.26.2-sockets", H200.machine(1), PORTS, TWO_NODES, {"sockets_used": 2}, {}),
    ("2.26.2-sockets", H200.machine(1), Beside(), TWO_NODES, {}, {}),
    ("2.26.2-sockets", H200.machine(1), Beside({"NCCL_IB_DISABLE": "1"}, ports=PORTS.ports), TWO_NODES, {},
     {"sockets_used": 2}),
    ("2.26.2-plugins", H200.machine(1), PORTS, TWO_NODES, {}, {}),
    ("2.20.5-ib-gpudirect", H200.machine(2), PORTS, [gpu(0), gpu(1), gpu(0, 1), gpu(1, 1)], {}, {}),
])  # fmt: skip
def test_a_fallback_is_a_fault_unless_somebody_asks_for_it(name, topology, beside, places, faults, asked):
    found = fallbacks(log(name), places, [beside] * len(places), topology)
    assert [{fault.name: len(fault.subjects) for fault in each} for each in found] == [faults, asked]


@pytest.mark.parametrize(("name", "topology", "beside", "count"), [
    ("2.28.9-p2p-nvls", H200.machine(4), Beside(nvlink=0), 4),
    ("2.28.9-p2p-nvls", H200.machine(4), Beside(nvlink=1 << 20), 0),
    ("2.28.9-p2p-nvls", H200.machine(4), Beside(), 0),  # nobody counts
    ("2.28.9-p2p-nvls", cards("PIX"), Beside(nvlink=0), 0),  # over PCIe
    ("2.20.5-ib-gpudirect", H200.machine(4), Beside(ports={"mlx5_0/1": 0}), 2),
    ("2.20.5-ib-gpudirect", H200.machine(4), PORTS, 0),
])  # fmt: skip
def test_counters_that_stood_still_contradict_the_log(name, topology, beside, count):
    assert len(contradictions(log(name), FOUR, [beside] * 4, topology)) == count

"""NVLink domains: racks that are not here, of 18 trays with 4 GPUs each, and what is wrong with one of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_gpufleet.machine import nvlink_domain
from pytest_gpufleet.machine.nvlink_domain import Imex, Tray, domain_faults, imex_faults
from pytest_gpufleet.machine.tools import Absent, Unreadable
from pytest_gpufleet.model.events import Order
from pytest_gpufleet.model.gpu import ClusterTopology, Domain, Gpu, GpuTopology, joined
from pytest_gpufleet.model.place import Pair, Place
from pytest_gpufleet.verdict.orders import nodes_of_domain

RACKS, TRAYS = 28, 18
CLIQUE = 32766  # which racks have in common


def rack_of(node: int) -> int:
    return node // TRAYS


def cluster_uuid(rack: int) -> str:
    return f"{rack + 1:032x}"


def addresses(rack: int) -> tuple[str, ...]:
    return tuple(f"10.0.{rack}.{tray}" for tray in range(TRAYS))


def gpu(index: int, rack: int, **facts: Any) -> Gpu:
    health = {"mask": 0, "clique": CLIQUE, "cluster": cluster_uuid(rack)}
    usual = {"name": "NVIDIA GB200", "fabric": {"state": 3, "status": 0}, "fabric_health": health}
    return Gpu(index, {**usual, "nvlink_states": [1] * 18, **facts})


def tray(rack: int, **facts: Any) -> GpuTopology:
    links = tuple(tuple("X" if a == b else "NV18" for b in range(4)) for a in range(4))
    return GpuTopology(tuple(gpu(index, rack, **facts) for index in range(4)), links, "nvswitch")


def trays(racks: int = RACKS, **other: Tray) -> dict[int, Tray]:
    found = {node: Tray(tray(rack_of(node)).domain, addresses(rack_of(node))) for node in range(racks * TRAYS)}
    return {**found, **{int(name[1:]): each for name, each in other.items()}}


def cluster(racks: int, trays_of: int = TRAYS) -> ClusterTopology:
    nodes = {node: tray(node // trays_of) for node in range(racks * trays_of)}
    found = joined(nodes, {node: f"r{node // trays_of}t{node % trays_of}" for node in nodes})
    assert isinstance(found, ClusterTopology)
    return found


@pytest.mark.parametrize(
    ("facts", "inside"),
    [
        ({}, True),
        ({"name": "NVIDIA GB300"}, True),
        ({"name": "NVIDIA H100 80GB HBM3"}, False),  # with a UUID that other machines have too
        ({"fabric_health": {"mask": 0, "clique": 0, "cluster": "0" * 32}}, False),
        ({"fabric": {"state": 3, "status": 26}}, False),  # "Insufficient Resources" (Azure/azhpc-images issue 506)
        ({"fabric": {"state": 0, "status": 0}}, False),  # GB200 NVL4
    ],
)
def test_a_domain_is_a_cluster_and_a_clique_of_a_gpu_made_for_racks(facts: Mapping[str, Any], inside: bool) -> None:
    assert tray(4, **facts).domain == (Domain(cluster_uuid(4), CLIQUE) if inside else None)


def test_racks_that_share_a_clique_are_two_domains() -> None:
    two = cluster(2, trays_of=3)
    assert [*two.domains.values()] == [[0, 1, 2], [3, 4, 5]]
    pair, across = (Pair(Place(0, "node"), Place(node, "node")) for node in (2, 3))
    assert (two.kind(pair)[-1], two.kind(across)[-1]) == ("domain", "network")
    assert "3 nodes" in two.identity(Place(0, "domain", 1))


# ---------------------------------------------------------------- facts


def imex(root: Path, answer: tuple[int, str, str] | None, nodes: str, channels: int) -> Imex:
    for name, text in ((nvlink_domain.NODES_CONFIG, nodes), *((f"{nvlink_domain.CHANNELS}/channel{n}", "")
                                                               for n in range(channels))):  # fmt: skip
        if text or "channel" in name:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)

    def ended(*command: str, seconds: float = 0) -> tuple[int, str, str]:
        assert command == ("nvidia-imex-ctl", "-q")
        if answer is None:
            raise Unreadable("nvidia-imex-ctl is not installed")
        return answer

    return nvlink_domain.read(root, ended)


LIST = "# rack 7\n10.0.0.1\n10.0.0.2\n"


@pytest.mark.parametrize(
    ("answer", "channels", "faults"),
    [
        ((0, "READY\n", ""), 1, []),
        ((0, "READY\n", ""), 0, ["imex_channel_missing"]),
        ((0, "WAITING_FOR_RECOVERY\n", ""), 1, []),  # of another tray
        ((0, "UNAVAILABLE\n", ""), 1, ["imex_down"]),
        ((1, "", "Error: failed to connect\n"), 1, ["imex_down"]),
        ((1, "", ""), 1, ["imex_down"]),
    ],
)
def test_imex_is_ready_with_channels(
    answer: tuple[int, str, str], channels: int, faults: list[str], tmp_path: Path
) -> None:
    found = imex(tmp_path, answer, LIST, channels)
    assert found.nodes == ("10.0.0.1", "10.0.0.2")
    assert [fault.name for fault in imex_faults(found)] == faults
    assert found.waits == found.daemon.startswith("WAITING")


@pytest.mark.parametrize(
    ("answer", "nodes", "channels", "why"),
    [
        (None, "", 0, Absent),
        ((1, "", ""), "", 1, Unreadable),  # the daemon is another container's
        (None, LIST, 1, Unreadable),
    ],
)
def test_imex_that_is_not_here_or_cannot_be_asked(
    answer: tuple[int, str, str] | None, nodes: str, channels: int, why: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(why):
        imex(tmp_path, answer, nodes, channels)


# ---------------------------------------------------------------- whole racks


STRAY = Tray(Domain("f" * 32, CLIQUE), addresses(5))
DIFFERENT = Tray(tray(5).domain, addresses(5)[:-1])
NODE = 5 * TRAYS + 7


@pytest.mark.parametrize("ordered", [0, TRAYS])
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("", {}),
        ("nvlink_domain_split", {f"n{NODE}": STRAY}),
        ("nvlink_domain_split", {f"n{NODE}": Tray(None, addresses(5))}),
        ("nvlink_domain_split", {f"n{NODE}": Tray(tray(6).domain._replace(clique=1), addresses(5))}),  # type: ignore[union-attr]
        ("imex_nodes_differ", {f"n{NODE}": DIFFERENT}),
        ("imex_nodes_differ", {f"n{NODE}": Tray(tray(5).domain, addresses(5)[::-1])}),
        ("", {f"n{NODE}": Tray(tray(5).domain)}),  # its list cannot be read
    ],
)
def test_of_28_healthy_racks_only_what_is_wrong_is_named(name: str, other: dict[str, Tray], ordered: int) -> None:
    found = [(fault.name, fault.subjects) for fault in domain_faults(trays(**other), ordered)]
    assert found == ([(name, (Place(NODE, "node"),))] if name else [])


def test_a_domain_is_as_large_as_ordered() -> None:
    there = trays(3)
    del there[TRAYS + 3]
    assert domain_faults(there) == []
    (fault,) = domain_faults(there, TRAYS)
    assert (fault.name, fault.subjects) == ("nvlink_domain_incomplete", (Place(0, "domain", 1),))
    without_lists = {node: Tray(each.domain) for node, each in trays(3, n30=STRAY).items()}
    assert [fault.subjects for fault in domain_faults(without_lists, TRAYS)] == [(Place(30, "node"),)]
    assert domain_faults(without_lists) == []  # nobody says that it belongs to them


def test_part_of_a_rack_is_no_fault_where_nobody_ordered_more() -> None:
    some = {node: each for node, each in trays(2).items() if node < 22}
    one_list = {node: Tray(each.domain, ("10.0.0.1", "10.0.0.2")) for node, each in trays(2).items()}
    assert domain_faults(some) == domain_faults(one_list) == []


@pytest.mark.parametrize(("nodes", "size"), [(18, 18), ({"at_least": 16}, 16), (None, 0)])
def test_an_order_says_how_many_nodes_a_domain_has(nodes: Any, size: int) -> None:
    assert nodes_of_domain(Order("o.toml", "", {"domain": {"nodes": nodes}} if nodes else {"name": "x"})) == size
    assert nodes_of_domain(None) == 0

"""What a run on many nodes says on the terminal and to Prometheus."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pytest_gpufleet.model.events import HostFound
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import Place
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import prometheus
from pytest_gpufleet.report.terminal.summary_lines import SCREEN, summary_lines
from pytest_gpufleet.run.summary import summary
from pytest_gpufleet.verdict.verdict import settled
from tests.fleets import fleet_of, healthy, rejected
from tests.node_records import Between, of_nodes
from tests.report.test_terminal import text_of


@pytest.fixture(scope="module")
def faulty() -> Record:
    """3 is slow with everybody, rail 1 of 5 is, 4 is rejected by its own run and left out, 7 is lost."""
    hosts = fleet_of(8, node_004=rejected("node-004"))
    between = Between(nodes=(2,), rails=((4, 1),), lost={6: "nothing heard"}, left_out={3: "REJECTED"})
    return of_nodes(hosts, between)[0]


def test_the_terminal_names_nodes_by_host_and_serial(faulty: Record) -> None:
    text = text_of(faulty)
    assert text.startswith("REJECTED")
    for told in (
        "8 nodes of 8 asked for, 1 lost, 1 left out", "Nodes to look at: 4", "node-003, serial SN-node-003: named",
        "node-007, serial SN-node-007: lost", "node-005 rail 1: with 3 others",
        "node-004, serial SN-node-004: rejected",
    ):  # fmt: skip
        assert told in text
    assert "node2" not in text


def on_kernels(*kernels: str | None, rehearsal: bool = False) -> Record:
    """A run on as many nodes as kernels, each of which tells that this one runs it, or does not tell."""
    record, _ = of_nodes(fleet_of(len(kernels)))
    machines = {node: HostFound(host={"boot_id": kernel}) for node, kernel in enumerate(kernels)}
    run = msgspec.structs.replace(record.run, rehearsal=rehearsal)
    return settled(replace(record, machines=machines, run=run, verdict=None), "")


@pytest.mark.parametrize(
    ("record", "together"),
    [
        (on_kernels("a", "b", "a"), {0: (2,), 1: (), 2: (0,)}),
        (on_kernels("a", "a", "a"), {0: (1, 2), 1: (0, 2), 2: (0, 1)}),
        (on_kernels("a", "b", "c"), {0: (), 1: (), 2: ()}),
        (on_kernels(None, None, ""), {0: (), 1: (), 2: ()}),
        (on_kernels("a", "a", rehearsal=True), {0: (), 1: ()}),
    ],
    ids=["two of three", "all", "none", "nobody tells", "rehearsal"],
)
def test_nodes_that_one_kernel_runs_are_told_as_one_host(record: Record, together: dict[int, tuple[int, ...]]) -> None:
    assert {node.index: node.same_host for node in summary(record, "0" * 64).nodes} == together
    named = [record.hosts[node] for node, others in together.items() if others]
    if named:
        assert f"{len(named)} nodes are one host ({', '.join(named)}): " in text_of(record)
    else:
        assert "one host" not in text_of(record)


def test_the_terminal_takes_one_screen_however_many_nodes_are_bad() -> None:
    bad = of_nodes([rejected(f"n{number:03}") for number in range(60)], Between(nodes=tuple(range(30))))[0]
    lines = summary_lines(bad)
    assert len(lines) <= SCREEN
    assert any("more nodes, which the report lists" in text for text, _ in lines)
    assert max(len(text) for text, _ in lines) <= 80 or "serial" in max((text for text, _ in lines), key=len)


def test_why_a_node_is_lost_is_told_once_where_it_is_named() -> None:
    record, _ = of_nodes(fleet_of(3), Between(lost={1: "its cable was pulled"}))
    record.faults.append(Fault("node_lost", (Place(1, "node"),), "its cable was pulled", check="a check"))
    named = text_of(record).partition("Nodes to look at")[2]
    assert named.count("its cable was pulled") == 1


def test_a_node_that_could_not_do_its_part_is_left_out_and_named_by_no_check() -> None:
    record, _ = of_nodes(fleet_of(3), Between(left_out={1: "no space left on device"}))
    record.faults.append(Fault("node_unfit", (Place(1, "node"),), "no space left on device"))
    named = text_of(record).partition("Nodes to look at")[2]
    assert (": left out" in named, "named by checks" in named) == (True, False)


def series(record: Record, folder: Path) -> dict[str, list[tuple[dict[str, str], float]]]:
    prometheus.write(folder / "x.prom", record)
    families = text_string_to_metric_families((folder / "x.prom").read_text())
    return {family.name: [(dict(each.labels), each.value) for each in family.samples] for family in families}


def test_prometheus_tells_the_node_of_each_verdict_figure_and_fault(faulty: Record, tmp_path: Path) -> None:
    told = series(faulty, tmp_path)
    verdicts = {labels["node"]: labels["verdict"] for labels, value in told["gpufleet_node_verdict"] if value}
    assert verdicts["node-004"] == "REJECTED"
    assert verdicts["node-001"] == "ACCEPTED"
    assert "node-007" not in verdicts
    assert [labels["node"] for labels, value in told["gpufleet_node_lost"] if value] == ["node-007"]
    rails = {(labels["node"], labels["place"]) for labels, _ in told["gpufleet_figure"] if "rail" in labels["place"]}
    assert ("node-005", "node4/rail1") in rails
    faults = {(labels["name"], labels["node"]) for labels, _ in told["gpufleet_fault"]}
    assert {("node_slow", "node-003"), ("rail_slow", "node-005")} <= faults


def test_of_one_machine_prometheus_has_no_label_of_a_node(tmp_path: Path) -> None:
    told = series(healthy(), tmp_path)
    assert not [name for name in told if "node" in name]
    assert not [labels for samples in told.values() for labels, _ in samples if "node" in labels]

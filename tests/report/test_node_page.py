"""The page of a run on many nodes: how each stands, where it leads, and how large it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import hosts
from pytest_gpufleet.report.hosts import OWN, HostRow
from pytest_gpufleet.report.page.report_page import page
from pytest_gpufleet.verdict.fleet.host_runs import NodeRuns
from tests.fleets import fleet_of, host_run, rejected, slower
from tests.node_records import Between, of_nodes
from tests.report.browser import seen
from tests.report.page import Page

PAIRS, RAILS = "Nodes groups", "Nodes rails"


def other_driver(topology):
    return replace(topology, driver="570.86.15")


@pytest.fixture(scope="module")
def faulty() -> tuple[Record, NodeRuns]:
    """64 nodes: 7 is slow by itself, 12 has a slow GPU, 20 another driver, 31 is rejected by its own run and left out,
    16 is slow in pairs, 21 and 22 with each other, rail 2 of 41 is slow, and 45 is lost."""
    hosts = fleet_of(
        64,
        node_007=host_run("node-007", change=slower(0.1)),
        node_012=host_run("node-012", change=slower(0.12, 2)),
        node_020=host_run("node-020", machine=other_driver),
        node_031=rejected("node-031"),
    )
    return of_nodes(
        hosts,
        Between(
            nodes=(15,), rails=((40, 2),), links=((20, 21),), lost={44: "nothing heard"}, left_out={30: "REJECTED"}
        ),
    )


@pytest.fixture(scope="module")
def rows(faulty: tuple[Record, NodeRuns]) -> dict[str, HostRow]:
    record, runs = faulty
    return {row.host: row for row in hosts.rows(record, hosts.as_fleet(record, runs))}


@pytest.fixture(scope="module")
def shown(faulty: tuple[Record, NodeRuns]) -> Page:
    record, runs = faulty
    return Page(page(record, "5e0" * 21 + "1", runs, {runs[15].folder: "nodes/15-node-016/report.html"}))


def test_nodes_that_need_a_look_are_those_that_are_not_fine(rows: dict[str, HostRow]) -> None:
    assert len(rows) == 64
    assert [host for host, row in rows.items() if row.wrong] == [
        "node-007", "node-012", "node-016", "node-020", "node-021", "node-022", "node-031", "node-041", "node-045",
    ]  # fmt: skip


def test_each_node_stands_by_its_own_run_and_by_the_checks_between(rows: dict[str, HostRow]) -> None:
    assert {host: rows[host].cells[PAIRS] for host in ("node-001", "node-016", "node-017", "node-031", "node-045")} == {
        "node-001": "ok", "node-016": "failed", "node-017": "affected", "node-031": "not run", "node-045": "not run",
    }  # fmt: skip
    assert {rows[host].cells[RAILS] for host in rows if host not in ("node-031", "node-041", "node-045")} == {"ok"}
    assert rows["node-041"].cells[RAILS] == "failed"
    assert [rows[host].cells[OWN] for host in ("node-016", "node-031", "node-045")] == ["ok", "failed", "not run"]


def test_what_is_told_of_a_node_names_places_by_hosts(rows: dict[str, HostRow]) -> None:
    told = " ".join(rows["node-041"].said)
    assert "node-041 rail 2: with 3 others" in told
    assert "node40" not in told
    assert rows["node-045"].gone == "lost"
    assert rows["node-045"].gaps[0].what == "lost: nothing heard; serial of the machine: SN-node-045"


def test_the_page_leads_to_each_node_that_is_not_fine_and_to_its_own_report(rows, shown: Page) -> None:
    anchors = {values["id"] for _, values in shown.seen if values.get("id")}
    links = [values["href"] for tag, values in shown.seen if tag == "a"]
    assert {link[1:] for link in links if link.startswith("#")} <= anchors
    assert sum(link.startswith("#fleet-host-") for link in links) == sum(row.wrong for row in rows.values())
    assert "nodes/15-node-016/report.html" in links
    assert "which nobody reads or sends without the cluster&#39;s token" in shown.html
    assert "SN-node-016" in shown.html


def test_what_is_told_of_nodes_is_told_in_chinese_too(faulty: tuple[Record, NodeRuns]) -> None:
    record, runs = faulty
    text = Page(page(record, "", runs, language="zh")).text
    assert "1 个节点（node-045）：失联：nothing heard" in text  # noqa: RUF001
    assert "该节点的一条 rail 慢：node-041 rail 2" in text  # noqa: RUF001


def test_on_a_phone_nothing_is_cut_off(shown: Page, standard: Record, bad_gpu: Record, tmp_path: Path) -> None:
    pages = {"nodes": shown.html, "standard": page(standard, ""), "bad GPU": page(bad_gpu, "")}
    for name, each in seen(pages, tmp_path, width=400).items():
        assert not each.sticks_out, name
        assert each.narrowest > 300, name  # text is read in lines, not in letters


def test_the_page_of_64_nodes_is_small(shown: Page) -> None:
    assert len(shown.html.encode()) < 5e6 / 4
    assert len(shown.seen) < 20_000


def test_a_node_whose_evidence_is_not_here_has_a_row_all_the_same() -> None:
    record, _ = of_nodes(fleet_of(3))
    rows = hosts.rows(record, hosts.as_fleet(record, {}))
    assert [row.host for row in rows] == ["node-001", "node-002", "node-003"]
    assert all(row.cells[PAIRS] == "ok" and row.cells[OWN] == "not run" for row in rows)
    assert "no run that counts" in page(record, "")


def test_healthy_nodes_leave_nobody_to_look_at() -> None:
    record, runs = of_nodes(fleet_of(3))
    html = page(record, "", runs)
    assert "Nodes to look at" not in html
    assert "The nodes are alike in everything that is compared" in html

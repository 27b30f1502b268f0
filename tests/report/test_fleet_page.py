"""The page of a fleet: which hosts it shows, how large it is, and where it leads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpufleet.report.hosts import ALIKE, OWN, PEERS, document, host_rows
from pytest_gpufleet.report.page.hosts_part import MOST_FIGURES, page
from pytest_gpufleet.report.terminal.summary_lines import MOST_HOSTS, fleet_lines
from pytest_gpufleet.verdict.fleet.fleet_verdict import Fleet, judge_fleet
from tests.fleets import fleet_of, host_run, rejected, slower
from tests.report.page import Page

HOSTS = [f"node-{number:03}" for number in range(1, 65)]


@pytest.fixture(scope="module")
def faulty() -> Fleet:
    """64 hosts: one is missing, one slow, one has a slow GPU, one another driver, one failed a check."""
    hosts = fleet_of(
        64,
        node_007=host_run("node-007", change=slower(0.1)),
        node_012=host_run("node-012", change=slower(0.12, 2)),
        node_020=host_run("node-020", machine=lambda topology: replace(topology, driver="570.86.15")),
        node_031=rejected("node-031"),
    )
    return judge_fleet([run for run in hosts if run.host != "node-055"], (), HOSTS)


@pytest.fixture(scope="module")
def shown(faulty: Fleet) -> Page:
    return Page(page(faulty, {faulty.hosts[0].folder: "reports/a%20b/report.html"}))


def test_each_host_has_a_row_and_those_that_are_wrong_are_marked(faulty: Fleet) -> None:
    rows = {row.host: row for row in host_rows(faulty)}
    assert list(rows) == HOSTS
    assert [host for host, row in rows.items() if row.wrong] == [
        "node-007", "node-012", "node-020", "node-031", "node-055",
    ]  # fmt: skip
    assert (rows["node-007"].cells[OWN], rows["node-007"].cells[PEERS]) == ("ok", "failed")
    assert (rows["node-020"].cells[ALIKE], rows["node-020"].cells[PEERS]) == ("failed", "ok")
    assert (rows["node-031"].cells[OWN], rows["node-031"].cells["Health"]) == ("failed", "failed")
    assert rows["node-055"].run is None


def test_the_gpu_that_is_slow_is_named_and_none_where_all_are(faulty: Fleet) -> None:
    rows = {row.host: row for row in host_rows(faulty)}
    assert rows["node-012"].named[0].index == 2
    assert rows["node-007"].named == ()


def test_the_page_leads_to_what_is_wrong(faulty: Fleet, shown: Page) -> None:
    anchors = {values["id"] for tag, values in shown.seen if values.get("id")}
    links = [values["href"] for tag, values in shown.seen if tag == "a"]
    assert {link[1:] for link in links if link.startswith("#")} <= anchors
    assert sum(link.startswith("#") for link in links) == 5
    assert "reports/a%20b/report.html" in links
    text = shown.html
    for run in faulty.hosts:
        assert run.sha256 in text
    for told in ("SN-node-012", "570.86.15", "no run that counts", "Worse than the peers on all hosts"):
        assert told in text


def test_a_page_is_small(faulty: Fleet, shown: Page) -> None:
    assert len(shown.html) < 5e6 / 10
    everywhere = judge_fleet(
        [host_run(name, change=slower(0.1 * (index % 4 == 0))) for index, name in enumerate(HOSTS)]
    )
    assert len([row for row in host_rows(everywhere) if len(row.slow) > MOST_FIGURES]) == 16
    assert len(page(everywhere, {})) < 5e6


def test_the_terminal_stays_short() -> None:
    lines = fleet_lines(judge_fleet([rejected(name) for name in HOSTS], (), HOSTS))
    assert lines[0][0].startswith("REJECTED")
    assert f"... and {64 - MOST_HOSTS} more" in lines[-1][0]


def test_programs_find_the_host_of_every_fault(faulty: Fleet) -> None:
    told = document(faulty)
    by_host = {host: [fault for fault in told["faults"] if host in fault["hosts"]] for host in HOSTS}
    assert [host for host, faults in by_host.items() if faults] == ["node-007", "node-012", "node-020"]
    assert {fault["name"] for fault in by_host["node-020"]} == {"host_unlike_others"}
    assert [each["host"] for each in told["hosts"]] == [host for host in HOSTS if host != "node-055"]


def test_a_healthy_fleet_has_nobody_to_look_at() -> None:
    healthy = Page(page(judge_fleet(fleet_of(4), (), HOSTS[:4]), {}))
    assert "Hosts to look at" not in healthy.html
    assert "The hosts are alike in everything that is compared" in healthy.html


def test_no_fleet_at_all_has_a_page_too() -> None:
    assert "There is no host" in Page(page(judge_fleet([]), {})).html

"""The pages of a fleet and of a run on many nodes: how each host stands, where they lead, and how large they are."""

from dataclasses import replace

import pytest

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.metric import Measurement
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.report import hosts
from pytest_gpufleet.report.hosts import ALIKE, MOST_FIGURES, OWN, PEERS, counts, document, host_rows, page
from pytest_gpufleet.report.page import page as report
from pytest_gpufleet.report.terminal.summary_lines import MOST_HOSTS, fleet_lines
from pytest_gpufleet.verdict.fleet.fleet_verdict import ended, judge_fleet
from tests.fleets import fleet_of, host_run, rejected, slower
from tests.node_records import Between, of_nodes
from tests.report.page import Page, seen

HOSTS = [f"node-{number:03}" for number in range(1, 65)]


def runs_of_64():
    """7 is slow by itself, 12 has a slow GPU, 20 another driver, and 31 is rejected by its own run."""
    other = host_run("node-020", machine=lambda topology: replace(topology, driver="570.86.15"))
    slow, slow_gpu = host_run("node-007", change=slower(0.1)), host_run("node-012", change=slower(0.12, 2))
    return fleet_of(64, node_007=slow, node_012=slow_gpu, node_020=other, node_031=rejected("node-031"))


@pytest.fixture(scope="module")
def fleet():
    return judge_fleet([run for run in runs_of_64() if run.host != "node-055"], (), HOSTS)


@pytest.fixture(scope="module")
def fleet_page(fleet):
    return Page(page(fleet, {fleet.hosts[0].folder: "reports/a%20b/report.html"}))


def test_each_host_has_a_row_with_what_is_wrong_and_programs_find_the_host_of_every_fault(fleet):
    rows = {row.host: row for row in host_rows(fleet)}
    assert list(rows) == HOSTS
    assert [host for host, row in rows.items() if row.wrong] == [
        "node-007", "node-012", "node-020", "node-031", "node-055",
    ]  # fmt: skip
    assert (rows["node-007"].cells[OWN], rows["node-007"].cells[PEERS]) == ("ok", "failed")
    assert (rows["node-020"].cells[ALIKE], rows["node-020"].cells[PEERS]) == ("failed", "ok")
    assert (rows["node-031"].cells[OWN], rows["node-031"].cells["Health"]) == ("failed", "failed")
    assert rows["node-055"].run is None
    assert (rows["node-012"].named[0].index, rows["node-007"].named) == (2, [])  # no GPU where all are slow
    told = document(fleet)
    by_host = {host: [fault for fault in told["faults"] if host in fault["hosts"]] for host in HOSTS}
    assert [host for host, faults in by_host.items() if faults] == ["node-007", "node-012", "node-020"]
    assert {(fault["name"], fault["action"]) for fault in by_host["node-020"]} == {("host_unlike_others", "CONFIG")}
    (unlike,) = told["differences"]
    others = {"570.86.15": ("node-020",)}
    assert unlike == {"fact": "driver", "usual": "580.159.04", "others": others, "code": "host_unlike_others"}
    everywhere = [each for each in told["slower_than_peers"] if each["everywhere"]]
    assert {(each["host"], len(each["values"])) for each in everywhere if each["metric"] == "gemm"} == {("node-007", 4)}
    assert [each["host"] for each in told["hosts"]] == [host for host in HOSTS if host != "node-055"]


def hosts_led_to(page, report):
    """How many links lead to hosts; none leads nowhere, and one to that report."""
    links = page.values("href")
    assert {link[1:] for link in links if link.startswith("#")} <= {*page.values("id")}
    assert report in links
    return sum(link.startswith("#fleet-host-") for link in links)


def test_the_page_leads_to_what_is_wrong_and_its_filter_leaves_that(fleet, fleet_page, tmp_path):
    assert hosts_led_to(fleet_page, "reports/a%20b/report.html") == 5
    assert fleet_page.of("h4")[:2] == ["node-031", "node-007"]  # what is REJECTED first
    told = ("SN-node-012", "570.86.15", "no run that counts", "Worse than the peers on all hosts")
    assert all(text in fleet_page.html for text in (*told, *(run.sha256 for run in fleet.hosts)))
    filtered = fleet_page.html.replace('id="fleet-only"', 'id="fleet-only" checked')
    shown = seen({"all": fleet_page.html, "filtered": filtered}, tmp_path)
    assert (shown["all"].hosts, shown["filtered"].hosts) == (64, 5)


def test_a_page_is_small_and_the_terminal_stays_short(fleet, fleet_page):
    assert len(fleet_page.html) < 1e6 * (64 + 64) / 500  # beside 64 others it has what does not grow
    runs = [host_run(name, change=slower(0.1 * (index % 4 == 0))) for index, name in enumerate(HOSTS)]
    everywhere = judge_fleet(runs)
    assert len([row for row in host_rows(everywhere) if len(row.slow) > MOST_FIGURES]) == 16
    assert len(page(everywhere, {})) < 5e6
    lines = fleet_lines(judge_fleet([rejected(name) for name in HOSTS], (), HOSTS))
    assert lines[0][0].startswith("REJECTED")
    assert f"... and {64 - MOST_HOSTS} more" in lines[-1][0]


def test_a_healthy_fleet_and_none_at_all_have_nobody_to_look_at():
    healthy = Page(page(judge_fleet(fleet_of(4), (), HOSTS[:4]), {}))
    assert "Hosts to look at" not in healthy.html
    assert "The hosts are alike in everything that is compared" in healthy.html
    assert "There is no host" in Page(page(judge_fleet([]), {})).html


PAIRS, RAILS = "Nodes groups", "Nodes rails"


@pytest.fixture(scope="module")
def nodes():
    """Of 64 nodes 31 is left out too, 16 is slow in pairs, 21 and 22 with each other, rail 2 of 41 is slow, and 45 is
    lost."""
    gone = {"lost": {44: "nothing heard"}, "left_out": {30: "REJECTED"}}
    return of_nodes(runs_of_64(), Between(nodes=(15,), rails=((40, 2),), links=((20, 21),), **gone))


@pytest.fixture(scope="module")
def rows(nodes):
    record, runs = nodes
    return {row.host: row for row in hosts.rows(record, ended(record, runs)[1])}


@pytest.fixture(scope="module")
def node_page(nodes):
    record, fleet = ended(*nodes)
    return Page(report(record, "5e0" * 21 + "1", fleet, {fleet.hosts[15].folder: "nodes/15-node-016/report.html"}))


def test_each_node_stands_by_its_own_run_and_by_the_checks_between_and_its_places_by_its_host(rows):
    assert len(rows) == 64
    assert [host for host, row in rows.items() if row.wrong] == [
        "node-007", "node-012", "node-016", "node-020", "node-021", "node-022", "node-031", "node-041", "node-045",
    ]  # fmt: skip
    assert {host: rows[host].cells[PAIRS] for host in ("node-001", "node-016", "node-017", "node-031", "node-045")} == {
        "node-001": "ok", "node-016": "failed", "node-017": "affected", "node-031": "not run", "node-045": "not run",
    }  # fmt: skip
    assert {rows[host].cells[RAILS] for host in rows if host not in ("node-031", "node-041", "node-045")} == {"ok"}
    assert rows["node-041"].cells[RAILS] == "failed"
    assert [rows[host].cells[OWN] for host in ("node-016", "node-031", "node-045")] == ["ok", "failed", "not run"]
    told = " ".join(rows["node-041"].said)
    assert "node-041 rail 2: with 3 others" in told
    assert "node40" not in told
    assert rows["node-045"].gone == "lost"
    assert [(gap.kind, gap.what) for gap in rows["node-045"].gaps] == [("lost", "nothing heard")]
    assert rows["node-045"].serial == "SN-node-045"


def test_the_page_leads_to_each_node_that_is_not_fine_and_to_its_own_report_in_chinese_too(rows, node_page, nodes):
    assert hosts_led_to(node_page, "nodes/15-node-016/report.html") == sum(row.wrong for row in rows.values())
    assert "which only holders of the cluster&#39;s token can read or send" in node_page.html
    text = Page(report(nodes[0], "", ended(*nodes)[1], language="zh")).text
    assert "1 台主机（node-045）失联：nothing heard" in text  # noqa: RUF001
    assert "该节点的一条 rail 慢：node-041 rail 2" in text  # noqa: RUF001
    assert "SN-node-016" in node_page.html
    assert len(node_page.html.encode()) < 5e6 / 4
    assert len(node_page.seen) < 20_000


def test_on_a_phone_nothing_is_cut_off(node_page, accepted, bad_gpu, tmp_path):
    pages = {"nodes": node_page.html, "accepted": report(accepted, ""), "bad GPU": report(bad_gpu, "")}
    for name, each in seen(pages, tmp_path, width=400).items():
        assert not each.sticks_out, name
        assert each.narrowest > 300, name  # text is read in lines, not in letters


def test_a_node_whose_evidence_is_not_here_has_a_row_all_the_same():
    record, _ = of_nodes(fleet_of(3))
    rows = hosts.rows(record, ended(record)[1])
    assert [row.host for row in rows] == ["node-001", "node-002", "node-003"]
    assert all(row.cells[PAIRS] == "ok" and row.cells[OWN] == "not run" for row in rows)
    assert "no run that counts" in report(record, "", ended(record)[1])


@pytest.mark.parametrize(
    ("wrong", "hours"), [("", "2 h 0 min"), ("matmul_nondeterministic", ""), ("gpu_bits_differ", "")]
)
def test_what_hosts_compared_adds_up_unless_anything_differed(wrong, hours):
    bound = Finding("test_4_each_gpu.py::x", Measurement("corruption_bound", {WORLD: 1800.0}, {"precision": "bf16"}))
    runs = [
        replace(run, record=replace(run.record, findings=[*run.record.findings, bound], faults=faults))
        for run, faults in zip(fleet_of(4), ([], [], [], [Fault(wrong, (), "a bit")] if wrong else []), strict=True)
    ]
    found = [text for text in counts(judge_fleet(runs, (), HOSTS[:4])) if "corruption" in text]
    assert [hours in text for text in found] == [True] * bool(hours)

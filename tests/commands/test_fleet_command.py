"""`gpufleet fleet`: folders that any launcher left, as one fleet."""

import json
import re
import shutil
from pathlib import Path

import pytest

from pytest_gpufleet import cli
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.hosts_file import read_hosts
from pytest_gpufleet.safe_files import sha256
from tests import runs


@pytest.fixture
def reports(tmp_path):
    """The folders of four healthy hosts, node1 to node4."""
    limits = runs.written(tmp_path / "contract.toml", runs.contract(solo_train_throughput=5000.0))
    for number in range(1, 5):
        runs.record(tmp_path / "reports" / f"node{number}-x", f"node{number}", limits=limits)
    return tmp_path / "reports"


@pytest.fixture
def fleet(reports, tmp_path, capsys):
    """fleet(*options): exit status and document, of four expected hosts unless another file is given."""
    (tmp_path / "hosts.txt").write_text("# rack 3\nnode[1-4]\n")

    def run(*options, expect=tmp_path / "hosts.txt"):
        folders = sorted(reports.iterdir())
        status = cli.main(["fleet", *map(str, folders), "--expect", str(expect), "--json", *map(str, options)])
        return status, json.loads(capsys.readouterr().out)

    return run


def kinds(document):
    return [(gap["kind"], gap["hosts"]) for gap in document["gaps"]]


def test_four_healthy_hosts_a_file_beside_their_folders_and_a_folder_without_evidence(fleet, reports):
    status, document = fleet()
    assert (status, document["verdict"], document["exit_status"]) == (0, "ACCEPTED", 0)
    assert [host["host"] for host in document["hosts"]] == ["node1", "node2", "node3", "node4"]
    assert document["basis"] == {"lowest": "contract", "figures": {"contract": 12}}
    (whose,) = document["notes"]
    assert whose.startswith("4 hosts (node1, node2, node3, node4) are judged by limits that were given (contract.toml)")
    for host in document["hosts"]:
        assert host["evidence_sha256"] == sha256(Path(host["folder"]) / "evidence.jsonl")
    (reports / "fleet.html").write_text("the report of yesterday")  # is no run
    status, document = fleet()
    assert (status, document["verdict"], kinds(document)) == (0, "ACCEPTED", [])
    (reports / "node2-x" / "evidence.jsonl").unlink()
    status, document = fleet()
    assert (status, document["verdict"]) == (10, "INCOMPLETE")
    assert kinds(document) == [("unusable", [f"{reports}/node2-x"]), ("missing", ["node2"])]


@pytest.mark.parametrize(
    ("value", "why"), [("6300.0", "was not made of this evidence.jsonl"), ("4200.0", "missed a limit")]
)
def test_a_tampered_figure(fleet, reports, value, why):
    """Of evidence that is not the one of its summary, or amounts to something else than its verdict, nothing counts,
    and the host that it names is named."""
    evidence = reports / "node2-x" / "evidence.jsonl"
    evidence.write_text(re.sub(r'"gpu1": ?6200.0', f'"gpu1":{value}', evidence.read_text(), count=1))
    status, document = fleet()
    assert (status, kinds(document)) == (10, [("unusable", ["node2"]), ("missing", ["node2"])])
    assert why in document["unusable"][0]["why"]


def test_the_page_is_written_once_and_the_terminal_names_verdict_and_hosts(fleet, reports, tmp_path, capsys):
    page = tmp_path / "fleet page.html"
    assert fleet("-o", page)[0] == 0
    assert '<a href="reports/node1-x/report.html">reports/node1-x/report.html</a>' in page.read_text()
    before = page.read_text()
    assert cli.main(["fleet", str(reports / "node1-x"), "-o", str(page)]) == 1
    assert page.read_text() == before
    assert cli.main(["fleet", str(reports / "node1-x"), "-o", str(reports / "node1-x" / "report.html")]) == 1
    shutil.rmtree(reports / "node4-x")
    (reports.parent / "hosts.txt").write_text("node[1-4]")
    folders = map(str, sorted(reports.iterdir()))
    assert cli.main(["fleet", *folders, "--expect", str(reports.parent / "hosts.txt")]) == 10
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("INCOMPLETE; 3 hosts, 4 expected")
    assert "  node4: no run that counts" in lines


@pytest.mark.parametrize(("text", "racks"), [
    ("a\nb\n", {"a": "", "b": ""}),
    ("# all\n\n a # the first\nb\na\n", {"a": "", "b": ""}),
    ("node-[001,003-005]", dict.fromkeys(("node-001", "node-003", "node-004", "node-005"), "")),
    ("r[1-2]n[09-10].x", dict.fromkeys(("r1n09.x", "r1n10.x", "r2n09.x", "r2n10.x"), "")),
    ("node-[9-11]", dict.fromkeys(("node-9", "node-10", "node-11"), "")),
    ("a rack1\nn[1-2],b\track2\nc\n", {"a": "rack1", "n1": "rack2", "n2": "rack2", "b": "rack2", "c": ""}),
])  # fmt: skip
def test_hosts_are_read_with_the_racks_that_stand_behind_them(tmp_path, text, racks):
    (tmp_path / "hosts").write_text(text)
    assert [*read_hosts(tmp_path / "hosts").items()] == [*racks.items()]


@pytest.mark.parametrize("text", [
    "", "# none", "a b c", "a <b>", "node-[", "node-[]",
    "node-[a-b]", "node-[5-3]", "n[1-999999999]", "node[1]]", "<b>",
])  # fmt: skip
def test_what_names_no_host_is_refused(tmp_path, text):
    with pytest.raises(Refused):
        read_hosts(tmp_path / "hosts")  # which is not there
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(Refused):
        read_hosts(tmp_path / "hosts")


def test_pages_of_several_runs_are_in_the_language_that_is_asked_for_and_terminal_and_json_are_not(
    fleet, reports, tmp_path, capsys
):
    pages = [tmp_path / name for name in ("fleet.html", "compared.html")]
    assert fleet() == fleet("--language", "zh", "-o", pages[0])
    two = sorted(map(str, reports.iterdir()))[:2]
    cli.main(["compare", *two])
    shown = capsys.readouterr().out
    cli.main(["compare", *two, "--language", "zh", "-o", str(pages[1])])
    assert capsys.readouterr().out == f"{shown}report: {pages[1]}\n"
    assert all('<html lang="zh-CN">' in page.read_text(encoding="utf-8") for page in pages)

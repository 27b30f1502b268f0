"""judge, report and compare over several folders: for people, as JSON, and as CSV."""

import csv
import json

import jsonschema
import pytest

from pytest_gpufleet import cli
from pytest_gpufleet.commands import runs as of_runs
from pytest_gpufleet.run import summary
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.safe_files import sha256
from tests import clusters, runs
from tests.clusters import NODES_CHECK, Ends, cluster
from tests.conftest import EVIDENCE
from tests.edited_evidence import edit, seal
from tests.runs import ALONE

ACCEPTED, REJECTED = EVIDENCE / "h200x4-a", EVIDENCE / "h200x4-neighbour"


@pytest.fixture
def ran(capsys):
    """ran(*arguments): the exit status, what stands on standard output, and on standard error."""
    return lambda *arguments: (cli.main([*map(str, arguments)]), *capsys.readouterr())


def test_each_folder_is_judged_as_it_is_alone_and_the_worst_status_counts(ran, tmp_path):
    alone = [ran("judge", folder) for folder in (ACCEPTED, REJECTED)]
    status, both, _ = ran("judge", ACCEPTED, REJECTED)
    assert status == 10  # INCOMPLETE by the limits of today
    assert both == f"{ACCEPTED}:\n{alone[0][1]}{REJECTED}:\n{alone[1][1]}"
    status, text, _ = ran("judge", "--json", ACCEPTED, REJECTED)
    document = json.loads(text)
    assert document["exit_status"] == status
    assert [run["folder"] for run in document["runs"]] == [str(ACCEPTED), str(REJECTED)]
    for run, (status, *_) in zip(document["runs"], alone, strict=True):
        jsonschema.validate(run["summary"], json.loads(summary.schema()))
        assert run["summary"]["exit_status"] == run["exit_status"] == status
    rejected = runs.record(tmp_path / "rejected", failed={runs.ALONE: "other"})
    assert ran("judge", rejected, ACCEPTED)[0] == ran("judge", ACCEPTED, rejected)[0] == 1


def test_a_folder_that_cannot_be_used_does_not_stop_the_others(ran, tmp_path):
    status, text, error = ran("judge", tmp_path, ACCEPTED)
    assert (status, error.startswith(f"gpufleet: {tmp_path}")) == (1, True)
    assert text.endswith(ran("judge", ACCEPTED)[1])
    document = json.loads(ran("judge", "--json", tmp_path, ACCEPTED)[1])
    assert [("error" in run, "summary" in run) for run in document["runs"]] == [(True, False), (False, True)]


def test_each_folder_gets_its_own_report(ran, tmp_path):
    folders = [runs.record(tmp_path / name, name) for name in ("node7", "node8")]
    status, text, _ = ran("report", "--json", *folders)
    document = json.loads(text)
    assert (status, document["exit_status"]) == (0, 0)
    for folder, run in zip(folders, document["runs"], strict=True):
        files = [folder / "report.html", folder / "summary.json"]
        assert run["files"] == list(map(str, files))
        assert all(path.is_file() for path in files)
        assert run["verdict"] == json.loads(files[1].read_text())["verdict"]
    assert ran("report", folders[0], tmp_path / "nothing", folders[1])[0] == 1
    for command in ("judge", "report"):
        status, _, error = ran(command, *folders, "-o", tmp_path / "page.html")
        assert (status, "2 folders were given" in error) == (1, True)
    assert not (tmp_path / "page.html").exists()


def test_a_machine_that_computes_other_bits_is_named(ran, tmp_path):
    *events, verdict = (ACCEPTED / "evidence.jsonl").read_text().splitlines()
    for name, output in (("a", "1"), ("b", "2"), ("c", "1")):
        part = {"inputs": "d" * 64, "output": output * 64}
        taken = {"place": "gpu0", "kind": "NVIDIA H200", "software": {"torch": "2.9.0"}, "parts": {"product": part}}
        event = {"event": "fingerprint", "check": "acceptance/test_3_fingerprint.py::test_it", "fingerprints": [taken]}
        (tmp_path / name).mkdir()
        (tmp_path / name / "evidence.jsonl").write_text("\n".join([*events, json.dumps(event), verdict, ""]))
    a, b, c = (tmp_path / name for name in "abc")
    status, text, _ = ran("compare", a, b, c, "--json")
    (found,) = json.loads(text)["fingerprints"]
    assert (status, found["usual"], found["others"]) == (1, "1" * 12, {"2" * 12: ["b"]})
    assert "Computes other bits than most with the same GPUs and libraries: b." in ran("compare", a, b, c)[1]
    assert ran("compare", a, c)[0] == 0


@pytest.mark.parametrize(
    ("host", "shown"),
    [('=HYPERLINK("http://x")', '\'=HYPERLINK("http://x")'), ("@b; -1;=1+1\t+1", "'@b;' -1;'=1+1\t'+1")],
)
def test_no_word_of_evidence_is_a_formula_and_no_figure_is_nan(ran, tmp_path, host, shown):
    folder = runs.record(tmp_path / "a", host, {"busbw world": float("nan")})
    ran("export", folder, "--to", "csv", "-o", tmp_path / "out")
    tables = {path.stem: list(csv.reader(path.open(newline=""))) for path in (tmp_path / "out").iterdir()}
    assert ["host", shown] in tables["run"]
    assert len(tables["figures"]) > 1
    assert not {"nan", "inf"} & {cell for row in tables["figures"] for cell in row}


@pytest.fixture
def limits(tmp_path):
    return clusters.limits(tmp_path / "contract.toml")


@pytest.fixture
def folder(tmp_path, limits):
    """Of three healthy nodes."""
    return cluster(tmp_path / "run", limits)


def changed(evidence, change):
    """Evidence that somebody changed, with the summary and the report that go with it."""
    edit(evidence, change)
    seal(evidence.parent)


def test_evidence_of_a_node_that_was_changed_is_not_the_one_that_the_run_vouches_for(folder, limits, gpufleet):
    own = folder / "nodes" / "1-gf2"
    changed(own / "evidence.jsonl", lambda events: events[0].update(command="pytest acceptance/ --gpus 3"))
    status, text = gpufleet("verify", folder)
    assert (status, text.count("nodes/1-gf2"), "is not that of which" in text) == (1, 1, True)
    assert gpufleet("verify", own)[0] == 0  # by itself it belongs together
    status, text = gpufleet("fleet", folder, "--json")
    assert (status, [each["host"] for each in json.loads(text)["unusable"]]) == (10, ["gf2"])
    status, text = gpufleet("judge", folder, "--fleet-profile", limits)
    assert (status, "1-gf2" in text) == (1, True)


def test_a_node_whose_folder_is_gone_or_in_the_place_of_another_is_named(folder, gpufleet):
    status, text = gpufleet("verify", folder)
    assert (status, text.count("ACCEPTED"), "3 nodes" in text) == (0, 1, True)
    assert gpufleet("report", folder, "-o", page := folder / "again.html")[0] == 0
    assert NODES_CHECK in page.read_text()
    (nodes := folder / "nodes").joinpath("2-gf10").rename(nodes / "x")
    status, text = gpufleet("verify", folder)
    assert (status, "nodes/2-gf10" in text) == (1, True)
    (nodes / "0-gf1").rename(nodes / "2-gf10")
    (nodes / "x").rename(nodes / "0-gf1")
    status, text = gpufleet("verify", folder)
    assert (status, "nodes/0-gf1" in text) == (1, True)


def test_the_summary_says_what_each_node_came_to(tmp_path, limits):
    folder = cluster(tmp_path / "run", limits, Ends(died=(0,), lost={2: "silent for 10 s"}))
    document = json.loads((folder / "summary.json").read_text())
    first, second, third = document["nodes"]
    assert (document["schema"], document["run"]["nodes_wanted"], document["run"]["secured"]) == (2, 3, "token")
    assert "verdict" not in first  # it died
    assert first["evidence_sha256"]
    assert (second["host"], second["verdict"], second["reasons"]) == ("gf2", "ACCEPTED", second["reasons"])
    assert second["evidence_sha256"] == sha256(folder / "nodes" / "1-gf2" / "evidence.jsonl")
    assert (third["lost"], third.get("evidence_sha256")) == ("silent for 10 s", None)
    assert [gpu["place"] for gpu in document["gpus"]][3:6] == ["gpu3", "node1/gpu0", "node1/gpu1"]
    of_one_machine = json.loads((folder / "nodes" / "1-gf2" / "summary.json").read_text())
    assert not {"nodes_wanted", "transport", "secured", "interfaces"} & of_one_machine["run"].keys()


def test_its_nodes_are_hosts_of_a_fleet_called_as_the_run_over_all_calls_them(folder, gpufleet):
    """Nodes that are processes of one machine have its name in their own evidence."""
    status, text = gpufleet("fleet", folder, "--json")
    document = json.loads(text)
    assert (status, document["verdict"], document["gaps"]) == (0, "ACCEPTED", [])
    assert [host["host"] for host in document["hosts"]] == ["gf1", "gf2", "gf10"]
    changed(folder / "evidence.jsonl", lambda events: events[0]["nodes"][1].update(host="elsewhere"))
    (folder / "nodes" / "1-gf2").rename(folder / "nodes" / "1-elsewhere")
    _, text = gpufleet("fleet", folder, "--json")
    assert [host["host"] for host in json.loads(text)["hosts"]] == ["elsewhere", "gf1", "gf10"]


@pytest.mark.parametrize(("how", "verdict"), [
    ({}, "ACCEPTED"),
    ({"ends": Ends(lost={2: "silent for 10 s"})}, "REJECTED"),
    ({"ends": Ends(left_out={0: "another driver"}, not_here=(1,))}, "INCOMPLETE"),
    ({"values": {"world": 200.0}}, "REJECTED"),  # what is slow between healthy nodes
    ({"wanted": 4}, "REJECTED"),
])  # fmt: skip
def test_a_fleet_of_it_has_its_verdict_and_its_reasons(how, verdict, tmp_path, limits, gpufleet):
    folder = cluster(tmp_path / "run", limits, **how)
    record = RunFolder(folder).record()
    status, text = gpufleet("fleet", folder, "--json")
    document = json.loads(text)
    assert (status, document["verdict"], document["reasons"]) == (record.exit_status, verdict, record.reasons)
    assert record.verdict == verdict


def test_other_limits_hold_on_each_node_and_between_them(tmp_path, limits, ran):
    slow = {node: {f"solo_train_throughput gpu{index}": 5000.0 for index in range(4)} for node in range(3)}
    folder = cluster(tmp_path / "run", limits, other=slow, values={"world": 280.0})
    easy = clusters.limits(tmp_path / "easy.toml", between=250.0, alone=4500.0)
    record = judged(folder, easy)
    assert (record.verdict, record.exit_status) == ("ACCEPTED", 0)
    assert {check.outcome for check in record.checks.values()} == {"passed"}
    status, output, _ = ran("judge", folder, f"--fleet-profile={easy}", "--json")
    assert (status, json.loads(output)["runs"][0]["summary"]["failed_nodes"]) == (0, [])
    # Either half alone does not do.
    for easier, of_each in (({"between": 250.0}, "REJECTED"), ({"alone": 4500.0}, "ACCEPTED")):
        record = judged(folder, clusters.limits(tmp_path / "half.toml", **easier))
        assert record.verdict == "REJECTED"
        assert [end.verdict for end in record.finished.values()] == [of_each] * 3


def test_a_node_that_limits_reject_only_now_is_named_and_limits_bring_no_lost_node_back(folder, limits, tmp_path):
    assert judged(folder, limits).verdict == "ACCEPTED"
    record = judged(folder, clusters.limits(tmp_path / "strict.toml", alone=6300.0))
    assert record.verdict == "REJECTED"
    assert [(end.verdict, ALONE in end.reasons[0]) for end in record.finished.values()] == [("REJECTED", True)] * 3
    folder = cluster(tmp_path / "lost", limits, Ends(lost={1: "silent"}))
    record = judged(folder, clusters.limits(tmp_path / "easy.toml", between=1.0, alone=1.0))
    assert (record.verdict, [*record.lost]) == ("REJECTED", [1])


def judged(folder, limits):
    """What `gpufleet judge` makes of it."""
    record, _ = of_runs.judged(RunFolder(folder), limits, None)
    return record

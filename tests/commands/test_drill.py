"""A drill: rejected wherever it is told, and taken for a run nowhere."""

import json
import xml.etree.ElementTree as Xml

import pytest

from pytest_gpufleet import cli
from pytest_gpufleet.model.codes import CODES
from pytest_gpufleet.model.language import english
from pytest_gpufleet.model.place import THIS_NODE
from pytest_gpufleet.model.record import read
from pytest_gpufleet.report.accused import accused
from pytest_gpufleet.report.failures import failures
from pytest_gpufleet.report.terminal.summary_lines import summary_lines
from pytest_gpufleet.report.translation import says
from pytest_gpufleet.verdict.contradictions import contradictions
from tests.edited_evidence import edit


@pytest.fixture
def drill(tmp_path, capsys):
    """The folder of a drill, and the file that it wrote for Prometheus."""
    metrics = tmp_path / "gpufleet.prom"
    arguments = ("--fault", "201", "--fleet-dir", str(tmp_path / "reports"), "--fleet-prometheus", str(metrics))
    assert cli.main(["drill", *arguments]) == 1
    assert capsys.readouterr().out.startswith("DRILL: REJECTED")
    (folder,) = (tmp_path / "reports").iterdir()
    return folder, metrics


def test_it_is_rejected_and_marked_everywhere(drill):
    folder, metrics = drill
    record = read(folder / "evidence.jsonl")
    assert (record.verdict, record.exit_status, record.run.drill) == ("REJECTED", 1, "ecc_uncorrected")
    assert [(fault.code, fault.subjects) for fault in record.faults] == [("ecc_uncorrected", (THIS_NODE,))]
    assert contradictions(record) == []
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["verdict"], summary["exit_status"], summary["run"]["drill"]) == ("REJECTED", 1, "ecc_uncorrected")
    assert [fault["code"] for fault in summary["faults"]] == [201]
    assert "DRILL: REJECTED" in (folder / "report.html").read_text()
    lines = metrics.read_text().splitlines()
    host = record.run.host
    assert f'gpufleet_drill{{host="{host}"}} 1.0' in lines
    assert f'gpufleet_verdict{{host="{host}",verdict="REJECTED"}} 1.0' in lines
    suite = Xml.parse(folder / "junit.xml").getroot()[0]
    assert suite.get("failures") == "1"
    assert {each.get("name") for each in suite.iter("property")} == {"drill", "fault"}


@pytest.mark.parametrize("language", [english, says("zh")], ids=["en", "zh"])
def test_what_would_have_failed_and_what_to_do_is_told(drill, language):
    record = read(drill[0] / "evidence.jsonl")
    (fault,) = record.faults
    (failure,) = failures(record, accused(record), language)
    assert failure.title.lower() == language(fault.kind.message).lower()
    assert [message.head for message in failure.messages] == [fault.told()]
    assert language(fault.kind.next_step) in " ".join(failure.advice)
    told = "\n".join(line for line, _ in summary_lines(record))
    assert {fault.kind.message.capitalize(), f"{fault.kind.next_step}."} <= {line.strip() for line in told.splitlines()}


@pytest.mark.parametrize("command", ["compare", "calibrate", "sign"])
def test_what_needs_a_run_refuses_it(drill, tmp_path, capsys, command):
    folder, _ = drill
    more = {
        "compare": [str(folder), str(folder.parent)],
        "calibrate": [str(folder), "-o", str(tmp_path / "x.toml")],
        "sign": [str(folder), "--key", str(tmp_path / "key"), "--as", "ann"],
    }
    assert cli.main([command, *more[command]]) == 1
    assert "a drill, made by `gpufleet drill`" in capsys.readouterr().err


def test_a_fleet_has_no_run_of_that_host(drill, capsys):
    folder, _ = drill
    assert cli.main(["fleet", "--json", str(folder)]) == 10
    fleet = json.loads(capsys.readouterr().out)
    assert fleet["verdict"] == "INCOMPLETE"
    assert "a drill" in json.dumps(fleet)


def test_who_looks_at_it_again_is_told(drill, capsys):
    folder, _ = drill
    assert cli.main(["verify", str(folder)]) == 0
    assert "a drill, made by `gpufleet drill`" in capsys.readouterr().out
    assert cli.main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.endswith("report.html: DRILL: REJECTED\n")
    assert cli.main(["judge", str(folder)]) == 1
    assert capsys.readouterr().out.startswith("DRILL: REJECTED")
    assert cli.main(["judge", "--nagios", str(folder)]) == 2
    assert "DRILL: REJECTED" in capsys.readouterr().out


def changed(folder, change):
    evidence = folder / "evidence.jsonl"
    edit(evidence, change)
    return contradictions(read(evidence))


def test_a_drill_that_says_it_was_accepted_contradicts_itself(drill):
    assert changed(drill[0], lambda lines: lines[-1].update(verdict="ACCEPTED", exit_status=0))


def test_a_real_run_cannot_be_made_a_drill(drill):
    def begin(lines):
        lines.insert(-1, {"t": lines[-1]["t"], "event": "check_started", "check": "test_x.py::test_x"})

    assert any("it is a drill" in told for told in changed(drill[0], begin))


def test_without_its_mark_it_is_no_acceptance_either(drill):
    folder, _ = drill
    changed(folder, lambda lines: (lines[0].pop("drill"), lines.pop()))
    from pytest_gpufleet.verdict.verdict import DIED, settled

    assert settled(read(folder / "evidence.jsonl"), DIED).verdict == "REJECTED"
    assert cli.main(["verify", str(folder)]) == 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--fault", "no_such"), "'no_such' is no fault; `gpufleet drill --help` lists all of them"),
        (("--fault", "gpu_lots"), "did you mean gpu_lost?"),
        (("--fault", "xid_application"), "rejects no machine"),
    ],
)
def test_what_nothing_would_follow_is_no_drill(capsys, arguments, why):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["drill", *arguments])
    assert why in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_blamed_for_nothing(tmp_path, capsys):
    assert cli.main(["drill", "--fault", "gpu_lost", "--gpu", "77", "--fleet-dir", str(tmp_path / "no")]) == 1
    assert "there is no GPU 77 here" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_help_has_all_that_a_drill_can_be_for(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["drill", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert all((f"{code.number} {name}" in told) == (code.action != "MONITOR") for name, code in CODES.items())

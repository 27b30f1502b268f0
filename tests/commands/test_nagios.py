"""`gpufleet judge --nagios`: one line, figures behind "|", and the exit status of a monitoring plugin."""

import re
from datetime import datetime
from pathlib import Path

import pytest

from pytest_gpufleet import cli
from pytest_gpufleet.commands import nagios
from pytest_gpufleet.model.record import Record, read
from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.run.folder import RunFolder

RECORDED = Path(__file__).parents[1] / "recorded"
DAY = 86400.0
# 'label'=value[UOM];[warn];[crit];[min];[max]
FIGURE = r"'[^'=|]+'=-?[\d.]+(s|%|B|c)?(;[\d.]*){0,4}"
LINE = re.compile(rf"GPUFLEET (OK|WARNING|CRITICAL|UNKNOWN) - [^|\n]+( \|( {FIGURE})+)?")


def recorded(name):
    return read(RECORDED / name / "evidence.jsonl")


def said(record, oldest=None, days=1.0):
    """What is answered about this record, so many days after it began."""

    def judged(folder):
        if isinstance(record, Exception):
            raise record
        return record

    began = datetime.fromisoformat(record.run.utc).timestamp() if isinstance(record, Record) else 0
    line, status = nagios.answer([RunFolder(Path("x"))], judged, oldest, began + days * DAY)
    assert LINE.fullmatch(line), line
    return line, status


def with_verdict(verdict):
    record = recorded("h200x4-a")
    record.verdict, record.reasons = verdict, ["because | of\nthis"]
    return record


@pytest.mark.parametrize(
    ("verdict", "status"),
    [("ACCEPTED", 0), ("INCOMPLETE", 1), ("REJECTED", 2), ("REHEARSAL", 3), (None, 3)],
)
def test_the_exit_status_follows_from_the_verdict(verdict, status):
    line, answered = said(with_verdict(verdict))
    assert answered == status
    assert line.startswith(f"GPUFLEET {nagios.WORDS[status]} - ")
    assert ("because / of this" in line) == (status != 0)


def test_an_old_acceptance_is_told_and_warns_where_an_age_was_given():
    accepted = with_verdict("ACCEPTED")
    line, status = said(accepted, days=100)
    assert (status, "100 d ago" in line) == (0, True)
    line, status = said(accepted, oldest=30 * DAY, days=100)
    assert (status, "longer ago than 30 d" in line, f"'age'={100 * DAY:.0f}s;{30 * DAY:.0f};;0" in line) == (
        1,
        True,
        True,
    )
    assert said(accepted, oldest=30 * DAY, days=2)[1] == 0
    assert said(with_verdict("REJECTED"), oldest=30 * DAY, days=100)[1] == 2


@pytest.mark.parametrize("oldest", [None, 30 * DAY])
def test_an_acceptance_from_the_future_warns_which_would_never_be_too_old(oldest):
    line, status = said(with_verdict("ACCEPTED"), oldest=oldest, days=-365)
    assert (status, "365 d in the future: a clock is wrong" in line) == (1, True)
    assert said(with_verdict("ACCEPTED"), oldest=oldest, days=-0.02)[1] == 0  # half an hour
    assert said(with_verdict("REJECTED"), oldest=oldest, days=-365)[1] == 2


def test_what_cannot_be_read_is_unknown():
    line, status = said(Refused("x is not the folder of a run"))
    assert (line, status) == ("GPUFLEET UNKNOWN - x is not the folder of a run", 3)


def test_of_several_runs_the_worst_answers_first(capsys):
    good, bad = RECORDED / "h200x4-a", RECORDED / "h200x4-neighbour"
    assert cli.main(["judge", "--nagios", str(good), str(bad), str(RECORDED / "none")]) == 2
    line = capsys.readouterr().out.removesuffix("\n")
    assert LINE.fullmatch(line), line
    assert line.startswith("GPUFLEET CRITICAL - ")
    assert line.index("REJECTED") < line.index("is not the folder of a run")


def test_no_two_figures_have_one_name():
    """What reads them keeps one of two. The name of a host stays the same from call to call: its curve goes on."""
    folders = [RunFolder(RECORDED / name) for name in ("h200x4-a", "h200x4-c", "h200x4-neighbour")]
    line, _ = nagios.answer(folders, lambda folder: folder.record(), None, 2e9)
    hosts = [each.record().run.host for each in folders]
    assert hosts[1] == hosts[2] != hosts[0]
    names = re.findall(r"'([^']*)'=", line)
    assert len(set(names)) == len(names) == 9
    assert {f"{hosts[0]} age", f"{hosts[1]} h200x4-c age", f"{hosts[1]} h200x4-neighbour age"} < set(names)


@pytest.mark.parametrize(
    "arguments",
    [
        ["judge", "--max-age", "30days", "FOLDER"],
        ["judge", "--fleet-basis", "best", "FOLDER"],
        ["judge", "--warning", "3", "FOLDER"],
        ["judge", "--json", "FOLDER"],
        ["judge", "-o", "x.html", "FOLDER"],
        ["judge"],
        ["juge", "FOLDER"],
        [],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("at", ["first", "last"])
def test_bad_usage_is_unknown(capsys, arguments, at):
    """Status 2 would be CRITICAL, and 1 WARNING."""
    typed = [str(RECORDED / "h200x4-a") if each == "FOLDER" else each for each in arguments]
    try:
        status = cli.main(["--nagios", *typed] if at == "first" else [*typed, "--nagios"])
    except SystemExit as ended:
        status = ended.code
    printed = capsys.readouterr()
    assert status == 3
    assert LINE.fullmatch(printed.out.removesuffix("\n")), printed.out
    assert printed.out.startswith("GPUFLEET UNKNOWN - ")
    assert printed.err == ""


def test_without_the_option_bad_usage_stays_what_it_is(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["judge", "--max-age", "30days", "x"])
    assert ended.value.code == 2
    assert capsys.readouterr().out == ""

"""The published runs are verified as they stand, and every command that docs/commands.md prints runs on them."""

import re
import shlex
import subprocess
from glob import glob
from pathlib import Path

import pytest

from pytest_gpufleet import cli

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = sorted(path.parent for path in (DOCS / "results").glob("*/evidence.jsonl"))
KINDS = {
    "h100": "ACCEPTED",
    "h200": "ACCEPTED",
    "nodes": "ACCEPTED",
    "rejected": "REJECTED",
    "incomplete": "INCOMPLETE",
}  # by the names
MOST_BYTES = 6 << 20  # of all of them
ON_GPUS = ("gpufleet accept", "gpufleet monitor", "gpufleet snapshot", "pytest ")  # which this is not about
PROGRAMS = ("gpufleet", "cp", "cd", "echo", "ssh-keygen", "grep")
# A verdict may change with the limits of the day; whether a command can do what it is asked may not.
STATUSES = {"judge": (0, 1, 10), "fleet": (0, 1, 10), "compare": (0, 1)}
COMMANDS = ("verify", "sign", "report", "judge", "compare", "fleet", "calibrate", "order", "export")


def test_there_is_a_run_of_each_kind_and_they_are_small():
    assert {folder.name.rpartition("-")[2] for folder in RESULTS} == KINDS.keys()
    assert sum(path.stat().st_size for path in (DOCS / "results").rglob("*") if path.is_file()) < MOST_BYTES


@pytest.mark.parametrize("folder", RESULTS, ids=lambda folder: folder.name)
def test_a_published_run_is_verified(folder, capsys):
    assert cli.main(["verify", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "evidence.jsonl and summary.json and report.html" in said
    assert f": {KINDS[folder.name.rpartition('-')[2]]}\n" in said


def printed():
    """The lines of the page that are to be typed, but for what is in its first block, which says what there is."""
    page = (DOCS / "commands.md").read_text(encoding="utf-8").partition("--help` of each")[2]
    lines = re.findall(r"^ {4,7}(\S.*)$", page, re.MULTILINE)
    return [line for line in lines if line.startswith(PROGRAMS) and not line.startswith(ON_GPUS)]


def test_every_command_of_the_page_runs_on_them(tmp_path, monkeypatch, capfd):
    """One after the other, as somebody types them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    Path("docs").symlink_to(DOCS)
    lines, wrong = printed(), {}
    assert [name for name in COMMANDS if not any(line.startswith(f"gpufleet {name} ") for line in lines)] == []
    for line in lines:
        program, *words = shlex.split(line)
        if program == "gpufleet":
            status = cli.main([each for word in words for each in sorted(glob(word)) or [word]])
        elif program == "cd":
            status = monkeypatch.chdir(*words) or 0
        else:
            status = subprocess.run(["bash", "-c", line]).returncode
        text = "".join(capfd.readouterr())
        if status not in STATUSES.get(line.split()[1], (0,)) or re.search(
            r"^(gpufleet: |Traceback)", text, re.MULTILINE
        ):
            wrong[line] = text
    assert wrong == {}

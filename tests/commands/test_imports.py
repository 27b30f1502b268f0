"""What a command loads: those that work from evidence start at once, and where no torch is."""

import subprocess
import sys

import pytest

from pytest_gpufleet.cli import main
from tests.conftest import EVIDENCE, SECONDS

HEAVY = ("pytest", "_pytest", "torch", "cloudpickle", "pytest_gpufleet.world", "pytest_gpufleet.probes")
RUN = [
    "import sys; from pytest_gpufleet.cli import main",
    "try: main(sys.argv[1:])",
    "except SystemExit: pass",
    f"loaded = [name for name in {HEAVY} if name in sys.modules]",
    "assert not loaded, loaded",
]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["verify", EVIDENCE / "h200x4-a"],
        ["report", EVIDENCE / "h200x4-a", "-o", "report.html"],
        ["judge", EVIDENCE / "h200x4-a"],
        ["compare", EVIDENCE / "h200x4-a", EVIDENCE / "h200x4-b"],
        ["fleet", EVIDENCE / "h200x4-a", EVIDENCE / "h200x4-b", "-o", "fleet.html"],
        ["calibrate", EVIDENCE / "h200x4-a", EVIDENCE / "h200x4-b", "-o", "limits.toml"],
        ["sign", EVIDENCE / "h200x4-a", "--key=missing", "--as=ann"],
        ["snapshot"],
        ["monitor", "--once"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_loads_nothing_heavy(tmp_path, arguments):
    command = [sys.executable, "-c", "\n".join(RUN), *map(str, arguments)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr


def test_the_version_of_the_module():
    command = [sys.executable, "-X", "importtime", "-m", "pytest_gpufleet", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert ended.stdout.startswith("pytest-gpufleet ")
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in ended.stderr.splitlines()}
    assert not loaded & {"pytest", "_pytest", "torch", "cloudpickle"}


def test_what_a_command_needs_and_is_not_installed_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    for name in [name for name in sys.modules if name.startswith("pytest_gpufleet.report.page")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["report", str(EVIDENCE / "h200x4-a"), "-o", str(tmp_path / "report.html")]) == 1
    assert capsys.readouterr().err == "gpufleet: jinja2 is not installed, which this needs\n"

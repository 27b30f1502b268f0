"""What a command loads: those that work from evidence start at once, and where no torch is."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import EVIDENCE, SECONDS

HEAVY = ("pytest", "_pytest", "torch", "cloudpickle", "pytest_gpufleet.world", "pytest_gpufleet.probes")
RUN = f"""
import json, sys
from pytest_gpufleet.cli import main
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit:
        pass
    loaded = [name for name in {HEAVY} if name in sys.modules]
    assert not loaded, (arguments, loaded)
"""
COMMANDS = [
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
]  # fmt: skip


def test_no_command_loads_anything_heavy(tmp_path):
    command = [sys.executable, "-c", RUN, json.dumps(COMMANDS, default=str)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(("missing", "what"), [("jinja2", "report"), ("msgspec", "report"), ("tomli_w", "order")])
def test_what_a_command_needs_and_is_not_installed_is_named(tmp_path, missing, what):
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules['{missing}'] = None")
    command = [sys.executable, "-m", "pytest_gpufleet", what, EVIDENCE / "h200x4-a", "-o", tmp_path / "report.html"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    package = missing.replace("_", "-")
    how = f"gpufleet: {package} is not installed, which this needs: {sys.executable} -m pip install {package}"
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (1, how)

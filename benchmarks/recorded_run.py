"""What `gpufleet judge` and `gpufleet report` take for a recorded run: CPU time and memory of each.

python benchmarks/recorded_run.py                               that of 4x NVIDIA H200 in tests/recorded
python benchmarks/recorded_run.py runs/myhost-20261122T000000Z  another one
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

RECORDED = Path(__file__).parents[1] / "tests" / "recorded" / "h200x4-a"
COMMAND = "import sys; from pytest_gpufleet.cli import main; sys.exit(main())"  # as pip installs `gpufleet`


def cost(*arguments: str) -> tuple[float, float]:
    """CPU seconds, and the most memory in MB, of a command: whatever it says of the machine."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1, 10):  # on standard error it says which files of a run are missing
        raise RuntimeError(f"{arguments}: status {process.returncode}\n{said.decode()}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def figures(arguments: list[str]) -> dict[str, float]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(shutil.copytree(arguments[0] if arguments else RECORDED, Path(folder) / "run"))
        for name in ("judge", "report"):
            seconds, memory = cost(name, str(run))
            found |= {f"{name}, CPU s": seconds, f"{name}, MB": memory}
    return found


if __name__ == "__main__":
    for name, value in figures(sys.argv[1:]).items():
        print(f"{name:16} {value:8.3f}")

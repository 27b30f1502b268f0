"""Where the time of level quick goes, from the command to the prompt: the level that prologs of a scheduler run.

    python benchmarks/quick.py              a rehearsal on 2 CPU ranks
    python benchmarks/quick.py --gpus 2     on GPUs
    python benchmarks/against.py HEAD quick --gpus 2    beside another commit

By the times of the evidence: the opening (Python, pytest, torch, facts of GPUs and host), the collection, the
checks with the wait for their ranks, and what comes after the verdict (the report, the end of ranks and processes).
CPU seconds are those of the controller and of the processes that it has waited for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest_gpufleet

SUITE = Path(pytest_gpufleet.__file__).parents[2] / "acceptance"
RUNS = 5  # the first finds nothing of what it loads in memory


def events(folder: str) -> list[tuple[str, float, dict[str, Any]]]:
    """What the run has put on record: event, seconds since the epoch, and all of it."""
    (file,) = Path(folder).glob("*/evidence.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return [(each["event"], datetime.fromisoformat(each["t"]).timestamp(), each) for each in found]


def figures(arguments: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", str(SUITE), *(arguments or ["--rehearse=2"]), "-q"]
        began = time.time()
        process = subprocess.Popen(
            [*command, "--fleet-level=quick", f"--fleet-dir={folder}"], stdout=subprocess.DEVNULL, cwd=folder
        )
        _, _, used = os.wait4(process.pid, 0)
        ended = time.time()
        found = events(folder)
    at = {name: moment for name, moment, _ in found}  # of several, the last
    return {
        "opening, s": at["run"] - began,
        "collection, s": at["session"] - at["run"],
        "checks, s": at["check_finished"] - at["session"],
        "of these waiting for ranks, s": sum(each["seconds"] for name, _, each in found if name == "world_started"),
        "verdict, report, end, s": ended - at["check_finished"],
        "all, s": ended - began,
        "CPU s": used.ru_utime + used.ru_stime,
    }


def main() -> None:
    runs = [figures(sys.argv[1:]) for _ in range(RUNS)]
    for name in runs[0]:
        print(f"{name:28} {'  '.join(f'{each[name]:6.2f}' for each in runs)}")


if __name__ == "__main__":
    main()

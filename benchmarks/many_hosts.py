"""What `gpufleet fleet` takes of many hosts: time, memory of the process, size of the page.

Each host is a recorded machine of 4x NVIDIA H200 with a name and GPUs of its own, in a folder of its own, written to
the folder for temporary files (0.6 MB a host). It was REJECTED, so every host stands in the report in detail.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECORDED = Path(__file__).parents[1] / "tests" / "recorded" / "h200x4-a" / "evidence.jsonl"


def folders(parent: Path, hosts: int) -> list[Path]:
    """The folders of so many hosts."""
    text = RECORDED.read_text(encoding="utf-8")
    made = []
    for number in range(1, hosts + 1):
        folder = parent / f"node-{number:04}"
        folder.mkdir()
        own = re.sub(r"GPU-\d{4}", f"GPU-{number:04}", text)
        (folder / "evidence.jsonl").write_text(own.replace('"node-a"', f'"{folder.name}"'), encoding="utf-8")
        made.append(folder)
    return made


def figures(arguments: list[str]) -> dict[str, float]:
    """Of as many hosts as `arguments` say."""
    (hosts,) = map(int, arguments)
    with tempfile.TemporaryDirectory() as parent:
        page, reports = Path(parent) / "fleet.html", Path(parent) / "reports"
        reports.mkdir()
        command = [
            sys.executable,
            "-m",
            "pytest_gpufleet",
            "fleet",
            *map(str, folders(reports, hosts)),
            "-o",
            str(page),
        ]
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return {
            "time, s": time.monotonic() - began,
            "CPU time, s": used.ru_utime + used.ru_stime,
            "memory, MB": used.ru_maxrss / 1024,
            "page, MB": page.stat().st_size / 1e6,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("hosts", nargs="*", type=int, default=[64, 500])
    for hosts in parser.parse_args().hosts:
        print(f"{hosts} hosts: " + "; ".join(f"{name} {value:,.2f}" for name, value in figures([str(hosts)]).items()))


if __name__ == "__main__":
    main()

"""What `gpufleet fleet` takes of many hosts: time, memory of the process, size of the page.

Each host is a recorded machine of 4x NVIDIA H200 with a name and GPUs of its own, in a folder of its own, written to
the folder for temporary files (0.6 MB a host). It was REJECTED, so every host stands in the report in detail.
"""

from __future__ import annotations

import argparse
import re
import resource
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("hosts", nargs="*", type=int, default=[64, 500])
    for hosts in parser.parse_args().hosts:
        with tempfile.TemporaryDirectory() as parent:
            page = Path(parent) / "fleet.html"
            (Path(parent) / "reports").mkdir()
            command = [
                sys.executable,
                "-m",
                "pytest_gpufleet",
                "fleet",
                *map(str, folders(page.parent / "reports", hosts)),
            ]
            began = time.monotonic()
            subprocess.run([*command, "-o", str(page)], stdout=subprocess.DEVNULL, check=False)
            seconds = time.monotonic() - began
            memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            print(f"{hosts} hosts: {seconds:.1f} s, {memory:,.0f} MB, page {page.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()

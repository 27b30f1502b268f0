"""What stands for pytest on a node that is not here: it writes the evidence of a recorded machine, line by line, as the
run of that node, and the files that a run leaves. See benchmarks/nodes.py, which puts it where `python -m pytest` finds
it first."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

SECONDS = 20.0  # for all of it; a real machine takes three minutes
TURN_SECONDS = 0.1


def main() -> None:
    name, here = os.environ["RECORDED_NODE"], Path.cwd()
    (reports,) = (Path(argument.partition("=")[2]) for argument in sys.argv if argument.startswith("--fleet-dir="))
    folder = reports / f"{name}-20261122T000000Z"
    folder.mkdir()
    lines = (here / "recorded.jsonl").read_text(encoding="utf-8").replace("@node@", name).splitlines(keepends=True)
    turns = round(SECONDS / TURN_SECONDS)
    with (folder / "evidence.jsonl").open("w", encoding="utf-8") as file:
        for turn in range(turns):
            file.writelines(lines[len(lines) * turn // turns : len(lines) * (turn + 1) // turns])
            file.flush()
            time.sleep(TURN_SECONDS)
    for left in ("summary.json", "junit.xml", "report.html"):
        shutil.copy(here / "left" / left, folder)


if __name__ == "__main__":
    main()

"""Series as an offline run of SwanLab, which `swanlab sync` sends to a server."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpufleet.report.exports.tracked import Tracked

PROJECT = "gpufleet"
# SwanLab would describe the machine that it runs on, and not the one of the run.
NO_PROBE = dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "monitor"), False)


def write(tracked: Tracked, folder: Path) -> None:
    import swanlab

    settings = swanlab.Settings(interactive=False, probe=NO_PROBE, terminal={"proxy_type": "none"})
    name = " ".join(filter(None, (tracked.about["host"], tracked.about["utc"])))
    run = swanlab.init(
        mode="offline", log_dir=str(folder), project=PROJECT, name=name, config=dict(tracked.about), settings=settings
    )
    for kind in dict.fromkeys(each.kind for each in tracked.series):
        at_step: dict[int, dict[str, float]] = defaultdict(dict)
        for each in tracked.series:
            if each.kind == kind:
                for point in each.points:
                    at_step[point.step][each.tag] = point.value
        for step in sorted(at_step):
            run.log(at_step[step], step=step)
    run.finish()

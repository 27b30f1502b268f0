"""What to type next where a run left something open."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from pytest_gpufleet.model.language import Say, english
from pytest_gpufleet.model.levels import BURN_IN_SECONDS
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report.banner import stamp
from pytest_gpufleet.report.open_points import gaps
from pytest_gpufleet.verdict.verdict import RESUMABLE

NOTHING_LEFT_OUT = "with no check left out"
LIMITS = "with these limits"
# What has to be otherwise in the next run, by the state of what this one left open (open_points).
OTHERWISE = {
    "deselected": NOTHING_LEFT_OUT,
    "not run": NOTHING_LEFT_OUT,
    "too short": "with a burn-in that is long enough",
    "not judged": LIMITS,
    "below the basis": LIMITS,
    "calibrated here": LIMITS,
    "skipped": "once what the skipped checks name is mended",
    "without telemetry": "once the driver tells what the GPUs do",
    "changed": "with the suite as it was shipped",
    "not accepted": "once the nodes that are not accepted are mended",
}
WHOLE = (NOTHING_LEFT_OUT, OTHERWISE["too short"])


@dataclass(frozen=True)
class Step:
    why: str
    command: str


def next_steps(record: Record, folder: str = "FOLDER", say: Say = english) -> list[Step]:
    """In the order in which to type them; none for what is accepted, rejected or a rehearsal that came to its end.
    `folder`: the one that the run is in. DIR is that of runs on good machines. Neither is known to a record."""
    start = record.run.command_line
    if record.began and (record.verdict is None or record.broken in RESUMABLE):
        resumed = start.once_more(f"--fleet-resume {shlex.quote(folder)}")
        return [Step(say("go on where this run stopped"), resumed)]
    if stamp(record).word != "INCOMPLETE":
        return []
    states = dict.fromkeys(gap.state for gap in gaps(record))
    if not any(finding.required and finding.state == "not judged" for finding in record.findings):
        states.pop("not judged", None)
    found = dict.fromkeys(OTHERWISE[state] for state in states if state in OTHERWISE)
    steps, limits = [], ""
    if LIMITS in found:
        why = say("make limits of machines that are known to be good")
        steps.append(Step(why, "gpufleet calibrate DIR -o my.toml"))
        limits = "--fleet-profile my.toml"
    if any(each in WHOLE for each in found):
        nodes = f"--nodes {record.run.nodes_wanted or 'all'} " if record.of_cluster else ""
        whole = f"{nodes}--gpus {record.run.gpus} {_thoroughness(record)}"
        command = start.of_all(" ".join(filter(None, (whole, limits))))
    else:
        command = start.once_more(limits)
    return [*steps, Step(say(", ").join([say("run it again"), *map(say, found)]), command)]


def _thoroughness(record: Record) -> str:
    """The level, or the burn-in where a longer one was asked for than the level's own."""
    longer = record.run.burn_in_seconds > BURN_IN_SECONDS
    return f"--fleet-burn-in {record.run.burn_in_seconds:g}s" if longer else f"--fleet-level {record.run.level}"

"""Writes the folders of evidence in docs/results, from recorded runs: `python docs/make_results.py [RUN ...]`.

They are for everybody to try the commands of docs/commands.md on, so they are small: of each recorded run all events
stay, and of these is left out what no command reads, or what only makes pages long. Page and summary are those of
`gpufleet report`. RUN: other folders of runs, made with --fleet-alias, to be shortened in the same way, each to
docs/results/<its name>.
"""

import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pytest_gpufleet import cli
from pytest_gpufleet.run.folder import EVIDENCE, NODES
from pytest_gpufleet.safe_files import sha256

DOCS = Path(__file__).parent
RESULTS, RECORDED = DOCS / "results", DOCS.parent / "tests" / "recorded"
RUNS = {
    "2026-11-21-2x-h200-incomplete": "h200x2-f",
    "2026-11-21-4x-h200-rejected": "h200x4-a",
    "2026-11-23-2x-h200": "h200x2-g",
}
SAMPLES = 24  # of telemetry


def shortened(events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    events = list(events)
    sampled = [event for event in events if event["event"] == "telemetry"]
    kept = sampled[:: -(-len(sampled) // SAMPLES)] if sampled else []
    progress = {event.get("check"): event for event in events if event["event"] == "progress"}
    for event in events:
        match event["event"]:
            case "telemetry" if not any(event is each for each in kept):
                continue
            case "progress" if event is not progress[event.get("check")]:  # how far it came in the end
                continue
            case "check_finished":
                event.pop("telemetry", None)  # what the GPUs did meanwhile, by the samples
                if event["check"]["outcome"] != "failed":
                    event["check"]["doc"] = ""
        yield event


def publish(run: Path, folder: Path) -> None:
    """Write the folder anew, from the evidence of a run; of one on many nodes also theirs."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sums = {}
    for own in sorted((run / NODES).glob("*")):
        publish(own, folder / NODES / own.name)
        sums[int(own.name.partition("-")[0])] = sha256(folder / NODES / own.name / EVIDENCE)
    with (folder / EVIDENCE).open("w", encoding="utf-8") as file:
        for event in shortened(map(json.loads, (run / EVIDENCE).read_text(encoding="utf-8").splitlines())):
            if event["event"] == "node_finished" and event["node"] in sums:
                event["sha256"] = sums[event["node"]]
            file.write(json.dumps(event, separators=(",", ":")) + "\n")
    if status := cli.main(["report", str(folder)]):
        sys.exit(status)


if __name__ == "__main__":
    given = {Path(name).resolve().name: Path(name) for name in sys.argv[1:]}
    for name, run in (given or {name: RECORDED / run for name, run in RUNS.items()}).items():
        publish(run, RESULTS / name)

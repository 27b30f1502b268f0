"""The folders of the nodes' own runs, brought to that of the run of all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from pytest_gpufleet.nodes.cluster import Trouble
from pytest_gpufleet.nodes.messages import ReadFile
from pytest_gpufleet.run.folder import EVIDENCE, JUNIT, REPORT, SUMMARY
from pytest_gpufleet.run.node_runs import NodeRun, NodeRuns
from pytest_gpufleet.safe_files import sha256

if TYPE_CHECKING:
    from pytest_gpufleet.nodes.cluster import Cluster
    from pytest_gpufleet.run.interruption import Interruption

BROUGHT = (EVIDENCE, SUMMARY, JUNIT, REPORT)  # what proves most comes first
PART_BYTES = 1 << 20  # of a file at most
AT_ONCE = 4  # files: their parts fill the memory three times over
PART_SECONDS = 10.0
FETCH_SECONDS = 120.0  # for all of all nodes: about 2 MB each at level standard
HASTE_SECONDS = 8.0  # of a run that was told to end
UNFETCHED = ".part"
TURN_SECONDS = 0.5  # between two looks at whether the run was told to end


def collect(cluster: Cluster, runs: NodeRuns, interruption: Interruption, wait_seconds: float) -> dict[int, str]:
    """Bring here what the nodes' own runs have left: the SHA-256 of the evidence of each, "" if it is not here. Runs
    that go on are waited for so long, but not by a run that is told to end. Of one that did not end, and of a node that
    is gone, what it had told by then is left."""
    until = time.monotonic() + wait_seconds
    while runs.at_work() and time.monotonic() < until and not interruption.heard:
        runs.listen(min(TURN_SECONDS, until - time.monotonic()))
    runs.listen(0.0)
    fetched = _fetched(cluster, runs, interruption, FETCH_SECONDS if wait_seconds else HASTE_SECONDS)
    digests = {}
    for node, each in runs.all.items():
        digests[node] = sha256(each.folder.evidence) if node in fetched or each.taken_over else ""
        if not digests[node]:
            _note(each)
    return digests


def _fetched(cluster: Cluster, runs: NodeRuns, interruption: Interruption, seconds: float) -> set[int]:
    """The nodes whose evidence was brought here as a whole, within so many seconds, or HASTE_SECONDS from when the run
    is told to end. Some files come at a time, so that nodes that answer late, or not at all, hold up few others; what
    is left on nodes that were lost comes last."""
    until, hurried = time.monotonic() + seconds, False
    owed = [
        (each, name)
        for each in runs.all.values()
        if each.ended is not None and not each.taken_over
        for name in BROUGHT
        if each.ended.files.get(name)
    ]
    owed.sort(key=lambda file: (file[0].lost is not None, BROUGHT.index(file[1])))
    whole, given_up = set[int](), set[int]()

    def left() -> float:
        nonlocal until, hurried
        if interruption.heard and not hurried:
            until, hurried = min(until, time.monotonic() + HASTE_SECONDS), True
        return max(0.0, until - time.monotonic())

    def bring(each: NodeRun, name: str) -> None:
        if each.node in given_up or not left():
            return
        if not _brought(cluster, each, name, left):
            given_up.add(each.node)
        elif name == EVIDENCE:
            whole.add(each.node)

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="gpufleet folders") as threads:
        list(threads.map(bring, [each for each, _ in owed], [name for _, name in owed]))
    return whole


def _brought(cluster: Cluster, run: NodeRun, name: str, left: Callable[[], float]) -> bool:
    """Whether this file is here now. `left()`: seconds for it."""
    assert run.ended is not None
    temporary, here = run.folder / f"{name}{UNFETCHED}", 0
    try:
        with temporary.open("wb") as file:
            while here < run.ended.files[name]:
                part = cluster.ask_one(run.node, ReadFile(name, here, PART_BYTES), min(PART_SECONDS, left()))
                if not part:
                    raise Trouble("it has become shorter")
                here += file.write(part)
        temporary.replace(run.folder / name)
    except (OSError, Trouble):  # a full disk, a node that is gone: the verdict says that it is not here
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        return False
    return True


def _note(run: NodeRun) -> None:
    """Say in what is left of its evidence that it is not all."""
    if run.lost is not None:
        why = f"the node was lost: {run.lost.why}"
    else:
        why = "its files could not be brought here" if run.ended else "the run of all nodes ended before it"
    told = f"{why}; this is what it had told by then, without telemetry"
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    if run.record.verdict is None and run.record.began:
        with suppress(OSError), run.folder.evidence.open("a") as file:
            file.write(json.dumps({"t": now, "event": "spoiled", "why": told}) + "\n")

"""The folders of the nodes' own runs, brought to that of the run of all."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from pytest_gpufleet.nodes.messages import ReadFile
from pytest_gpufleet.run.folder import EVIDENCE, JUNIT, REPORT, SUMMARY
from pytest_gpufleet.run.node_runs import NodeRun
from pytest_gpufleet.safe_files import sha256
from pytest_gpufleet.verdict import node_verdicts

if TYPE_CHECKING:
    from pytest_gpufleet.nodes.cluster import Cluster
    from pytest_gpufleet.run.cluster_run import ClusterRun

BROUGHT = (EVIDENCE, SUMMARY, JUNIT, REPORT)  # what proves most comes first
PART_BYTES = 1 << 20  # of a file at most
ALL_PARTS_BYTES = 4 << 20  # of all nodes: they come at the same time, and fill the memory three times over
LEAST_BYTES = 32 << 10
PART_SECONDS = 10.0
FETCH_SECONDS = 120.0  # for all of all nodes: about 2 MB each at level standard
HASTE_SECONDS = 8.0  # of a run that was told to end
UNFETCHED = ".part"


def collect(run: ClusterRun, wait_seconds: float) -> None:
    """Bring here what the nodes' own runs have left, and record what each came to. Runs that go on are waited for so
    long. Of one that did not end, and of a node that is gone, what it had told by then is left."""
    until = time.monotonic() + wait_seconds
    runs = run.node_runs
    while runs.at_work() and time.monotonic() < until:
        runs.listen(until - time.monotonic())
    runs.listen(0.0)
    fetched = _fetched(run.cluster, runs.all.values(), FETCH_SECONDS if wait_seconds else HASTE_SECONDS)
    for each in runs.all.values():
        digest = sha256(each.folder.evidence) if each.node in fetched or each.taken_over else ""
        if not digest:
            _note(each)
        name = run.earlier_names.get(each.node, "") if each.taken_over else each.ended.run if each.ended else ""
        run.record_event("node_finished", **node_verdicts.finished(each.node, name, each.record, digest))


def _fetched(cluster: Cluster, runs: Iterable[NodeRun], seconds: float) -> set[int]:
    """The nodes whose evidence was brought here as a whole. A part of each node at a time, so that none waits for all
    of another."""
    until = time.monotonic() + seconds
    owed = {
        run.node: [(name, run.ended.files[name]) for name in BROUGHT if run.ended.files.get(name)]
        for run in runs
        if run.ended is not None and not run.taken_over
    }
    folders, offsets, whole = {run.node: run.folder for run in runs}, dict.fromkeys(owed, 0), set()
    while owed and time.monotonic() < until:
        most = max(LEAST_BYTES, min(PART_BYTES, ALL_PARTS_BYTES // len(owed)))
        questions = {node: ReadFile(files[0][0], offsets[node], most) for node, files in owed.items() if files}
        answers = cluster.ask_each(questions, min(PART_SECONDS, until - time.monotonic()))
        for node in list(owed):
            part = answers.get(node)
            if not isinstance(part, bytes) or not part:  # nothing is left, or nobody answers
                del owed[node]
                continue
            name, size = owed[node][0]
            temporary = folders[node] / f"{name}{UNFETCHED}"
            offsets[node] += len(part)
            try:
                with temporary.open("ab") as file:
                    file.write(part)
                if offsets[node] >= size:
                    temporary.replace(folders[node] / name)
            except OSError:  # a full disk: the verdict says that it is not here
                del owed[node]
                continue
            if offsets[node] >= size:
                whole |= {node} if name == EVIDENCE else set()
                offsets[node] = 0
                del owed[node][0]
    return whole


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

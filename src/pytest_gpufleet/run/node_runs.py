"""The nodes' own runs as the controller of all hears of them: what each has come to, check by check."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pytest_gpufleet.model import events
from pytest_gpufleet.model.events import NodeFound
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import Suite
from pytest_gpufleet.nodes.cluster import Cluster, Lost, Trouble
from pytest_gpufleet.nodes.messages import ReadFile, RunSuite, SuiteEnded, SuiteNews
from pytest_gpufleet.redaction import ALIAS_KEY
from pytest_gpufleet.run.folder import EVIDENCE, JUNIT, NODES, REPORT, SUMMARY, RunFolder
from pytest_gpufleet.run.interruption import Interruption
from pytest_gpufleet.safe_files import sha256
from pytest_gpufleet.verdict import reading
from pytest_gpufleet.verdict.fleet.host_runs import HostRun, kept

START_SECONDS = 60.0  # for a process to be there, on a node that may be busy
OF_ITS_OWN = ("samples", "details")  # of a figure: nobody asks for them before its node's own evidence is here


@dataclass
class NodeRun:
    """The run of a node alone. `folder`: where the controller keeps what it has of it. `record`: of what it has told
    so far, which has no telemetry. `damage`: why the rest of what it told counts for nothing. `taken_over`: it was
    made when an earlier run on all nodes was, which this one goes on with."""

    node: int
    host: str
    folder: RunFolder
    record: Record = field(default_factory=Record)
    ended: SuiteEnded | None = None
    lost: Lost | None = None
    damage: str = ""
    taken_over: bool = False
    told: bool = False  # how it ended

    @property
    def at_work(self) -> bool:
        """Whether there is more to come."""
        return self.ended is None and self.lost is None and not self.damage

    @property
    def fit(self) -> bool:
        """Whether its node takes part in checks between nodes. A rehearsal is treated as a real run would be."""
        return self.ended is not None and self.record.verdict is not None and self.record.exit_status != 1

    def hear(self, lines: Collection[bytes]) -> None:
        """Take in more of its evidence. It is kept as it came: a node that is lost leaves nothing else. If it cannot be
        kept (a full disk), the file of the node itself may still come in the end."""
        with suppress(OSError), self.folder.evidence.open("ab") as file:
            file.writelines(line + b"\n" for line in lines)
        for line in lines:
            try:
                if not self.damage:
                    reading.add(self.record, events.typed(events.parsed(line, _of_one_of_many)))
            except ValueError as error:
                self.damage = f"it told what is no event of a run ({error})"


def _of_one_of_many(content: dict[str, Any]) -> dict[str, Any]:
    """What one node tells, most tell in the same words: each text is kept once. It is half of the memory."""
    return {
        name: sys.intern(value) if isinstance(value, str) else value
        for name, value in content.items()
        if name not in OF_ITS_OWN
    }


class NodeRuns:
    """Of all nodes, by their numbers; of none before `start`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.all: dict[int, NodeRun] = {}
        self._suites: list[Suite] = []  # that their records share

    def take_over(
        self, earlier: Mapping[int, RunFolder], nodes: Iterable[NodeFound], folder: RunFolder, checks: Collection[str]
    ) -> None:
        """Have the runs in these folders count as those of their nodes, if they did all of these checks. `folder`: of
        the run of all, which gets a copy of each."""
        for node in nodes:
            if node.index not in earlier:
                continue
            record = earlier[node.index].record()
            if record.checks.keys() >= {*checks}:
                own = folder.of_node(node)
                shutil.copytree(earlier[node.index].path, own.path)
                ended = SuiteEnded(record.exit_status or 0, "", "", {})
                whole = kept(record, self._suites, node.host)
                self.all[node.index] = NodeRun(node.index, node.host, own, whole, ended, taken_over=True)

    def start(
        self, arguments: Mapping[int, tuple[str, ...]], nodes: Iterable[NodeFound], folder: RunFolder
    ) -> dict[int, str]:
        """Start a run on each of these nodes, with these arguments of pytest. `folder`: of the run of all. Why it could
        not be started, of those nodes of which that is so: they have none."""
        for node in nodes:
            if node.index in arguments and node.index not in self.all:
                own = folder.of_node(node)
                own.path.mkdir(parents=True)
                self.all[node.index] = NodeRun(node.index, node.host, own)
        started = [node for node, run in self.all.items() if not run.taken_over]
        key = {ALIAS_KEY: os.environ[ALIAS_KEY]} if ALIAS_KEY in os.environ else {}
        questions = {node: RunSuite(arguments[node], os.getcwd(), key) for node in started}
        answers = self._cluster.ask_each(questions, START_SECONDS)
        lost = self._cluster.lost
        troubles = {
            node: str(answer) for node, answer in answers.items() if isinstance(answer, Trouble) and node not in lost
        }
        for number in troubles:
            shutil.rmtree(self.all.pop(number).folder.path, ignore_errors=True)
        return troubles

    def listen(self, timeout: float) -> None:
        """Take in what has come, as soon as anything has."""
        for node, news in self._cluster.suite_news(timeout):
            run = self.all.get(node)
            if run is None:
                continue
            match news:
                case SuiteNews(lines=lines):
                    run.hear(lines)
                case SuiteEnded():
                    run.ended = news
                    if run.record.verdict is not None:  # what it measured in all its samples is in its own evidence
                        run.record = kept(run.record, self._suites, run.host)
                case Lost():
                    run.lost = news

    def of_hosts(self) -> dict[int, HostRun]:
        """What each has come to by now, of those that have told what they are. What has ended was kept then: to do that
        anew for 500 nodes takes seconds, and checks between nodes ask again and again."""
        return {
            node: HostRun(
                f"{NODES}/{run.folder.name}",
                "",
                run.record
                if run.ended and run.record.verdict is not None
                else kept(run.record, self._suites, run.host),
            )
            for node, run in self.all.items()
            if run.record.machines
        }

    def at_work(self, check: str = "") -> list[NodeRun]:
        """Those that have not done this check yet; without one, those that have not ended."""
        return [run for run in self.all.values() if run.at_work and check not in run.record.checks]


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
    text = f"{why}; this is what it had text by then, without telemetry"
    if run.record.verdict is None and run.record.began:
        with suppress(OSError), run.folder.evidence.open("a") as file:
            file.write(events.line(events.Spoiled(t=events.now(), why=text)) + "\n")

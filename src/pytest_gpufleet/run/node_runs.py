"""The nodes' own runs as the controller of all hears of them, and their folders, which are brought here."""

import gc
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import get_args

from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.events import NodeFinished, NodeFound, Outcome, VerdictWord
from pytest_gpufleet.model.place import grouped
from pytest_gpufleet.nodes.cluster import Cluster
from pytest_gpufleet.nodes.messages import CheckEnded, Pulse, ReadFile, RunSuite, SuiteEnded
from pytest_gpufleet.redaction import ALIAS_KEY
from pytest_gpufleet.run.folder import EVIDENCE, JUNIT, NODES, REPORT, SUMMARY, TEXT, RunFolder
from pytest_gpufleet.run.interruption import Interruption
from pytest_gpufleet.safe_files import sha256
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.fleet.host_runs import Common, HostRun, read_own
from pytest_gpufleet.world.engines.processes import exit_summary

BROUGHT = (EVIDENCE, SUMMARY, JUNIT, REPORT, TEXT)  # what proves most comes first
PART_BYTES = 1 << 18  # of a file at most
AT_ONCE = 4  # nodes: their parts fill the memory three times over
HASTE_SECONDS = 8.0  # for all, of a run that was told to end
RAN: tuple[Outcome, ...] = ("passed", "failed")
TURN_SECONDS = 0.5  # between two looks at whether the run was told to end


@dataclass
class NodeRun:
    """The run of a node alone."""

    node: int
    host: str
    folder: RunFolder  # where its files are brought
    outcomes: Counter[Outcome] = field(default_factory=Counter)  # of the checks that have ended
    ended: SuiteEnded | None = None
    lost: str | None = None  # why, if it was
    digest: str = ""  # the SHA-256 of its evidence, once that is here
    taken_over: bool = False  # from an earlier run on all nodes, with which this one goes on
    hung: str = ""  # why nobody waits for it any more
    heard: float = 0.0  # when the last of its checks ended, in seconds of listening
    steps: list[float] = field(default_factory=list)  # what each took, NaN of one that did not run; then its end

    @property
    def at_work(self) -> bool:
        return self.ended is None and self.lost is None and not self.hung

    @property
    def died(self) -> str:
        """How it ended without a verdict; "" if it has not."""
        if self.ended is None or self.verdict is not None:
            return ""
        return f"its own run ended {exit_summary(self.ended.exit_status)}{self.ended.trouble}"

    @property
    def verdict(self) -> VerdictWord | None:
        return self.ended.verdict if self.ended else None

    @property
    def fit(self) -> bool:
        """Whether its node takes part in checks between nodes. A rehearsal is treated as a real run would be."""
        return self.ended is not None and self.verdict is not None and self.ended.exit_status != 1

    @property
    def text(self) -> str:
        """ "gf1: 214 passed, 1 failed, REJECTED" """
        counts = [f"{self.outcomes[each]} {each}" for each in get_args(Outcome) if self.outcomes[each]]
        end = self.verdict or self.died or (f"lost: {self.lost}" if self.lost else self.hung or "has not ended")
        return f"{self.host}: {', '.join([*counts, end])}"

    def finished(self, own: HostRun | None) -> NodeFinished:
        """What evidence says of it. `own`: as its evidence here has it, None if it is not here."""
        if self.ended is None:
            return NodeFinished(node=self.node, run="", verdict=None)
        end, lowest = self.ended, basis.lowest(own.record) if own else None
        return NodeFinished(
            node=self.node, run=end.run, verdict=end.verdict, reasons=end.reasons, basis=lowest,
            exit_status=end.exit_status if end.verdict else None, sha256=self.digest,
        )  # fmt: skip


def usual(step: int, nodes: Sequence[Sequence[float]]) -> float:
    """What this step took the nodes that did it, in the median; infinite if these are less than a quarter, which is
    still enough where a check hangs on most of them. Those on which a check does not apply tell nothing of its time."""
    took = [steps[step] for steps in nodes if len(steps) > step and not math.isnan(steps[step])]
    return median(took) if took and 4 * len(took) >= len(nodes) else math.inf


class NodeRuns:
    """Of all nodes, by their numbers; of none before `start`. `folder`: of the run of all."""

    def __init__(self, cluster: Cluster, folder: RunFolder) -> None:
        self._cluster = cluster
        self._folder = folder
        self.all: dict[int, NodeRun] = {}
        self.own: dict[int, HostRun] = {}  # those whose evidence is here, and was read
        self._common = Common()
        self._until = float("inf")  # nothing is waited for after this
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="gpufleet folders")
        self._coming: dict[int, Future[None]] = {}

    def start(
        self, arguments: tuple[str, ...], nodes: Iterable[NodeFound], directory: str,
        earlier: Mapping[int, tuple[str, RunFolder]] = {}, checks: Collection[str] = (),
    ) -> dict[int, str]:  # fmt: skip
        """Start a run on each of these nodes, with these arguments of pytest, but where an `earlier` one (its name and
        folder) did all of the `checks`: that counts as the node's. Why it could not be, of nodes without."""
        for node in nodes:
            run = NodeRun(node.index, node.host, self._folder.of_node(node), heard=self._cluster.listening.seconds)
            self.all[node.index] = run
            name, folder = earlier.get(node.index, ("", None))
            if folder is None or not (record := folder.record()).checks.keys() >= {*checks}:
                run.folder.path.mkdir(parents=True, exist_ok=True)
                continue
            shutil.copytree(folder.path, run.folder.path)
            run.ended = SuiteEnded(record.exit_status or 0, "", name, {}, record.verdict, tuple(record.reasons))
            run.outcomes.update(check.outcome for check in record.checks.values())
            run.digest, run.taken_over = sha256(run.folder.evidence), True
        key = {ALIAS_KEY: os.environ[ALIAS_KEY]} if ALIAS_KEY in os.environ else {}
        asked = [node for node, run in self.all.items() if not run.taken_over]
        _, failed = self._cluster.ask_each(dict.fromkeys(asked, RunSuite(arguments, directory, key)), 60.0)
        troubles = {node: why for node, why in failed.items() if node not in self._cluster.lost}
        for number in troubles:
            shutil.rmtree(self.all.pop(number).folder.path, ignore_errors=True)
        return troubles

    def listen(self, timeout: float) -> list[NodeRun]:
        """Take in what has come, as soon as anything has, and have files brought here. The runs that are newly over."""
        over = []
        for node, news in self._cluster.take(self._cluster.suite_news, timeout):
            if (run := self.all.get(node)) is None:
                continue
            if run.at_work and not isinstance(news, CheckEnded):
                over.append(run)
            now, ran = self._cluster.listening.seconds, not isinstance(news, CheckEnded) or news.outcome in RAN
            run.steps.append(now - run.heard if ran else math.nan)
            run.heard = now
            match news:
                case CheckEnded(outcome=outcome):
                    run.outcomes[outcome] += 1
                case SuiteEnded():
                    run.ended = news
                    self._coming[node] = self._threads.submit(self._bring, run)
                case str():
                    run.lost = news
        return over

    def hung(self, seconds: float, checks: int) -> list[NodeRun]:
        """Those that newly are at a step for so much longer than the others were, and than five times what these took:
        nobody waits for them any more. Not behind runs that ended (-x) where they go on, before all `checks`."""
        now, found = self._cluster.listening.seconds, []
        late = [run for run in self.all.values() if run.at_work and now - run.heard > seconds]
        for step, runs in grouped((len(run.steps), run) for run in late).items():
            others = [of for of in self.all.values() if not (of.taken_over or of.hung or of.lost or of.died)]
            took = usual(step, [of.steps for of in others if not (of.ended and step >= of.outcomes.total() < checks)])
            for run in runs:
                if (waited := now - run.heard) - took > max(seconds, 5 * took):
                    at = self._cluster.pulses.get(run.node, Pulse()).check or "its end"
                    run.hung = f"its own run has been at {at} for {waited:.0f} s, which took others {took:.0f} s"
                    found.append(run)
        return found

    def read(self) -> list[NodeRun]:
        """Read the evidence that has come since the last time: the runs of which that was."""
        found = []
        for node, run in self.all.items():
            if run.digest and node not in self.own:
                gc.disable()  # all that is read stays, and refers to nothing that refers to it
                try:
                    record = read_own(run.folder.evidence, self._common, run.host)
                    self.own[node] = HostRun(f"{NODES}/{run.folder.name}", run.digest, record)
                    found.append(run)
                except (OSError, ValueError, Refused):  # somebody changed it there
                    run.digest = ""
                finally:
                    gc.enable()
        return found

    def settle(self, interruption: Interruption, again: bool = False) -> None:
        """Wait until files of all that ended are here, or cannot be had. `again`: try once more, lost nodes last."""
        owed = [run for run in self.all.values() if again and run.ended and not run.digest]
        for run in sorted(owed, key=lambda run: run.lost is not None):
            if self._coming[run.node].done():
                self._coming[run.node] = self._threads.submit(self._bring, run)
        left = {*self._coming.values()}
        while left:
            if interruption.heard:
                self._until = min(self._until, time.monotonic() + HASTE_SECONDS)
            left = wait(left, TURN_SECONDS).not_done

    def close(self) -> None:
        self._until = 0.0
        self._threads.shutdown(cancel_futures=True)

    def _bring(self, run: NodeRun) -> None:
        """A full disk, a node that is gone: the verdict says that a file is not here."""
        assert run.ended is not None
        for name in BROUGHT:
            temporary, here = run.folder / f"{name}.part", 0
            if not (size := run.ended.files.get(name)):
                continue
            try:
                with temporary.open("wb") as file:
                    while here < size:
                        seconds = min(10.0, max(0.0, self._until - time.monotonic()))
                        question = {run.node: ReadFile(name, here, PART_BYTES)}
                        found, _ = self._cluster.ask_each(question, seconds, also_lost=True)
                        if not (part := found.get(run.node)):
                            raise OSError("the node does not answer, or the file has become shorter")
                        here += file.write(part)
                temporary.replace(run.folder / name)
            except OSError:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
                return
            if name == EVIDENCE:
                run.digest = sha256(run.folder.evidence)

"""Tests of one machine in a run on many nodes. Each node runs them by itself, and here they are what all came to."""

import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import Literal

import pytest

from pytest_gpufleet.model.endings import NotApplicable
from pytest_gpufleet.model.events import Check, CheckStarted
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.language import some
from pytest_gpufleet.model.place import Place
from pytest_gpufleet.nodes.messages import Pulse
from pytest_gpufleet.plugin import compat, listeners, markers, options
from pytest_gpufleet.plugin.check_outcome import FailedOnNodes
from pytest_gpufleet.plugin.terminal import SCREEN
from pytest_gpufleet.report.terminal.live import NodeNow, NodesNow
from pytest_gpufleet.run.cluster_run import ClusterRun
from pytest_gpufleet.run.node_runs import NodeRun
from pytest_gpufleet.run.settings import Options
from pytest_gpufleet.verdict.node_verdicts import faults_of, findings_of, outcome_of_all
from pytest_gpufleet.world.engines.processes import exit_summary

# With which arguments pytest runs on each node of a run on many: those of this run, but for what is about all of them
# and for what has been done by then.

# What is about the run of all nodes, where files of this machine go, and which tests are run: these are given by name.
WITH_A_VALUE = (
    "--nodes", "--gpus", "--fleet-address", "--fleet-dir", "--fleet-keep", "--fleet-deadline", "--fleet-resume",
    "--fleet-prometheus",
    "--html", "--junitxml", "--junit-xml", "--rootdir", "-c", "--config-file", "-k", "-m", "--deselect", "--ignore",
    "--ignore-glob", "--maxfail", "--basetemp", "--pastebin", "--log-file", "--debug", "--report-log",
)  # fmt: skip
SHORT = tuple(option for option in WITH_A_VALUE if len(option) == 2)  # a value may be in one piece with it: -kslow
WITHOUT = (
    "--fleet-insecure", "--fleet-monitor", "-x", "--exitfirst", "--lf", "--last-failed", "--ff", "--failed-first",
    "--nf", "--new-first", "--sw", "--stepwise", "--sw-skip", "--stepwise-skip", "--sw-reset", "--stepwise-reset",
    "--pyargs", "--pdb", "--trace", "--rehearse",
)  # fmt: skip


def arguments(config: pytest.Config, options: Options, items: Sequence[pytest.Item]) -> tuple[str, ...]:
    """`items`: the tests of one machine, in their order."""
    given = [*shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), *config.getini("addopts")]
    given += map(str, config.invocation_params.args)
    target = f"--rehearse={options.rehearse}" if options.rehearse else f"--gpus={options.gpus}"
    ini_file = [f"-c={config.inipath}"] if config.inipath else []
    # Where pytest's cache is here, whichever folder ids count from: there it would be another file of a package.
    cached = config.pluginmanager.hasplugin("cacheprovider")
    cache = [f"-o=cache_dir={config.rootpath / config.getini('cache_dir')}"] if cached else []
    paths = {str(path) for path in config.option.file_or_dir}
    return (
        *kept(given, paths),
        target,
        f"--rootdir={_root(items[0])}",
        *ini_file,
        *cache,
        "-o=addopts=",
        "--maxfail=0",  # -x may stand in one piece with other letters
        *(f"{item.path}{item.nodeid.removeprefix(item.nodeid.partition('::')[0])}" for item in items),
    )


def kept(given: Sequence[str], paths: Collection[str]) -> Iterator[str]:
    """`given` without the options above, with their values, and without `paths`."""
    left_out = False
    for argument in given:
        option, equals, _ = argument.partition("=")
        if left_out:
            left_out = False
        elif option in WITH_A_VALUE:
            left_out = not equals
        elif option not in WITHOUT and argument not in paths and not argument.startswith(SHORT):
            yield argument


def _root(item: pytest.Item) -> Path:
    """The folder from which the path in a node id counts: pytest's own, but for what --pyargs finds elsewhere. Those
    count from what pytest was given, which on a node is each file by itself."""
    file = PurePath(item.nodeid.partition("::")[0])
    counts_from = item.path.parents[len(file.parts) - 1]
    return counts_from if counts_from / file == item.path else item.config.rootpath


def nodes_now(run: ClusterRun) -> NodesNow:
    """May be called from any thread."""
    assert run.evidence is not None
    record, cluster = run.evidence.record, run.cluster
    latest = record.started[-1] if record.started else ""
    check = "" if latest in record.checks else latest
    late = {own.node for own in run.node_runs.at_work(check)} if check and run.alone else set()
    gone = {**dict.fromkeys(cluster.left_out, "left out"), **dict.fromkeys(cluster.lost, "lost")}
    pulses = cluster.pulses
    nodes = []
    for node, host in run.target.hosts.items():
        pulse = pulses.get(node, Pulse())
        doing = "" if node in gone else pulse.check or _without_a_check(run, node)
        wrong = gone.get(node) or _failed(run, node)
        nodes.append(NodeNow(host, doing, wrong, node in late and node not in gone, pulse.hottest_c, pulse.watts))
    return NodesNow(check, nodes)


def _failed(run: ClusterRun, node: int) -> str:
    """How many checks of its own run have failed so far."""
    own = run.node_runs.all.get(node)
    count = sum(check.outcome == "failed" for check in list(own.record.checks.values())) if own else 0
    return f"{count} failed" if count else ""


def _without_a_check(run: ClusterRun, node: int) -> str:
    if not run.alone:
        return "works with the others"
    own = run.node_runs.all.get(node)
    return "starts" if own is None or own.at_work else "has done its own checks"


Phase = Literal["setup", "call", "teardown"]
MOST_NAMES = 8  # of hosts in one line
MOST_MESSAGES = 4  # of one check


class Mirrors:
    def __init__(self, run: ClusterRun) -> None:
        self._run = run
        self._seconds = 0.0  # that the last one took on the slowest node

    @pytest.hookimpl(trylast=True)  # when the terminal is there
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Show what the nodes are at, if this is a terminal: one line, or with --fleet-monitor one of each."""
        rows = len(self._run.cluster.names) if self._run.options.monitor else 0
        now = partial(nodes_now, self._run)
        session.config.stash[SCREEN].draw_nodes(now, rows, session.config, self._run.open_things)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Start the nodes' own runs, with what was selected here."""
        mirrored = [item for item in session.items if not markers.is_between_nodes(item)]
        if mirrored and not session.testsfailed:
            given = arguments(session.config, self._run.options, mirrored)
            with options.refusals():
                self._run.start_alone(given, [item.nodeid for item in mirrored])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if markers.is_between_nodes(item):
            self._run.begin_between()
            return None
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self._report(item, "setup", self._begin)
        self._report(item, "call", self._see)
        self._report(item, "teardown", lambda item: None)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _report(self, item: pytest.Item, when: Phase, phase: Callable[[pytest.Item], None]) -> None:
        """As pytest does it, but that no fixture is set up and none torn down."""
        call = pytest.CallInfo.from_call(lambda: phase(item), when, (pytest.exit.Exception, KeyboardInterrupt))
        call.duration = self._seconds if when == "call" else 0.0
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        item.ihook.pytest_runtest_logreport(report=report)

    def _begin(self, item: pytest.Item) -> None:
        self._run.interruption.before_test()
        self._run.record(CheckStarted(check=item.nodeid))

    def _see(self, item: pytest.Item) -> None:
        """End as the check did on the nodes."""
        run, check = self._run, item.nodeid
        there = [each for each in run.node_runs.all.values() if each.node not in run.recorded_lost]
        self._seconds = 0.0
        run.wait_alone(check)
        done = {each.node: each.record.checks[check] for each in there if check in each.record.checks}
        self._seconds = max((each.seconds for each in done.values()), default=0.0)
        not_done = run.lost_nodes(check, [each.node for each in there if each.lost is not None])
        not_done += [_not_run(each, check) for each in there if each.node not in done and each.lost is None]
        faults = [*not_done, *(fault for each in there for fault in _found(each, check))]
        for fault in faults:
            run.accuse(fault)
        for each in there:
            for finding in findings_of(each.node, each.record, check):
                listeners.announce_finding(item, finding)
        failed = {node: each.message for node, each in done.items() if each.outcome == "failed"}
        if failed or not_done:
            named = self._run.target.topology.identity
            texts = ["\n".join(filter(None, (fault.told(named), fault.story))) for fault in not_done]
            if failed:  # what the first of them say, for each node's own report has it all
                texts.append(f"failed on {len(failed)} of {len(there)} nodes: {self._names([*failed])}")
                texts += self._by_message(failed)[:MOST_MESSAGES]
            raise FailedOnNodes("\n\n".join(texts))
        self._end_without_failure(item, done)

    def _end_without_failure(self, item: pytest.Item, done: Mapping[int, Check]) -> None:
        if not done:
            raise compat.skip_of_the_test("no node is left that could run it")
        others = self._by_message({node: each.message for node, each in done.items() if each.outcome != "passed"})
        outcome = outcome_of_all(each.outcome for each in done.values())
        if outcome == "passed":
            if others:
                item.add_report_section("call", "on some nodes", "\n\n".join(others))
            return
        alike = {each.message for each in done.values() if each.outcome == outcome}
        text = alike.pop() if len(alike) == 1 and len(others) == 1 else "\n".join(others)
        raise NotApplicable(text) if outcome == "not applicable" else compat.skip_of_the_test(text)

    def _by_message(self, messages: Mapping[int, str]) -> list[str]:
        """ "node1, node2: no such thing": what nodes say, those together that say the same."""
        nodes = grouped((message, node) for node, message in messages.items())
        return [f"{self._names(those)}: {message}" for message, those in nodes.items()]

    def _names(self, nodes: Sequence[int]) -> str:
        return some([self._run.target.hosts[node] for node in nodes], MOST_NAMES)


def _found(run: NodeRun, check: str) -> list[Fault]:
    """What a check found on a node: at the node itself, if nothing else is known of why it failed."""
    found, own = faults_of(run.node, run.record, check), run.record.checks.get(check)
    if found or own is None or own.outcome != "failed":
        return found
    return [Fault("check_failed", (Place(run.node, "node"),), own.message.partition("\n")[0], "", check)]


def _not_run(run: NodeRun, check: str) -> Fault:
    """That a check was not run on a node on which pytest is no longer there. What it printed is shown once."""
    how, story = run.damage, ""
    if run.ended is not None:
        how = how or f"its own run had ended {exit_summary(run.ended.exit_status)}"
        story, run.told = ("" if run.told else run.ended.output), True
    return Fault("check_failed", (Place(run.node, "node"),), f"not run there: {how}", story, check)

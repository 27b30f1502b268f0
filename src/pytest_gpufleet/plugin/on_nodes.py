"""A run on many nodes: each runs the tests of one machine as if it were alone; here are only those between nodes."""

import os
import shlex
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from statistics import median_low
from typing import Any

import pytest

from pytest_gpufleet.machine.rdma import REACH
from pytest_gpufleet.model.fault import Fault, Faults
from pytest_gpufleet.model.language import some
from pytest_gpufleet.model.place import Place
from pytest_gpufleet.nodes import network
from pytest_gpufleet.plugin import markers, options
from pytest_gpufleet.plugin.terminal import SCREEN
from pytest_gpufleet.run.cluster_run import ClusterRun
from pytest_gpufleet.run.settings import Options
from pytest_gpufleet.world.failure import RankFailure

# With which arguments pytest runs on each node: those of this run, but for what is about all of them, and where files
# of this machine go.
WITH_A_VALUE = (
    "--nodes", "--gpus", "--fleet-address", "--fleet-head", "--fleet-index", "--fleet-secret-file", "--fleet-join",
    "--fleet-hung", "--fleet-dir", "--fleet-keep", "--fleet-deadline", "--fleet-resume", "--fleet-prometheus",
    "--fleet-webhook", "--html", "--fleet-only-failed", "--fleet-requirements",
    "--junitxml", "--junit-xml", "--basetemp", "--pastebin", "--log-file", "--report-log",
)  # fmt: skip
WITHOUT = (
    "--fleet-insecure", "--fleet-monitor", "--lf", "--last-failed", "--ff", "--failed-first", "--nf", "--new-first",
    "--sw", "--stepwise", "--sw-skip", "--stepwise-skip", "--sw-reset", "--stepwise-reset", "--pdb", "--trace",
    "--rehearse",
)  # fmt: skip
MOST_NAMES = 6  # of nodes that are waited for


def arguments(config: pytest.Config, options: Options) -> tuple[str, ...]:
    given = [*shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), *config.getini("addopts")]
    given += map(str, config.invocation_params.args)
    target = f"--rehearse={options.rehearse}" if options.rehearse else f"--gpus={options.gpus}"
    return (*kept(given), target, "-o=addopts=", "-o=nodes=", "-o=fleet_requirements=")


def kept(given: Sequence[str]) -> Iterator[str]:
    """`given` without the options above, with their values."""
    arguments = iter(given)
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        if option in WITH_A_VALUE and not equals:
            next(arguments, None)
        elif option not in (*WITH_A_VALUE, *WITHOUT):
            yield argument


def now(run: ClusterRun) -> str:
    """What the run is at, how far most nodes are, and who is waited for. May be called from any thread."""
    record, runs = run.written.record, [*run.node_runs.all.values()]
    if run.alone and runs:
        done, late = median_low(own.outcomes.total() for own in runs), [own.host for own in runs if own.at_work]
        waiting = f", waiting for {some(late, MOST_NAMES)}" if 0 < len(late) < len(runs) else ""
        return f"each node by itself, {done} of {len(run.of_nodes)} checks{waiting}"
    latest = record.started[-1] if record.started else ""
    return latest if latest and latest not in record.checks else "no check is on"


def who_is_cut_off(run: ClusterRun, after_a_hang: bool = False) -> tuple[Fault, ...]:
    """Which nodes cannot reach each other; after a hang those that hang again, unless one is lost. The run goes on."""
    from pytest_gpufleet.probes.search import nodes  # which imports torch

    found = nodes.who_is_cut_off(run.cluster.alive, run.target.hosts, partial(network.reached, run.cluster))
    if after_a_hang and not found.faults and {spec.node for spec in run.ranks.pool.specs} <= {*run.cluster.alive}:
        found = nodes.who_hangs(run.ranks.world(with_group=True), run.tell)
    for node, why in found.left_out.items():
        run.leave_out(node, why)
    return found.faults


def who_cannot_write(run: ClusterRun, ports: Sequence[str]) -> tuple[Fault, ...]:
    """Which nodes cannot write to each other by RDMA through these ports. The run goes on without: NCCL would hang."""
    from pytest_gpufleet.probes.search import nodes

    hosts, alone = run.target.hosts, dict[int, str]()

    def reached(pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], str]:
        found = network.written(run.cluster, REACH, [way for a, b in pairs for way in ((a, b), (b, a))], ports)
        texts: dict[tuple[int, int], list[str]] = {pair: [] for pair in pairs}
        for (a, b), one in ((way, one) for way, each in found.items() for one in each if one.why):
            texts[min(a, b), max(a, b)].append(f"{hosts[a]} to {hosts[b]}, {one.why}")
            if one.alone is not None:
                alone[one.alone] = one.why
        return {pair: some(each, 2, "; ") for pair, each in texts.items()}

    found = nodes.who_is_cut_off(run.cluster.alive, hosts, reached, with_first=False)
    if alone:
        others = [node for node in run.cluster.alive if node not in alone]
        found = nodes.who_is_cut_off(others, hosts, reached, with_first=False)
    for node, why in {**alone, **found.left_out}.items():
        run.leave_out(node, why)
    return (*(Fault("node_cut_off", (Place(node, "node"),), why) for node, why in alone.items()), *found.faults)


class OnNodes:
    def __init__(self, run: ClusterRun) -> None:
        self._run = run

    @pytest.hookimpl(trylast=True)  # when the terminal is there
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Show what the nodes are at, if this is a terminal."""
        session.config.stash[SCREEN].draw_nodes(partial(now, self._run), session.config, self._run.open_things)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # when all others have chosen
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, object, object]:
        result = yield
        self._run.of_nodes = tuple(item.nodeid for item in items if not markers.is_between_nodes(item))
        items[:] = filter(markers.is_between_nodes, items)
        return result

    @pytest.hookimpl(wrapper=True, trylast=True)  # beside the body itself
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """A hang of ranks of several nodes becomes the nodes that cause it."""
        try:
            return (yield)
        except RankFailure as failure:
            specs, reports = self._run.ranks.pool.specs, failure.reports
            blamed = {specs[report.rank].node for report in reports if report.to_blame}
            meeting = failure.kind == "exception" and failure.what.startswith("process group")
            hang = failure.kind == "hang" and len(blamed) != 1
            if not (meeting or hang) or not (found := who_is_cut_off(self._run, after_a_hang=True)):
                raise
            raise Faults([found[0].changed(story=str(failure)), *found[1:]]) from None

    def pytest_report_collectionfinish(self, items: Sequence[pytest.Item]) -> str:
        alone, nodes = len(self._run.of_nodes), len(self._run.cluster.alive)
        return f"gpufleet: {alone} tests on each of {nodes} nodes by itself, {len(items)} between them"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Have each node make its own run, with what was selected here, before any test between them."""
        if session.testsfailed:
            return
        if self._run.of_nodes:
            given = arguments(session.config, self._run.options)
            with options.refusals():
                self._run.start_alone(given, str(session.config.invocation_params.dir))
        terminal: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        self._run.wait_alone(lambda run: terminal and terminal.write_line(run.text, red=not run.fit))

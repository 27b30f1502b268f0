"""Options, markers and hooks of pytest-gpufleet. Loaded in every pytest run, so what is heavy is imported late."""

import gc
import math
import os
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpufleet import lazy, redaction
from pytest_gpufleet.plugin import compat, fixtures, listeners, markers, options, supervision, terminal
from pytest_gpufleet.plugin.compat import MISSED, ON_RANKS, RUN, SUPERVISED
from pytest_gpufleet.plugin.markers import MARKERS, OF_THE_SUITE
from pytest_gpufleet.plugin.terminal import SCREEN, Screen
from pytest_gpufleet.run.run import Run

if TYPE_CHECKING:
    from pytest_gpufleet.model import events, fault, suite
    from pytest_gpufleet.plugin import assertions, on_nodes, report_files, spmd
    from pytest_gpufleet.run import cluster_run, lifetime
    from pytest_gpufleet.verdict import verdict
else:
    events, fault, suite = lazy("model", "events", "fault", "suite")
    assertions, on_nodes, report_files, spmd = lazy("plugin", "assertions", "on_nodes", "report_files", "spmd")
    cluster_run, lifetime = lazy("run", "cluster_run", "lifetime")
    (verdict,) = lazy("verdict", "verdict")

pytest_addoption = options.add


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(listeners.Hooks)
    # Of hooks that are called first, the last one registered is called first.
    for module in (fixtures, terminal, markers, supervision):
        pluginmanager.register(module, f"gpufleet-{module.__name__.rpartition('.')[2]}")


@pytest.hookimpl(tryfirst=True)  # before junitxml and pytest-html read their paths
def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS if config.option.markers else (*MARKERS, *OF_THE_SUITE):
        config.addinivalue_line("markers", marker)
    screen = config.stash[SCREEN] = Screen()
    asked = options.from_config(config)
    kind = cluster_run.ClusterRun if asked.nodes is not None and asked.makes_a_run else Run
    until = config.stash[SUPERVISED].until if SUPERVISED in config.stash else math.inf
    run = config.stash[RUN] = kind(asked, screen.tell, compat.prepare, until)
    run.hear_fault = partial(listeners.announce_fault, config)
    # Not pytest_unconfigure, which ends at the first plugin that fails, as they do when the terminal is gone.
    config.add_cleanup(run.interruption.pass_on)
    config.add_cleanup(run.close)  # this one first
    if run.options.asked:
        from pytest_gpufleet.plugin import selection

        config.pluginmanager.register(selection, "gpufleet-selection")
    if run.options.makes_a_run:
        if config.getoption("dist", "no") != "no":  # xdist sets it for -n too
            raise pytest.UsageError(
                "-n and --dist do not go together with --gpus or --rehearse: several workers would share the GPUs and "
                "spoil every measurement; leave them out, the ranks already run at the same time"
            )
        if parts := [name for name in config.getoption("plugins") if name.startswith("no:gpufleet")]:
            raise pytest.UsageError(f"a run takes all parts of pytest-gpufleet: leave out -p {parts[0]}")
        gc.disable()
        try:
            with options.refusals():
                _open(config, run)
        finally:
            gc.freeze()  # torch's 190,000 objects stay to the end: looking at them all takes 0.2 s each time
            gc.enable()


def _open(config: pytest.Config, run: Run) -> None:
    run.ranks.get_ready()  # first: it takes as long as all that is imported and collected here
    files = report_files.ReportFiles(run, config)
    lifetime.open_run(run, config.invocation_params.args)
    if SUPERVISED in config.stash:
        os.write(config.stash[SUPERVISED].pipe, os.fsencode(run.folder.path.absolute()))
    files.put_into_the_folder()
    # Of hooks that are called last, the first one registered is called last.
    config.pluginmanager.register(files, "gpufleet-report-files")
    if run.options.nodes is not None:
        assert isinstance(run, cluster_run.ClusterRun)
        config.pluginmanager.register(on_nodes.OnNodes(run), "gpufleet-on-nodes")


@pytest.hookimpl(trylast=True, optionalhook=True)
def pytest_metadata(metadata: dict[str, Any], config: pytest.Config) -> None:
    """What pytest-metadata took from the environment of a CI server and the command line, without secrets."""
    if options.from_config(config).asked:
        texts = {name: text for name, text in metadata.items() if isinstance(text, str)}
        metadata.update({name: redaction.variable(name, text) for name, text in texts.items()})


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, int | None, int | None]:
    """No hook that ends the session its own way makes a 0 of what the verdict is."""
    options.run_suite_by_package(config)
    try:
        status = yield
    except SystemExit as ended:
        if ended.code:
            raise
        status = 0
    run = config.stash.get(RUN, None)
    if status == 0 and run is not None and run.evidence is not None:
        return lifetime.INCOMPLETE if run.exit_status is None else run.exit_status
    return status


@pytest.hookimpl(tryfirst=True, optionalhook=True)  # before xdist's own answer
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto` means no workers: there is one set of GPUs."""
    return 0 if options.from_config(config).asked else None


def pytest_sessionstart(session: pytest.Session) -> None:
    config, run, screen = session.config, session.config.stash[RUN], session.config.stash[SCREEN]
    if run.evidence is not None:
        screen.open(config, run.open_things)
        compat.show_failures_once(config, run.evidence.record.suite.contains)
        listeners.write_textfile(run)
        # A burn-in is long: the terminal shows how far it is, and how hot.
        watched = run.options.monitor or run.options.level == "burnin"
        if watched and run.options.nodes is None and run.target.topology.gpus:
            screen.draw(run.target.topology, run.options.folder, config, run.open_things)
        run.watch(partial(setattr, screen, "sample"))


def pytest_enter_pdb(config: pytest.Config) -> None:
    config.stash[SCREEN].leave_to_a_debugger()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    run, of_the_suite = item.config.stash[RUN], False
    run.interruption.before_test()
    if run.evidence is not None:
        run.record(events.CheckStarted(check=item.nodeid))
        of_the_suite = suite.belongs(item.path)
    run.ranks.begin_test(item.nodeid, of_the_suite, fresh=item.get_closest_marker("fresh_world") is not None)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an spmd body on the ranks."""
    __tracebackhide__ = True
    if not markers.is_spmd(pyfuncitem):
        return None
    ranks = pyfuncitem.config.stash[RUN].ranks
    pyfuncitem.stash[ON_RANKS] = True
    spmd.run_body(pyfuncitem, ranks.world(with_group=markers.ours(pyfuncitem, "nccl_group")))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """When the body has ended: what missed a limit fails the test, and so does what got worse in the GPUs' health."""
    __tracebackhide__ = True
    run, ended = item.config.stash[RUN], None
    try:
        yield
    except BaseException as error:
        ended = error
    if ended is None and markers.is_spmd(item) and not item.stash.get(ON_RANKS, False):
        why = "this spmd test ran on no rank: another plugin has called its body"
        ended = pytest.fail.Exception(why, pytrace=False)
    failed = not (ended is None or isinstance(ended, compat.NO_FAILURE))
    if MISSED in item.stash and (missed := assertions.limit_missed(item)) and not failed:
        missed.only, ended, failed = ended is None, missed, True
    if faults := run.check_health(item.nodeid, failed=failed):
        worse = fault.Faults(faults)
        if failed:
            item.add_report_section("call", "GPU health", str(worse))
        else:
            ended = worse
    if ended is not None:
        raise ended


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, compat.OURS):
        skip = compat.skip_of_the_test(str(error)).with_traceback(error.__traceback__)
        call.excinfo = pytest.ExceptionInfo.from_exception(skip)
    report = yield
    run = item.config.stash[RUN]
    if error is not None and run.ranks.in_use is not None:
        spmd.explain(item, error, report)
    if run.evidence is not None:
        report_files.keep(item, report, error)
    return report


@pytest.hookimpl(tryfirst=True)  # before the report is written and pytest prints the summary
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    run = session.config.stash[RUN]
    if run.evidence is not None:
        cut_short = session.shouldstop or session.shouldfail or exitstatus in verdict.CUT_SHORT
        run.finish(cut_short=bool(cut_short))
        session.exitstatus = run.exit_status = lifetime.conclude(run, exitstatus)
        listeners.note_requirements(session.config, run)

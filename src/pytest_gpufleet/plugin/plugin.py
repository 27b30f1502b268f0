"""Options, markers and hooks of pytest-gpufleet: wiring, no logic. The fixtures are in `fixtures`.

Loaded in every pytest run of an environment, so nothing heavy is imported before it is used.
"""

from __future__ import annotations

import io
import time
from collections.abc import Generator
from typing import Any

import pytest

from pytest_gpufleet.model import levels
from pytest_gpufleet.plugin import fixtures, options
from pytest_gpufleet.plugin.fixtures import ENDED, FINDINGS, FLEET, ONLY_LIMITS
from pytest_gpufleet.run.run import Fleet

PHASES = pytest.StashKey[list[tuple[pytest.TestReport, BaseException | None]]]()

ON_RANKS = pytest.StashKey[bool]()  # the body of an spmd test was sent to the ranks

MARKERS = (
    "spmd: run the body of this test on every rank; its argument `rank` says which one it is",
    "world_size(n): run this test on n ranks only; skipped where there are fewer",
    "level(name): run this test at this level and above only (quick, standard, burnin)",
    "fresh_world: start new rank processes for this test",
    "at_the_end: run this test after all others, whatever order was asked for",
)


# ---------------------------------------------------------------- options


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    from pytest_gpufleet.plugin import hookspecs

    pluginmanager.add_hookspecs(hookspecs)
    pluginmanager.register(fixtures, "gpufleet-fixtures")


@pytest.hookimpl(tryfirst=True)  # before pytest-html and junitxml read their paths
def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    fleet = config.stash[FLEET] = Fleet(options.from_config(config), config.invocation_params.args)
    # Not pytest_unconfigure, which ends at the first plugin that fails, as they do when the terminal is gone.
    config.add_cleanup(fleet.interruption.pass_on)
    config.add_cleanup(fleet.close)  # this one first
    if not fleet.options.makes_a_run:
        return
    if config.getoption("dist", "no") != "no":  # xdist sets it for -n too
        raise pytest.UsageError(
            "-n and --dist do not go together with --gpus or --rehearse: several workers would share the GPUs and "
            "spoil every figure; leave them out, the ranks already run at the same time"
        )
    for plugin in ("html", "metadata"):
        if not config.pluginmanager.hasplugin(plugin):
            raise pytest.UsageError(f"the report is written by pytest-{plugin}: leave out -p no:{plugin}")
    if parts := [name for name in config.getoption("plugins") if name.startswith("no:gpufleet")]:
        raise pytest.UsageError(f"a run takes all parts of pytest-gpufleet: leave out -p {parts[0]}")
    from pytest_gpufleet.plugin import html_report, interference
    from pytest_gpufleet.plugin.report_files import ReportFiles
    from pytest_gpufleet.report.page import summary_html

    report_files = ReportFiles(fleet, config)
    fleet.open()
    assert fleet.evidence is not None
    page = report_files.put_into_the_folder()
    config.option.self_contained_html = True
    config.option.css.append(str(summary_html.stylesheet()))
    # Of hooks that are called last, the first one registered is called last.
    config.pluginmanager.register(report_files, "gpufleet-report-files")
    each = bool(config.getini("generate_report_on_test"))
    config.pluginmanager.register(html_report.HtmlReport(fleet.evidence, page, each), "gpufleet-html")
    config.pluginmanager.register(WithoutConfig(fleet), "gpufleet-without-config")
    config.pluginmanager.register(interference.Witness(fleet), "gpufleet-witness")


@pytest.hookimpl(trylast=True, optionalhook=True)
def pytest_metadata(metadata: dict[str, Any], config: pytest.Config) -> None:
    """What pytest-metadata took from the environment of a CI server and the command line, without secrets."""
    if options.from_config(config).asked:
        from pytest_gpufleet import redaction

        texts = {name: value for name, value in metadata.items() if isinstance(value, str)}
        metadata.update({name: redaction.variable(name, value) for name, value in texts.items()})


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, int | None, int | None]:
    """No hook that ends the session its own way makes a 0 of what the verdict is."""
    try:
        status = yield
    except SystemExit as ended:
        if ended.code:
            raise
        status = 0
    fleet = config.stash.get(FLEET, None)
    return status if status is None or fleet is None else fleet.final_status(status)


class WithoutConfig:
    """Hooks that pytest does not tell what session they are of."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if not isinstance(excinfo.value, pytest.Session.Interrupted):  # pytest's own, for errors in the collection
            self._fleet.interruption.hear()
        if isinstance(excinfo.value, pytest.exit.Exception):
            self._fleet.exited = f"pytest.exit() ended the run: {excinfo.value.msg}"

    @pytest.hookimpl(tryfirst=True)  # before anybody shows it
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        from pytest_gpufleet import redaction

        redaction.hide_in(report)
        if report.failed:
            self._fleet.not_imported.append(report.nodeid)


@pytest.hookimpl(tryfirst=True, optionalhook=True)  # before xdist's own answer
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto` means no workers: there is one set of GPUs."""
    return 0 if options.from_config(config).asked else None


def pytest_sessionstart(session: pytest.Session) -> None:
    fleet = session.config.stash[FLEET]
    if fleet.evidence is not None:
        reporter = session.config.pluginmanager.getplugin("terminalreporter")  # there is none with -p no:terminal
        # Not sys.stdout, which is captured while tests run.
        fleet.watch(reporter._tw._file if reporter else io.StringIO())


def pytest_report_header(config: pytest.Config) -> str | None:
    fleet = config.stash[FLEET]
    if not fleet.options.makes_a_run:
        return None
    resumed = f"; {len(fleet.carried)} checks carried over from {fleet.options.resume}" if fleet.options.resume else ""
    return f"gpufleet: {fleet.headline()}{resumed}"


# ---------------------------------------------------------------- running tests


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.stash[FLEET].options.asked:  # markers of these names may be somebody else's
        return
    level = config.stash[FLEET].options.level
    carried = config.stash[FLEET].carried
    if carried:
        from pytest_gpufleet.model import suite

        items[:] = [item for item in items if suite.shipped().known_as(item.nodeid) not in carried]
    items.sort(key=lambda item: item.get_closest_marker("at_the_end") is not None)
    above = [item for item in items if not levels.includes(level, _level(item))]
    if above:
        config.hook.pytest_deselected(items=above)
        items[:] = [item for item in items if item not in above]


def pytest_collection_finish(session: pytest.Session) -> None:
    fleet = session.config.stash[FLEET]
    if fleet.evidence is not None:
        from pytest_gpufleet.model import suite

        if names := suite.altered({item.path for item in session.items}):
            fleet.record_event("suite", altered=names)


def _level(item: pytest.Item) -> str:
    marker = item.get_closest_marker("level")
    if marker is None:
        return "quick"
    if marker.args not in [(name,) for name in levels.LEVELS]:
        raise pytest.UsageError(f"{item.nodeid}: level() takes one of {', '.join(levels.LEVELS)}")
    return str(marker.args[0])


def pytest_deselected(items: list[pytest.Item]) -> None:
    for config in {item.config for item in items}:
        fleet = config.stash[FLEET]
        if not fleet.options.asked:
            continue
        wanted = [item.nodeid for item in items if levels.includes(fleet.options.level, _level(item))]
        if wanted:  # what the level does not ask for is not missing
            fleet.record_event("deselected", checks=wanted)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    fleet = item.config.stash[FLEET]
    fleet.interruption.before_test()
    fleet.record_event("check_started", check=item.nodeid)
    if fleet.evidence is not None:
        from pytest_gpufleet.model import suite

        if suite.belongs(item.path):
            fleet.begin_check_of_the_suite()
        else:
            fleet.foreign_test = item.nodeid
    if (pool := fleet.pool_in_use) is not None:
        pool.begin_test()
        if pool.started and pool.used_by and not fleet.foreign_test:
            fleet.record_event("fresh_world", check=item.nodeid, after=pool.used_by)
            pool.stop()
        elif item.get_closest_marker("fresh_world"):
            pool.stop()


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """pytest-timeout's limit of a test becomes the deadline of its ranks, so that a hang is told by rank.

    Its own timer stays behind it, for a test that hangs in the controller.
    """
    if not fixtures.uses_ranks(item):
        return None
    import pytest_timeout

    item.config.stash[FLEET].test_deadline = time.monotonic() + settings.timeout
    return bool(pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=settings.timeout + 5)))


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    item.config.stash[FLEET].test_deadline = None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an spmd body on the ranks."""
    __tracebackhide__ = True
    if not fixtures.is_spmd(pyfuncitem):
        return None
    from pytest_gpufleet.plugin import interference, spmd

    fleet = pyfuncitem.config.stash[FLEET]
    pyfuncitem.stash[ON_RANKS] = True
    with interference.witnessed(pyfuncitem):
        spmd.run_body(pyfuncitem, fleet.world(with_group=fixtures.ours(pyfuncitem, "nccl_group")))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """When the body has ended: what missed a limit fails the test, and so does what got worse in the GPUs' health."""
    __tracebackhide__ = True
    fleet, item.stash[ENDED] = item.config.stash[FLEET], None
    try:
        yield
        ended = item.stash[ENDED]  # somebody else has kept it
    except BaseException as error:
        ended = error
    if ended is None and fixtures.is_spmd(item) and not item.stash.get(ON_RANKS, False):
        ended = pytest.fail.Exception(
            "this spmd test ran on no rank: another plugin has called its body", pytrace=False
        )
    if (missed := fixtures.limit_missed(item)) is not None and _is_no_failure(ended):
        if ended is None:
            item.stash[ONLY_LIMITS] = missed
        ended = missed
    if problems := fleet.check_health(item.nodeid):
        from pytest_gpufleet.run.health_watch import HealthWorsened

        if _is_no_failure(ended):
            ended = HealthWorsened("\n".join(problems))
        else:
            item.add_report_section("call", "GPU health", "\n".join(problems))
    item.stash[ENDED] = ended
    if ended is not None:
        raise ended


def _is_no_failure(ended: BaseException | None) -> bool:
    return ended is None or isinstance(ended, (pytest.skip.Exception, pytest.xfail.Exception))


# ---------------------------------------------------------------- reporting


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fleet = item.config.stash[FLEET]
    # What ended the body stays, also if somebody else took it away on its way here.
    kept = item.stash.get(ENDED, None) if call.when == "call" else None
    error = call.excinfo.value if call.excinfo else kept
    if error is not None and fleet.pool_in_use is not None:
        from pytest_gpufleet.plugin import spmd

        spmd.explain(item, error, report)
    if fleet.evidence is not None:
        from pytest_gpufleet import redaction
        from pytest_gpufleet.plugin import test_outcome

        redaction.hide_in(report)
        report.findings = item.stash.get(FINDINGS, [])  # type: ignore[attr-defined]
        phases = item.stash.setdefault(PHASES, [])
        phases.append((report, error))
        if report.when == "teardown":
            fleet.record_event("check_finished", check=test_outcome.finished(item, phases), **fleet.activity())
    return report


@pytest.hookimpl(tryfirst=True)  # before pytest-html writes the report and pytest prints the summary
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    fleet = session.config.stash[FLEET]
    if fleet.evidence is not None:
        if fleet.sampler is not None:
            fleet.sampler.stop()
        fleet.check_health("the end of the run")
        session.exitstatus = fleet.exit_status = fleet.conclude(exitstatus)


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    fleet = config.stash[FLEET]
    if fleet.evidence is not None:
        from pytest_gpufleet.report.terminal import summary_lines
        from pytest_gpufleet.verdict.verdict import RESUMABLE

        record = fleet.evidence.record
        terminalreporter.section("gpufleet", sep="=")
        if exitstatus == pytest.ExitCode.USAGE_ERROR and not record.started:
            terminalreporter.write_line("nothing was tested, because of the error that pytest tells below", red=True)
            return
        for text, markup in summary_lines.lines(record):
            terminalreporter.write_line(text, **markup)
        for trouble in filter(None, [fleet.evidence.trouble, *fleet.unwritten]):
            if trouble not in record.reasons:
                terminalreporter.write_line(trouble, red=True)
        if record.broken in RESUMABLE:
            terminalreporter.write_line(f"go on with: --fleet-resume {fleet.folder}")
        if not fleet.no_report:
            terminalreporter.write_line(f"report: {config.getoption('htmlpath', None) or fleet.folder}")
        elif fleet.evidence.path.exists():
            terminalreporter.write_line(f"evidence: {fleet.evidence.path}")
    elif fleet.pool_in_use is not None and fleet.ground.rehearsal_ranks:
        terminalreporter.write_line(f"gpufleet: {fleet.headline()}")

"""--fleet-deadline: the session in a process of its own, and its report if it could not write it."""

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpufleet.plugin import listeners, markers, options
from pytest_gpufleet.plugin.compat import RUN, SUPERVISED
from pytest_gpufleet.run.interruption import Supervised, supervise
from pytest_gpufleet.run.settings import Options

LIMIT_LEFT_OUT = pytest.StashKey[bool]()  # said, once
DEADLINES = "calls on the ranks have --fleet-timeout, a run has --fleet-deadline"
GRACE_SECONDS = 5.0  # for ranks that hang to be asked what they do, and killed


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """pytest-timeout's limit of a test becomes the deadline of its ranks, so that a hang is reported by rank.

    Its own timer comes GRACE_SECONDS later, for a test that hangs in the controller. In a run it is the limit that the
    test has itself, or that stands in the command line: one for all tests of a project judges no machine.
    """
    run = item.config.stash[RUN]
    if run.options.makes_a_run and run.options.nodes is not None and not markers.is_between_nodes(item):
        return True  # each node's own run holds it
    if run.options.makes_a_run and (origin := _of_others(item)):
        if LIMIT_LEFT_OUT not in item.config.stash:
            item.config.stash[LIMIT_LEFT_OUT] = True
            run.tell(f"pytest-timeout's limit of {settings.timeout:g} s a test ({origin}) is left out: {DEADLINES}")
        return True
    if not markers.uses_ranks(item):
        return None
    import pytest_timeout

    run.ranks.test_deadline = time.monotonic() + settings.timeout
    later = settings.timeout + GRACE_SECONDS
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return bool(pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=later)))
    pytest_timeout.pytest_timeout_set_timer(item, settings)  # whose handler names the limit that was given
    signal.setitimer(signal.ITIMER_REAL, later)
    return True


def _of_others(item: pytest.Item) -> str:
    """Where a limit of pytest-timeout stands that was not made for this test, or for this run; "" if it was."""
    from pytest_gpufleet.model import suite

    given = any(argument.partition("=")[0] == "--timeout" for argument in item.config.invocation_params.args)
    if not suite.belongs(item.path) and (given or item.get_closest_marker("timeout")):
        return ""
    if given:
        return "--timeout"
    in_file = f"timeout in {item.config.inipath}" if item.config.getini("timeout") else ""
    return in_file or ("PYTEST_TIMEOUT" if "PYTEST_TIMEOUT" in os.environ else "--timeout in addopts, or a marker")


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    item.config.stash[RUN].ranks.test_deadline = None


STUCK = "the machine did not tell what GPUs it has before the deadline: look at the driver and the kernel log"


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    asked = options.from_config(config)
    if asked.nodes is not None and asked.makes_a_run and SUPERVISED not in config.stash:
        from pytest_gpufleet.run.cluster_run import take_part

        with options.refusals():
            take_part(asked)
    if asked.deadline is None or not asked.makes_a_run or SUPERVISED in config.stash:
        return None

    def session(supervised: Supervised) -> int:
        config.stash[SUPERVISED] = supervised
        try:
            return int(config.hook.pytest_cmdline_main(config=config))
        except pytest.UsageError as error:
            print(f"ERROR: {error}", file=sys.stderr)
            return int(pytest.ExitCode.USAGE_ERROR)

    status, folder = supervise(session, asked.deadline)
    if status is not None:
        return status
    with options.refusals():
        return _conclude(asked, config.invocation_params.args, folder)


def _conclude(asked: Options, arguments: Sequence[str], folder: Path | None) -> int:
    """What the process of the run has left to do: its verdict, its report, and the lines on the terminal."""
    from pytest_gpufleet.plugin.report_files import write_report
    from pytest_gpufleet.report.terminal.summary_lines import summary_lines
    from pytest_gpufleet.run import conclusion
    from pytest_gpufleet.run.evidence import Evidence
    from pytest_gpufleet.run.folder import EVIDENCE, RunFolder
    from pytest_gpufleet.run.opening import open_run
    from pytest_gpufleet.run.run import Run
    from pytest_gpufleet.run.target import OwnMachine

    # What nobody could look at cannot be held against an earlier run.
    run = Run(replace(asked, resume=None, returns=None))
    run.interruption.overdue = True
    if folder is None:
        run.own_machine = OwnMachine.without_gpus(STUCK)
        open_run(run, arguments)
        assert run.evidence is not None
        run.evidence.spoil(STUCK)
    else:
        run.folder, run.evidence = RunFolder(folder), Evidence(folder / EVIDENCE, of_dead_process=True)
    assert run.evidence is not None
    status = conclusion.conclude(run, pytest.ExitCode.INTERRUPTED)
    write_report(run)
    conclusion.summarize(run)
    listeners.write_textfile(run)
    run.close()
    shown = [text for text, _ in summary_lines(run.evidence.record, str(run.folder))]
    print(*shown, *run.unwritten, f"report: {run.folder}", sep="\n")
    return status or (conclusion.INCOMPLETE if run.unwritten else 0)

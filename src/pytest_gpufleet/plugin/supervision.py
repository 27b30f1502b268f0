"""--fleet-deadline: the session in a process of its own, and its report if it could not write it."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpufleet.plugin import listeners, options
from pytest_gpufleet.plugin.compat import RUN, SUPERVISED
from pytest_gpufleet.run.interruption import Supervised, supervise
from pytest_gpufleet.run.run import Run

LIMIT_LEFT_OUT = pytest.StashKey[bool]()  # said, once
DEADLINES = "calls on the ranks have --fleet-timeout, a run has --fleet-deadline"


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """A limit of pytest-timeout for all tests judges no machine: a run leaves it out, and says so once."""
    run = item.config.stash[RUN]
    if not run.options.makes_a_run:
        return None
    from pytest_gpufleet.model.suite import belongs

    if run.options.nodes is None and item.get_closest_marker("timeout") and not belongs(item.path):
        return None
    if LIMIT_LEFT_OUT not in item.config.stash:
        item.config.stash[LIMIT_LEFT_OUT] = True
        run.tell(f"pytest-timeout's limit of {settings.timeout:g} s a test is left out: {DEADLINES}")
    return True


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

    # What nobody could look at cannot be held against an earlier run.
    run = Run(replace(asked, resume=None, returns=None))

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
        return _conclude(run, config.invocation_params.args, folder)


def _conclude(run: Run, arguments: Sequence[str], folder: Path | None) -> int:
    """What the process of the run has left to do: its verdict, its report, and the lines on the terminal."""
    from pytest_gpufleet.plugin.report_files import write_report
    from pytest_gpufleet.report.terminal.summary_lines import summary_lines
    from pytest_gpufleet.run import lifetime
    from pytest_gpufleet.run.folder import EVIDENCE, Evidence, RunFolder
    from pytest_gpufleet.run.target import OwnMachine

    run.interruption.overdue = True
    if folder is None:
        run.own_machine = OwnMachine.without_gpus(STUCK)
        lifetime.open_run(run, arguments)
        run.written.spoil(STUCK)
    else:
        run.folder, run.evidence = RunFolder(folder), Evidence(folder / EVIDENCE, of_dead_process=True)
    status = lifetime.conclude(run, pytest.ExitCode.INTERRUPTED)
    write_report(run)
    lifetime.summarize(run)
    listeners.write_textfile(run)
    run.close()
    shown = [text for text, _ in summary_lines(run.written.record, str(run.folder))]
    print(*shown, *run.unwritten, f"report: {run.folder}", sep="\n")
    return status or (lifetime.INCOMPLETE if run.unwritten else 0)

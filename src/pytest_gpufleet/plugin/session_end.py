"""What ended a session before its time, by the hooks that pytest does not tell what session they are of."""

from __future__ import annotations

import pytest

from pytest_gpufleet import redaction
from pytest_gpufleet.run.run import Run


class SessionEnd:
    def __init__(self, run: Run) -> None:
        self._run = run

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if not isinstance(excinfo.value, pytest.Session.Interrupted):  # pytest's own, for errors in the collection
            self._run.interruption.hear()
        if isinstance(excinfo.value, pytest.exit.Exception):
            self._run.exited = f"pytest.exit() ended the run: {excinfo.value.msg}"

    @pytest.hookimpl(tryfirst=True)  # before anybody shows it
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        redaction.hide_in(report)
        if report.failed:
            self._run.not_imported.append(report.nodeid)

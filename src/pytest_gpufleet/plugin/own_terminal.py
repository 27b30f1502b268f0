"""The terminal of pytest, for the debugger of a rank: breakpoint(), and --pdb after a failure."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpufleet.plugin.keys import RUN

if TYPE_CHECKING:
    from pytest_gpufleet.world.call import Members
    from pytest_gpufleet.world.debugging import Loan, Wanted

REFUSED = (
    "it needs a terminal, and pytest has none here: run it on this machine, in the foreground of a terminal, and "
    "without --nodes"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("gpufleet").addoption(
        "--fleet-pdb-rank", type=int, metavar="N",
        help="the rank that gets the terminal at breakpoint(), and with --pdb after a failure (default: the lowest of "
        "the ranks that run the function, and with --pdb the first that fails)",
    )  # fmt: skip


@pytest.hookimpl(trylast=True)  # when pytest's own is there
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("usepdb", False) and (own := config.pluginmanager.unregister(name="pdbinvoke")):
        config.pluginmanager.register(PostMortem(own), "pdbinvoke")


class PostMortem:
    """pytest's --pdb, but for what failed on ranks: it was looked at there, and here is nothing to see of it."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def pytest_exception_interact(
        self, node: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport
    ) -> None:
        from pytest_gpufleet.world.rank_failure import RankFailure

        if call.excinfo is None or not isinstance(error := call.excinfo.value, RankFailure):
            self._own.pytest_exception_interact(node, call, report)
        elif error.kind != "exception":
            node.config.get_terminal_writer().line(
                f"\n--pdb: after a {error.kind} no rank is left to be looked at; its stack is told with the failure"
            )


class OwnTerminal:
    """`item`: the running test. The rank that has it hears Ctrl-C instead of pytest."""

    def __init__(self, item: pytest.Item) -> None:
        self._config = item.config
        self._capture = item.config.pluginmanager.getplugin("capturemanager")
        expected = item.get_closest_marker("xfail") is not None
        self.post_mortem = bool(item.config.getoption("usepdb", False)) and not expected
        self._since = 0.0
        self._handler: Any = None

    def lend(self, rank: int, ranks: Members, wanted: Wanted) -> Loan:
        from pytest_gpufleet.world.debugging import Loan

        chosen = self._config.getoption("fleet_pdb_rank")
        if chosen is None:
            chosen = rank if wanted.failed else min(ranks)
        if rank != chosen:
            return Loan()
        if self._capture is not None:
            self._capture.suspend(in_=True)
        path = self._path()
        if not path:
            self._resume_capture()
            return Loan(refused=REFUSED)
        # By this pytest-timeout and faulthandler know that time is no matter any more.
        self._config.hook.pytest_enter_pdb(config=self._config, pdb=None)
        writer = self._config.get_terminal_writer()
        writer.line()
        writer.sep(">", f"PDB {'after a failure ' if wanted.failed else ''}on rank {rank} (process {wanted.pid})")
        writer.flush()
        self._since = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, lambda number, frame: _interrupt(wanted.pid))
        return Loan(path)

    def take_back(self) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._handler = None
        ranks = self._config.stash[RUN].ranks
        if ranks.test_deadline is not None:
            ranks.test_deadline += time.monotonic() - self._since
        writer = self._config.get_terminal_writer()
        writer.sep(">", "PDB gives the terminal back")
        self._config.hook.pytest_leave_pdb(config=self._config, pdb=None)
        self._resume_capture()

    def _path(self) -> str:
        """Of the terminal that is typed into for pytest; "" if there is none, or if the shell has it."""
        if self._config.stash[RUN].options.nodes is not None:
            return ""
        try:
            path = os.ttyname(0)
        except OSError:
            return ""
        with suppress(OSError):  # no shell here steers who may use it
            if os.tcgetpgrp(0) != os.getpgrp():
                return ""
        return path

    def _resume_capture(self) -> None:
        if self._capture is not None:
            self._capture.resume()


def _interrupt(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGINT)

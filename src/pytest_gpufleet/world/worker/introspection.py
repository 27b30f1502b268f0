"""pytest's assertion introspection, on a rank.

A rewritten test body explains itself wherever it runs, but the `==` diffs come from a hook that pytest sets in its own
process. That hook is private to pytest; all of this project's use of it is here, and a test holds it in place.
"""

from __future__ import annotations

import os
import sys
from functools import cache

import _pytest.assertion.util as assertion_util
import pytest
from _pytest.config import get_config
from _pytest.terminal import TerminalReporter


def install() -> None:
    """Make `assert a == b` on this rank show what differs, as it does in an ordinary test."""
    assertion_util._reprcompare = _explain


def _explain(operator: str, left: object, right: object) -> str | None:
    config = _config()
    for lines in config.hook.pytest_assertrepr_compare(config=config, op=operator, left=left, right=right):
        if lines:
            return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")
    return None


@cache
def _config() -> pytest.Config:
    """A pytest configuration with pytest's own plugins only; made when the first assertion fails."""
    arguments = ["-c", os.devnull, "--noconftest", "-vv"]
    config = get_config(arguments)
    os.environ.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_ADDOPTS="", PYTEST_PLUGINS="")
    config.parse(arguments)
    # Before pytest 9 the highlighter of diffs is asked of the terminal reporter.
    if not config.pluginmanager.hasplugin("terminalreporter"):
        config.pluginmanager.register(TerminalReporter(config, sys.stdout), "terminalreporter")
    return config

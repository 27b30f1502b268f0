"""What pytest is on a rank: assertions explain themselves there, and what ends a test there ends it here."""

import logging
import os
from functools import cache

import pytest

from pytest_gpufleet.plugin import compat


def teach_endings() -> None:
    """Have a world know, in this process, what of pytest ends a test and is no failure of a rank."""
    from pytest_gpufleet.world.outcomes import ENDINGS

    ENDINGS["skipped"] = pytest.skip.Exception, compat.skip_of_the_test
    ENDINGS["xfailed"] = pytest.xfail.Exception, pytest.xfail.Exception


def prepare() -> None:
    """Called on each rank when it starts."""
    teach_endings()
    # What no handler of a test takes is among what a rank prints, in pytest's words.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(logging.Formatter(compat.LOG_FORMAT))
        logging.lastResort.setLevel(logging.NOTSET)
    compat.explain_assertions_by(_explain)


def _explain(operator: str, left: object, right: object) -> str | None:
    """Why `left == right` does not hold, as pytest shows it in an ordinary test."""
    config = _config()
    for lines in config.hook.pytest_assertrepr_compare(config=config, op=operator, left=left, right=right):
        if lines:
            return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")
    return None


@cache
def _config() -> pytest.Config:
    """Made when the first assertion fails; the variables keep the plugins of others out of it."""
    os.environ.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_ADDOPTS="", PYTEST_PLUGINS="")
    return compat.configuration(["-c", os.devnull, "--noconftest", "-vv"])

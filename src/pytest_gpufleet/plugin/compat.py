"""What this plugin keeps in stashes of pytest, and takes from pytest beyond public names; each has a test."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

import pytest
from _pytest.assertion import util
from _pytest.config import get_config
from _pytest.junitxml import xml_key
from _pytest.logging import DEFAULT_LOG_FORMAT
from _pytest.terminal import TerminalReporter

from pytest_gpufleet.model.endings import NotApplicable, NotJudged
from pytest_gpufleet.redaction import clean, clean_screen, redacted
from pytest_gpufleet.run.run import Run

if TYPE_CHECKING:
    from pytest_gpufleet.model.events import Check
    from pytest_gpufleet.model.fault import Fault
    from pytest_gpufleet.model.finding import Finding
    from pytest_gpufleet.run.interruption import Supervised

# Of the configuration.
RUN = pytest.StashKey[Run]()
SUPERVISED: pytest.StashKey[Supervised] = pytest.StashKey()
HOST_IS_KEPT = pytest.StashKey[bool]()  # somebody else has the host and does not let it go

# Of a test: what of its measurements missed and no phase of it has failed for yet, with the causes that were found.
MISSED: pytest.StashKey[tuple[list[Finding], list[Fault]]] = pytest.StashKey()
ON_RANKS = pytest.StashKey[bool]()  # whether its body was called there
# Setup, call and teardown: pytest's report of each and what was raised in it. And what they were, once it has ended.
Phases = list[tuple[pytest.TestReport, BaseException | None]]
PHASES = pytest.StashKey[Phases]()
CHECK: pytest.StashKey[Check] = pytest.StashKey()

OURS = (NotApplicable, NotJudged)  # which pytest takes for skips
NO_FAILURE = (pytest.skip.Exception, pytest.xfail.Exception, *OURS)  # though they end a test


def fixture_definitions(item: pytest.Item) -> Mapping[str, Sequence[pytest.FixtureDef[Any]]]:
    """The fixtures of a test by name; of each name all that there are, the one it gets last."""
    definitions: Mapping[str, Sequence[pytest.FixtureDef[Any]]] = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    return definitions


def argument_names(item: pytest.Item) -> Sequence[str]:
    """The fixtures and parameters that a test's function itself is called with."""
    return item._fixtureinfo.argnames if isinstance(item, pytest.Function) else ()


def terminal(config: pytest.Config) -> TextIO | None:
    """Where pytest shows its progress; None with -p no:terminal. Not sys.stdout, which is captured while tests run."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    stream: TextIO | None = reporter._tw._file if reporter else None
    return stream


def show_failures_once(config: pytest.Config, elsewhere: Callable[[str], bool]) -> None:
    """No summary of a line each, unless -r asks for it; without -v no story of those that are shown `elsewhere`."""
    if (reporter := config.pluginmanager.getplugin("terminalreporter")) is None:
        return
    if config.option.reportchars == "fE":  # by default
        reporter.reportchars = reporter.reportchars.removesuffix("fE")
    if config.get_verbosity() > 0:
        return
    every = reporter.getreports
    reporter.getreports = lambda kind: [each for each in every(kind) if kind != "failed" or not elsewhere(each.nodeid)]


def failures_shown(config: pytest.Config) -> set[str]:
    """The tests, without their cases, of which pytest has shown how they failed."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    return {report.nodeid.partition("[")[0] for report in reporter.getreports("failed")}


class _Clean:
    """A stream for what pytest writes: of it nothing but its own colours steers the terminal."""

    def __init__(self, stream: Any, colours: bool) -> None:
        self._stream, self._clean = stream, clean_screen if colours else clean

    def write(self, text: str) -> int:
        return int(self._stream.write(self._clean(text)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def terminal_replaced(config: pytest.Config, stream: object) -> Iterator[None]:
    """Let pytest show its progress there instead, and nothing by which warnings, names or reasons steer a terminal."""
    writer = config.pluginmanager.getplugin("terminalreporter")._tw
    before, writer._file = writer._file, _Clean(stream, writer.hasmarkup)
    try:
        yield
    finally:
        writer._file = before


def stop_junit(config: pytest.Config) -> None:
    """Keep junitxml from writing at the end."""
    if (junit := config.stash.get(xml_key, None)) is not None:
        del config.stash[xml_key]  # by which it would be unregistered again
        config.pluginmanager.unregister(junit)


def junit_property(config: pytest.Config, name: str, value: str) -> None:
    """A property of all of junit.xml, as record_testsuite_property makes them, which is a fixture only: by the schema
    that Jenkins reads it with (junit-10.xsd of its plugin xUnit) a test case has none."""
    if (junit := config.stash.get(xml_key, None)) is not None:
        junit.add_global_property(name, redacted(value))


def takes_no_argument_alone(parser: pytest.Parser, option: str, value: str) -> None:
    """Read `option` without "=" as `option=value`: argparse would take the path behind it for its argument."""

    def completed(arguments: Sequence[Any]) -> list[str]:
        given = [str(each) for each in arguments]
        end = given.index("--") if "--" in given else len(given)
        return [f"{option}={value}" if each == option else each for each in given[:end]] + given[end:]

    for name in ("parse", "parse_known_and_unknown_args"):
        parse = getattr(parser, name)
        setattr(parser, name, lambda args, namespace=None, parse=parse: parse(completed(args), namespace))


def skip_of_the_test(reason: str) -> BaseException:
    """A skip that is shown at the line of the test, and not where it was raised."""
    ending = pytest.skip.Exception(reason)
    ending._use_item_location = True
    return ending


def teach_endings() -> None:
    """Have a world know, in this process, what of pytest ends a test and is no failure of a rank."""
    from pytest_gpufleet.world.call import ENDINGS

    ENDINGS["skipped"] = pytest.skip.Exception, skip_of_the_test
    ENDINGS["xfailed"] = pytest.xfail.Exception, pytest.xfail.Exception


def prepare() -> None:
    """Called on each rank when it starts: assertions explain themselves there, and what ends a test there ends it."""
    teach_endings()
    # What no handler of a test takes is among what a rank prints, in pytest's words.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(logging.Formatter(str(DEFAULT_LOG_FORMAT)))
        logging.lastResort.setLevel(logging.NOTSET)
    util._reprcompare = _explain


def _explain(operator: str, left: object, right: object) -> str | None:
    """Why `left == right` does not hold, as pytest shows it in an ordinary test."""
    config = _config()
    said = config.hook.pytest_assertrepr_compare(config=config, op=operator, left=left, right=right)
    lines: list[str] = next(filter(None, said), [])
    return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%") or None


@cache
def _config() -> pytest.Config:
    """Made when the first assertion fails; the variables keep the plugins of others out of it."""
    os.environ.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_ADDOPTS="", PYTEST_PLUGINS="")
    config = get_config(arguments := ["-c", os.devnull, "--noconftest", "-vv"])
    config.parse(arguments)
    # Before pytest 9 the highlighter of diffs is asked of the terminal reporter.
    if not config.pluginmanager.hasplugin("terminalreporter"):
        config.pluginmanager.register(TerminalReporter(config, sys.stdout), "terminalreporter")
    return config

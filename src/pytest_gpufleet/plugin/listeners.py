"""Who hears of findings, faults and the verdict: junit.xml, Prometheus' textfile, and plugins by the hooks below."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpufleet.plugin import compat

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpufleet.model.fault import Fault
    from pytest_gpufleet.model.finding import Finding
    from pytest_gpufleet.model.record import Record
    from pytest_gpufleet.run.run import Run


class Hooks:
    """Hooks that other plugins and conftest files can implement, to hear of what a run finds: docs/trackers.md.

    What an implementation raises becomes a warning, but for KeyboardInterrupt and, before the verdict, pytest.exit.
    There are no wrappers here. Each node of many calls them there; what --fleet-resume takes over is not announced."""

    @pytest.hookspec
    def pytest_gpufleet_finding(self, finding: Finding, item: pytest.Item, config: pytest.Config) -> None:
        """Called when a measurement has been judged, before a missed limit fails its test (`item`)."""

    @pytest.hookspec
    def pytest_gpufleet_fault(self, fault: Fault, config: pytest.Config) -> None:
        """Called when something wrong with the machine was put on record. `fault.kind` has number, action and next
        step; `fault.check` is "" for what belongs to no test. A missed limit is a finding, its cause a fault."""

    @pytest.hookspec
    def pytest_gpufleet_verdict(self, record: Record, folder: Path, config: pytest.Config) -> None:
        """Called once, when the run has its verdict, which is on record: `record.verdict`, `record.reasons`,
        `record.exit_status`, and all that was found. All files of the run are in `folder`."""


ENDING = (KeyboardInterrupt, pytest.exit.Exception)  # what an implementation may end the run by


def announce_fault(config: pytest.Config, fault: Fault) -> None:
    found = f"{fault.kind.number} {fault.name} {fault.described()}"
    compat.junit_property(config, f"{fault.check} fault".strip(), found)
    announce(config, "pytest_gpufleet_fault", fault=fault)


def announce(config: pytest.Config, hook: str, ends: tuple[type[BaseException], ...] = ENDING, **event: Any) -> None:
    """Call each implementation by itself: what goes wrong in one says nothing about the machine."""
    for each in getattr(config.hook, hook).get_hookimpls():
        try:
            if not (each.wrapper or each.hookwrapper):
                each.function(*({**event, "config": config}[name] for name in each.argnames))
        except ends:
            raise
        except BaseException as error:  # pytest.skip and pytest.fail too
            with warnings.catch_warnings():
                warnings.simplefilter("always")  # with -W error it would fail a check after all
                what = f"{hook} of {each.plugin_name} raised {type(error).__name__}: {error}"
                warnings.warn(what, pytest.PytestWarning, stacklevel=2)


def note_requirements(config: pytest.Config, run: Run) -> None:
    """How each requirement was answered, as properties of junit.xml."""
    from pytest_gpufleet.verdict.gaps import answered

    for each in answered(run.written.record, [each.record for each in run.runs_of_nodes().values()]):
        state = ": ".join(filter(None, (each.state, each.why)))
        compat.junit_property(config, f"requirement {each.requirement.id}", state)


def write_textfile(run: Run, record: Record | None = None) -> None:
    """Replace Prometheus' textfile, if one was asked for. No record: the run goes on."""
    if run.options.prometheus is not None and run.evidence is not None:
        from pytest_gpufleet.report import exports

        shown = record or run.evidence.record
        run.write(run.options.prometheus, lambda path: exports.write_textfile(path, shown))

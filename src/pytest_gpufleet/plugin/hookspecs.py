"""Hooks that other plugins and conftest files can implement, to hear of what a run finds: docs/trackers.md.

Who listens changes nothing. What an implementation raises becomes a warning: it says nothing about the machine, so no
check fails for it, and neither it nor the implementation itself keeps a run from being accepted. Only KeyboardInterrupt
and, before the verdict, pytest.exit pass through. Each implementation is called by itself: there are no wrappers here.

In a run on many nodes they are called where that was started, also with what each node has found in its own run, at its
place among all nodes, when the check is reported there. What a run takes over from an earlier one (--fleet-resume) was
told in that one. A run that was killed, or ended by its --fleet-deadline while it hung, tells no verdict.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_gpufleet.model.fault import Fault
    from pytest_gpufleet.model.finding import Finding
    from pytest_gpufleet.model.record import Record


@pytest.hookspec
def pytest_gpufleet_finding(finding: Finding, item: pytest.Item, config: pytest.Config) -> None:
    """Called when a measurement has been judged, before a missed limit fails its test (`item`). What nodes measured in
    their own runs has no samples and details here."""


@pytest.hookspec
def pytest_gpufleet_fault(fault: Fault, config: pytest.Config) -> None:
    """Called when something wrong with the machine was put on record. `fault.kind` has number, action and next step;
    `fault.check` is "" for what belongs to no test. A missed limit is a finding; its cause, if the check found one,
    is a fault, and so is what missed in the own runs of nodes."""


@pytest.hookspec
def pytest_gpufleet_verdict(record: Record, folder: Path, config: pytest.Config) -> None:
    """Called once, when the run has its verdict, which is on record: `record.verdict`, `record.reasons`,
    `record.exit_status`, and all that was found. All files of the run are in `folder`."""

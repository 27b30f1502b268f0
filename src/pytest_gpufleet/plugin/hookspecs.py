"""Hooks that other plugins and conftest files can implement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_gpufleet.model.finding import Finding


@pytest.hookspec
def pytest_gpufleet_finding(finding: Finding, config: pytest.Config) -> None:
    """Called when a measurement has been judged, before a missed limit fails its test.

    What it raises becomes a warning: it says nothing about the machine, so no check fails for it. Implementations that
    come after it are not called for this finding. Only KeyboardInterrupt and pytest.exit pass through.

    For example, to send every figure to a dashboard::

        def pytest_gpufleet_finding(finding, config):
            place, value = finding.measurement.worst
            dashboard.send(finding.measurement.metric, place, value, finding.state)
    """

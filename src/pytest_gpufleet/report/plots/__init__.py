"""The plots of the report. Importing this loads matplotlib, so it is done once there is something to draw."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_gpufleet.report.methods import comparison, is_compared
from pytest_gpufleet.report.plots.bars import bars
from pytest_gpufleet.report.plots.curves import curves
from pytest_gpufleet.report.plots.methods import compared
from pytest_gpufleet.report.plots.scaling import scaling
from pytest_gpufleet.verdict.finding import Finding


def draw(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """(caption, SVG) of everything that can be drawn of the figures of one group of checks."""
    alone = [finding for finding in findings if not is_compared(finding)]
    drawn = [each for plot in (scaling, bars, curves) for each in plot(alone)]
    methods = comparison(findings)
    return [*drawn, compared(methods)] if methods else drawn

"""The plots of the report. Importing this loads matplotlib, so it is done once there is something to draw."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.language import Say, english
from pytest_gpufleet.model.metric import COMPARED_WORK
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.page.method_table import compares_methods, method_comparison
from pytest_gpufleet.report.plots.bars import bars
from pytest_gpufleet.report.plots.collective_pictures import collective_pictures
from pytest_gpufleet.report.plots.curves import curves
from pytest_gpufleet.report.plots.method_bars import method_bars
from pytest_gpufleet.report.plots.scaling import scaling

MOST_METRICS = 12  # far more than any group has: evidence may come from anybody


def draw(
    findings: Sequence[Finding], hosts: wording.Hosts = wording.ALONE, say: Say = english
) -> list[tuple[str, str]]:
    """(caption, SVG) of everything that can be drawn of the figures of one group of checks."""
    metrics = [*dict.fromkeys(finding.measurement.metric for finding in findings)][:MOST_METRICS]
    alone = [each for each in findings if each.measurement.metric in metrics and not compares_methods(each)]
    usual = [each for each in alone if each.measurement.conditions.get("workload") not in COMPARED_WORK]
    drawn = [*scaling(usual, say), *bars(usual, hosts, say), *curves(alone, say), *collective_pictures(usual, say)]
    methods = method_comparison(findings)
    return [*drawn, method_bars(methods, say)] if methods else drawn

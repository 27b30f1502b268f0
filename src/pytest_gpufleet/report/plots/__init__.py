"""The plots of the report. Importing this loads matplotlib, so it is done once there is something to draw."""

from collections.abc import Sequence

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.figures import is_swept
from pytest_gpufleet.report.plots.bars import bars
from pytest_gpufleet.report.plots.collective_pictures import collective_pictures
from pytest_gpufleet.report.plots.curves import curves
from pytest_gpufleet.report.plots.training_plot import training_plot

MOST_METRICS = 12  # far more than any group has: evidence may come from anybody


def draw(findings: Sequence[Finding], hosts: wording.Hosts = wording.ALONE) -> list[tuple[str, str]]:
    """(caption, SVG) of everything that can be drawn of the figures of one group of checks."""
    metrics = [*dict.fromkeys(finding.measurement.metric for finding in findings)][:MOST_METRICS]
    some = [each for each in findings if each.measurement.metric in metrics]
    usual = [each for each in some if not is_swept(each.measurement.conditions)]
    return [
        *training_plot(some),
        *bars(usual, hosts),
        *curves(usual),
        *collective_pictures(usual),
    ]

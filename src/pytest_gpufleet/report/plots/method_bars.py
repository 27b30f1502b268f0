"""DataParallel, DDP and FSDP side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_gpufleet.report import wording
from pytest_gpufleet.report.page.method_table import Comparison
from pytest_gpufleet.report.plots import canvas

BAR = 0.3  # inches


def compared(comparison: Comparison) -> tuple[str, str]:
    """(caption, SVG) of the throughput of each method, and of the memory on its fullest GPU where that is known."""
    caption = "Ways to train on several GPUs"
    rates = {method.name: method.rate for method in comparison.methods}
    memory = {method.name: max(method.memory.values()) for method in comparison.methods if method.memory}
    shown = [("Throughput", "images/s", rates)]
    if memory:
        shown.append(("Memory on the fullest GPU", "GiB", memory))
    with canvas.style(caption):
        figure, axes = canvas.panels(len(shown), 2, 0.1 + BAR * len(rates), legend=False, left=1.0, gap=1.1)
        for each, (title, unit, values) in zip(axes, shown, strict=True):
            _panel(each, values)
            canvas.title(each, title)
            canvas.labels(each, x=unit)
        told = "; ".join(f"{name} {wording.number(rate)} images/s" for name, rate in rates.items())
        return caption, canvas.svg(figure, f"{caption}: {told}. {comparison.conditions}")


def _panel(axes: Any, values: Mapping[str, float]) -> None:
    lengths = [canvas.drawable(value) or 0.0 for value in values.values()]
    top = max(*lengths, 1e-9)
    for row, (value, length) in enumerate(zip(values.values(), lengths, strict=True)):
        axes.barh(row, length, height=0.62, color=canvas.COLOURS[row % len(canvas.COLOURS)], alpha=0.85)
        axes.annotate(wording.number(value), (length + 0.02 * top, row), va="center", fontsize=8)
    axes.set_yticks(range(len(values)), list(values), fontsize=8)
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.set_xlim(0, 1.25 * top)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=7.5)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(lambda value, _: wording.number(value))

"""DataParallel, DDP and FSDP side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_gpufleet.model.language import Say, english
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.page.method_table import MethodComparison
from pytest_gpufleet.report.plots import canvas

BAR = 0.3  # inches
CAPTION = "Ways to train on several GPUs"
THROUGHPUT, MEMORY = "Throughput", "Memory on the fullest GPU"


def method_bars(comparison: MethodComparison, say: Say = english) -> tuple[str, str]:
    """(caption, SVG) of the throughput of each method, and of the memory on its fullest GPU where that is known."""
    rates = {method.name: method.rate for method in comparison.methods}
    memory = {method.name: max(method.memory.values()) for method in comparison.methods if method.memory}
    shown = [(THROUGHPUT, "images/s", rates)]
    if memory:
        shown.append((MEMORY, "GiB", memory))
    with canvas.style(CAPTION):
        figure, axes = canvas.panels(len(shown), 2, 0.1 + BAR * len(rates), legend=False, left=1.0, gap=1.1)
        for each, (title, unit, values) in zip(axes, shown, strict=True):
            _panel(each, values)
            canvas.title(each, title)
            canvas.labels(each, x=unit)
        texts = "; ".join(f"{name} {wording.number(rate)} images/s" for name, rate in rates.items())
        return CAPTION, canvas.svg(
            figure, f"{say(CAPTION)}: {texts}. {comparison.conditions}", canvas.in_language(say, THROUGHPUT, MEMORY)
        )


def _panel(axes: Any, values: Mapping[str, float]) -> None:
    lengths = [canvas.drawable(value) or 0.0 for value in values.values()]
    top = max(*lengths, 1e-9)
    for row, (value, length) in enumerate(zip(values.values(), lengths, strict=True)):
        axes.barh(row, length, height=0.62, color=canvas.COLOURS[row % len(canvas.COLOURS)], alpha=0.85)
        axes.annotate(wording.number(value), (length + 0.02 * top, row), va="center", fontsize=8)
    canvas.lying_bars(axes, list(values), 1.25 * top, 8)

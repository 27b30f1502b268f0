"""What every plot of the report is drawn on: SVG to stand inside HTML.

Without pyplot, which keeps global state. Text and axes take the colour of the text around them (`currentColor`), so
that one drawing serves on paper, in light and in dark; the lines have mid-tones that stand out on both. Places are
computed here and not by matplotlib's layout engines, which draw everything twice to find them.
"""

import io
import math
import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.text import Text

from pytest_gpufleet.model.language import say
from pytest_gpufleet.report import wording

COLOURS = ("#2f7ed8", "#cc5c1d", "#1a935f", "#b0529c", "#8d7d0e", "#7b6be0", "#c8434f")
BAD = "#d03b2f"
MARKERS = "os^DvPX"
# Stands for currentColor: matplotlib takes real colours only.
INK = "#123457"
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}

WIDTH = 8.2  # of every plot, in inches
# Room around panels, in inches. The reader's font may be wider than the one that was measured here.
LEFT, RIGHT, TOP, BOTTOM, GAP = 0.72, 0.3, 0.28, 0.5, 0.42
LEGEND, LEGEND_COLUMNS = 0.34, 6
LIMIT = "limit"  # in the legend
LARGEST = 1e30  # that matplotlib's arithmetic of axes takes without an overflow


def style(salt: str) -> Any:
    """The context to draw in. matplotlib makes ids from `salt`, and drawings on one page must not share them."""
    return matplotlib.rc_context({**_STYLE, "svg.hashsalt": wording.clean(salt)})


def panels(count: int, columns: int, height: float, legend: bool, above: float = 0.0) -> tuple[Figure, list[Any]]:
    """`count` panels, side by side in as many rows as it takes and `height` inches high, and room `above` them."""
    columns = min(columns, max(2, count))  # one alone is not drawn wider than two
    rows = math.ceil(count / columns)
    head = TOP + (LEGEND if legend else 0.0) + above
    total = head + rows * height + (rows - 1) * (TOP + BOTTOM) + BOTTOM
    width = (WIDTH - LEFT - RIGHT - (columns - 1) * GAP) / columns
    figure = Figure(figsize=(WIDTH, total))
    figure.patch.set_visible(False)  # the page shows through, be it light or dark
    axes = []
    for number in range(count):
        row, column = divmod(number, columns)
        bottom = total - head - (row + 1) * height - row * (TOP + BOTTOM)
        box = ((LEFT + column * (width + GAP)) / WIDTH, bottom / total, width / WIDTH, height / total)
        axes.append(plain(figure.add_axes(box)))
    return figure, axes


def plain(axes: Any) -> Any:
    """Axes without what carries no information."""
    axes.patch.set_visible(False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=INK, alpha=0.15, linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def look(number: int, size: float = 4) -> dict[str, Any]:
    """How one of several lines is drawn."""
    colour, marker = (each[number % len(each)] for each in (COLOURS, MARKERS))
    return {"color": colour, "marker": marker, "markersize": size, "linewidth": 1.4}


def title(axes: Any, text: str) -> None:
    axes.set_title(wording.clean(text), fontsize=9, loc="left", pad=5, fontweight="bold", parse_math=False)


def legend(figure: Figure, handles: list[Any]) -> None:
    shown = figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.0, 1.0), ncols=LEGEND_COLUMNS, frameon=False, fontsize=8.5,
        borderaxespad=0.1, handlelength=1.8, columnspacing=1.4,
    )  # fmt: skip
    for text in shown.get_texts():
        text.set_parse_math(False)
        text.set_text(wording.clean(text.get_text()))


def numbered(axis: Any) -> None:
    """Write the numbers of an axis as the report does."""
    axis.set_major_formatter(lambda value, _: wording.number(value))


def drawable(value: float | None) -> float | None:
    """The value if it can stand on an axis; None for what only a broken machine measures, which the tables show."""
    return value if value is not None and abs(value) <= LARGEST else None  # NaN is not


def ticks(values: Iterable[float], most: int) -> list[float]:
    """About so many of the values on a logarithmic axis, from the largest down, each far enough from the last."""
    every = sorted(set(values), reverse=True)
    apart = (every[0] / every[-1]) ** (1 / most)
    chosen = every[:1]
    for value in every[1:]:
        if value * apart <= chosen[-1]:
            chosen.append(value)
    return chosen


def translated(*texts: str) -> dict[str, str]:
    """Of texts in a drawing, that of limits among them, what stands there in the language of the report."""
    limit = say("Limit").lower()  # "limit" itself is said where limits are counted
    return {LIMIT: limit, **{text: say(text) for text in texts}}


def svg(figure: Figure, description: str, said: Mapping[str, str]) -> str:
    """The drawing. `said`: texts in it, and what stands there in their places: matplotlib, which lays it out, has fonts
    for English alone, and the reader's browser has others."""
    texts: list[str] = []
    for text in figure.findobj(Text):
        if (drawn := text.get_text()) and drawn in said:
            text.set_gid(f"said_{len(texts)}")
            texts.append(escape(wording.clean(said[drawn]), quote=False))
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # the date would make every file differ
    canvas: Any = FigureCanvasSVG(figure)  # some versions of matplotlib come without its types
    canvas.print_svg(file, metadata=nothing)
    _, tag, body = file.getvalue().partition("<svg ")
    body = re.sub(
        r'(<g id="said_(\d+)">.*?)[^<>]*(?=</text>)', lambda text: text[1] + texts[int(text[2])], body, flags=re.DOTALL
    )
    # Two drawings on one page must not share ids; none of matplotlib's names is referred to, its hashes are.
    body = re.sub(r' id="[\w.]+_\d+"', "", body).replace(INK, "currentColor")
    # A tenth of a point is finer than the eye; with six digits the file would be twice as large.
    body = re.sub(r' d="[^"]+"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), body)
    return f'{tag}role="img" aria-label="{escape(wording.clean(description))}" {body}'

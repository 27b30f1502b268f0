"""What summaries on the terminal are made of: lines with their markup, as pytest takes it."""

from __future__ import annotations

import textwrap

from pytest_gpufleet.report import wording

Line = tuple[str, dict[str, bool]]

WIDTH = 80
PLAIN: dict[str, bool] = {}
BAD = {"red": True}
HEADING = {"bold": True}


def wrapped(text: str, indent: str, markup: dict[str, bool] = PLAIN) -> list[Line]:
    texts = textwrap.wrap(
        wording.clean(text),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [(line, markup) for line in texts]


def and_more(count: int, indent: str, what: str = "", where: str = "which the report lists") -> list[Line]:
    """That there are so many more than those above, of `what`; nothing if there are none."""
    told = wording.count(count, what) if what else count
    return wrapped(f"... and {told} more, {where}", indent) if count > 0 else []

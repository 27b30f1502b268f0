"""The languages that a report can be written in. Terminal, evidence and summary.json are English."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)
Say = Callable[..., str]  # (text, **values): the text in some language, with the values for its {names}


def english(text: str, **values: object) -> str:
    """A text as it stands in the code: what says it where nobody asks for another language."""
    return text.format(**values) if values else text

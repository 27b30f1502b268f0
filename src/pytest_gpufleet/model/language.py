"""The languages that a report can be written in. Terminal, evidence and summary.json are English."""

from __future__ import annotations

from typing import Literal, get_args

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)

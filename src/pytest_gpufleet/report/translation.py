"""What the report says, in the language of its reader: gettext, with one catalogue a language beside this file.

Translated is what the authors of this project wrote, titles of checks and metrics among it. Figures, units, places,
node ids of checks and what a machine or a check found stay.
"""

from __future__ import annotations

import gettext
from functools import cache
from pathlib import Path

from pytest_gpufleet.model.language import Language, Said, Say

LOCALE = Path(__file__).with_name("locale")


@cache
def says(language: Language) -> Say:
    """The function that says a text in `language`: English where the catalogue does not have it. Where `values` are
    given, the text has their {names}; one that is Said has brought its own along."""
    catalogue = gettext.translation("gpufleet", LOCALE, [language], fallback=True)

    def say(text: str, **values: object) -> str:
        if isinstance(text, Said):
            return text.told(say)
        said = catalogue.gettext(text) if text else ""  # gettext("") is the head of the catalogue
        return said.format(**values) if values else said

    return say

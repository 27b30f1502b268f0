"""The languages of a report and of the end of the terminal. Evidence and summary.json are English."""

import gettext
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)

LOCALE = Path(__file__).parents[1] / "report" / "locale"  # gettext's catalogues: a folder a language

NUMBER = re.compile(r"\d+(?:[.,]\d+)*")  # a text with other ones is translated with {} in their places

# Of what is being written. Only a page and the end of the terminal set it (in_language), so that all else is English.
_language: ContextVar[Language] = ContextVar("language", default="en")
current_language = _language.get


@contextmanager
def in_language(language: Language) -> Iterator[None]:
    """What is said in the block is said in `language`: English where its catalogue has no text. Numbers, units, places,
    node ids of checks and what a machine or a check found stay as they are."""
    before = _language.set(language)
    try:
        yield
    finally:
        _language.reset(before)


@cache
def _catalogue(language: Language) -> gettext.NullTranslations:
    return gettext.translation("gpufleet", LOCALE, [language], fallback=True)


def say(text: str, **values: object) -> str:
    """`text` in the language of what is being written, with `values` for its {names}; Said brings its own."""
    if isinstance(text, Said):
        return text.translated()
    get = _catalogue(current_language()).gettext
    said = get(text) if text else ""  # gettext("") is the head of the catalogue
    if said == text and ": " in text:  # why a fact is missing, and its remedy
        said = ": ".join(get(part) if part else "" for part in text.rsplit(": ", 1))
    if said == text and (numbers := NUMBER.findall(text)) and (form := NUMBER.sub("{}", text)) != get(form):
        said = get(form).format(*numbers)
    return said.format(**values) if values else said


class Said(str):
    """A text that can be said in another language later, with `values` for its {names}, which may be Said."""

    def __new__(cls, text: str, **values: object) -> "Said":
        said = super().__new__(cls, text.format(**values) if values else text)
        said._text, said._values = text, values
        return said

    def translated(self) -> str:
        values = self._values.items()
        return say(self._text, **{name: each.translated() if isinstance(each, Said) else each for name, each in values})

    _text: str
    _values: dict[str, object]


class Listed(NamedTuple):
    """Several texts one after the other, as a value of a text; `between`: what stands between two of them."""

    parts: Iterable[str]
    between: str = ", "

    def __str__(self) -> str:
        return say(self.between).join(map(say, self.parts))


def some(names: Sequence[str], most: int, between: str = ", ") -> str:
    """ "node-1, node-2 and 3 more": of many names the first ones."""
    text, more = between.join(names[:most]), len(names) - most
    return Said("{names} and {count} more", names=text, count=more) if more > 0 else text


def rounded(value: float) -> str:
    """ "12,960", "0.4213", where ",.4g" would write 1.296e+04."""
    return f"{float(f'{value:.4g}'):,.10g}"

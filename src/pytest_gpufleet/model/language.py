"""The languages that a report can be written in. Terminal, evidence and summary.json are English."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, get_args

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)
Say = Callable[..., str]  # (text, **values): the text in some language, with the values for its {names}


class Said(str):
    """A text in English that can be said in another language later: `text` with `values` for its {names}, of which
    those that are such texts too are said in that language."""

    def __new__(cls, text: str, **values: object) -> Said:
        said = super().__new__(cls, english(text, **values))
        said._text, said._values = text, values
        return said

    def told(self, say: Say) -> str:
        return say(self._text, **{name: _in(say, value) for name, value in self._values.items()})

    _text: str
    _values: dict[str, object]


class Listed(Said):
    """Several texts, one after the other; `between`: what stands between two of them."""

    def __new__(cls, parts: Iterable[str], between: str = ", ") -> Listed:
        every = tuple(parts)
        listed = str.__new__(cls, between.join(every))
        listed._parts, listed._between = every, between
        return listed

    def __reduce__(self) -> tuple[type[Listed], tuple[tuple[str, ...], str]]:
        return Listed, (self._parts, self._between)

    def told(self, say: Say) -> str:
        return say(self._between).join(str(_in(say, part)) for part in self._parts)

    _parts: tuple[str, ...]
    _between: str


def some(names: Sequence[str], most: int) -> str:
    """ "node-1, node-2 and 3 more": of many names the first ones."""
    told, more = ", ".join(names[:most]), len(names) - most
    return Said("{names} and {count} more", names=told, count=more) if more > 0 else told


def _in(say: Say, value: object) -> object:
    return value.told(say) if isinstance(value, Said) else value


def english(text: str, **values: object) -> str:
    """A text as it stands in the code: what says it where nobody asks for another language."""
    return text.format(**values) if values else text

"""A table of a TOML file that somebody gave, whose errors name the file, the line and the key."""

import difflib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from pytest_gpufleet.model.endings import Refused

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# An error says that a value must be what the description of its type says.
Text = Annotated[str, msgspec.Meta(pattern=r"\S", description="a text that is not empty")]

# The way from the top of the file to a table or a key: ("limit", 2, "when", "ranks"), arrays counted from 1.
Way = tuple[str | int, ...]

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]")
_KEY = re.compile(r"""\s*["']?([\w-]+)["']?\s*[.=]""")


class FileError(Refused):
    """A file cannot be used; the message says in one sentence where, what, and what to write instead."""


def table_type(name: str, required: Mapping[str, Any], optional: Mapping[str, Any] = {}) -> type[msgspec.Struct]:
    keys: list[Any] = [*required.items(), *((key, kind, msgspec.UNSET) for key, kind in optional.items())]
    return msgspec.defstruct(name, keys, kw_only=True, forbid_unknown_fields=True)


@dataclass(frozen=True)
class Table:
    """Keys and values, and where they stand."""

    values: Mapping[str, Any]
    path: Path
    lines: Mapping[Way, int]
    way: Way = ()

    def error(self, message: str, key: str = "") -> FileError:
        """With file, line and table: "a.toml:7: limit 2: ", "a.toml:3: [facts]: "."""
        match self.way:
            case (what, int() as number, *below):
                name = "".join([f"{what} {number}: ", *(f'"{each}": ' for each in below)])
            case way:
                name = f"[{'.'.join(map(str, way))}]: " if way else ""
        line = self.line(key)
        return FileError(f"{self.path}{f':{line}' if line else ''}: {name}{message}")

    def line(self, key: str = "") -> int | None:
        """That of the key, or of the nearest thing around it whose line is known."""
        way = (*self.way, key)
        return next((self.lines[way[:end]] for end in range(len(way), 0, -1) if way[:end] in self.lines), None)

    def check(self, kind: type[msgspec.Struct]) -> None:
        """FileError at the first key that is not as this type says."""
        try:
            msgspec.convert(self.values, kind)
        except msgspec.ValidationError as error:
            fields = {field.name: field for field in msgspec.structs.fields(kind)}
            for key in self.values:
                if key not in fields:
                    raise self.error(f'unknown key "{key}"; {hint(key, fields)}', key) from None
            for key, field in fields.items():
                if field.required and key not in self.values:
                    raise self.error(f'"{key}" is missing; add it.') from None
            for key in self.values:
                self.check_key(key, fields[key].type)
            raise self.error(f"{error}.") from None

    def check_key(self, key: str, kind: Any) -> None:
        value, form, inner = self.values[key], get_origin(kind), get_args(kind)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            self.table(key).check(kind)
        elif form is dict:
            below = self.table(key)
            for name in below.values:
                below.check_key(name, inner[1])
        elif form is list:
            for each in self.tables(key):
                each.check(inner[0])
        elif form is Literal and isinstance(value, str):
            self.choice(key, inner)
        else:
            try:
                msgspec.convert(value, kind)
            except msgspec.ValidationError:
                words = kind.__metadata__[-1].description if hasattr(kind, "__metadata__") else "a text"
                raise self.error(f'"{key}" must be {words}, not {value!r}.', key) from None

    def choice(self, key: str, choices: Iterable[str]) -> str:
        value: str = self.values[key]
        if value not in choices:
            raise self.error(f'"{key}" cannot be "{value}"; {hint(value, choices)}', key)
        return value

    def table(self, key: str) -> "Table":
        """The table below this one; an empty one if there is none."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self.error(f'"{key}" must be a table of keys and values, not {value!r}.', key)
        return Table(value, self.path, self.lines, (*self.way, key))

    def tables(self, key: str) -> "list[Table]":
        values = self.values.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise self.error(f'"{key}" must be a list; begin each {key} with [[{key}]] in two brackets.', key)
        return [Table(value, self.path, self.lines, (*self.way, key, n)) for n, value in enumerate(values, 1)]


def read(path: Path) -> Table:
    """The top of a TOML file. FileError if it cannot be read or is not TOML."""
    try:
        text = path.read_text(encoding="utf-8")
        return Table(tomllib.loads(text), path, _lines(text))
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML file.") from None
    except ValueError as error:  # not UTF-8, or not TOML
        line = re.search(r"\(at line (\d+)", str(error))
        place = f"{path}:{line[1]}" if line else f"{path}"
        raise FileError(f"{place}: is not valid TOML: {error}.") from None


def _lines(text: str) -> dict[Way, int]:
    """Where tables and keys begin, since tomllib does not say. Keys inside of braces have no line of their own."""
    lines: dict[Way, int] = {}
    seen: Counter[str] = Counter()
    here: Way = ()
    for number, line in enumerate(text.split("\n"), 1):
        if header := _HEADER.match(line):
            first, *rest = (part.strip(" \"'") for part in header[2].split("."))
            seen[first] += header[1] == "[[" and not rest
            here = (first, *([seen[first]] if seen[first] else []), *rest)
            lines.setdefault(here, number)
        elif key := _KEY.match(line):
            lines.setdefault((*here, key[1]), number)
    return lines


def hint(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f'did you mean "{near[0]}"?' if near else f"write {' or '.join(known)}."

"""The lines of evidence, read within bounded time and memory and held against what they must be, whoever wrote them."""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import FunctionType
from typing import Any

from pytest_gpufleet.safe_files import open_regular

LONGEST_LINE = 64 << 20  # bytes
DEEPEST = 64  # lists and objects within each other
LARGEST = 1e15  # of a time, a size or a reading

# What a value must be: a type; a set of texts of which it is one; a function that tells; a list, whose items are all as
# the one given and have all of its fields; an object that has such fields or not, `str` standing for all others.
Expected = Any


def number(value: Any) -> bool:
    """A time or a size."""
    return type(value) in (int, float) and -LARGEST <= value <= LARGEST


def reading(value: Any) -> bool:
    """What telemetry reads of a GPU. There are many of these."""
    return value is None or (type(value) in (int, float) and -LARGEST <= value <= LARGEST)


def finite(value: Any) -> bool:
    return type(value) in (int, float) and -sys.float_info.max <= value <= sys.float_info.max


def whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def moment(value: Any) -> bool:
    """A time with its zone, as ISO 8601 writes it."""
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def optional(expected: Expected) -> Callable[[Any], bool]:
    return lambda value: value is None or not _wrong(value, expected)


def read(path: Path, fields: Mapping[str, Expected]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each event with the number of its line. A last line that a dying machine cut short is left out.

    `fields`: what the fields of each kind of event must be. OSError if the file cannot be read; ValueError that names
    the line if one is no event.
    """
    with open_regular(path) as file:
        number, event = 0, {"event": ""}
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise ValueError(f"{path}, line {number}: it is longer than {LONGEST_LINE >> 20} MiB")
            try:
                following = json.loads(line)
            except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
                if line.endswith(b"\n") or event["event"] == "verdict":
                    raise ValueError(f"{path}, line {number}: not JSON") from None
                return
            event = following
            if wrong := _no_event(event, fields).lstrip(".") or _too_deep(line, event):
                raise ValueError(f"{path}, line {number}: not an event of a run ({wrong})")
            yield number, event


def _no_event(event: Any, fields: Mapping[str, Expected]) -> str:
    if not isinstance(event, dict):
        return f"it is {reprlib.repr(event)}"
    if "event" not in event:
        return "it has no event"
    return _wrong(event, {"event": str}) or _wrong(event, {"t": moment, **fields.get(event["event"], {})})


def _wrong(value: Any, expected: Expected, all_of_it: bool = False) -> str:
    """What is not as expected, like ".check.seconds is None"; "" if nothing. `all_of_it`: no field may be missing."""
    if isinstance(expected, FunctionType):
        right = expected(value)
    elif isinstance(expected, dict):
        right = isinstance(value, dict)
        others = expected.get(str, object)
        for key, each in value.items() if right else ():
            if wrong := _wrong(each, expected.get(key, others)):
                return f".{key}{wrong}"
        if right and all_of_it and (missing := expected.keys() - {str} - value.keys()):
            return f" has no {min(missing)}"
    elif isinstance(expected, list):
        right = isinstance(value, list)
        for index, each in enumerate(value if right else ()):
            if wrong := _wrong(each, expected[0], True):
                return f"[{index}]{wrong}"
    elif isinstance(expected, frozenset):
        right = isinstance(value, str) and value in expected
    else:
        right = isinstance(value, expected)
    return "" if right else f" is {reprlib.repr(value)}"


def _too_deep(line: bytes, event: Any) -> str:
    if line.count(b"[") + line.count(b"{") <= DEEPEST:  # as in nearly all
        return ""
    level = [event]
    for _ in range(DEEPEST):
        nested = [each for each in level if isinstance(each, dict | list)]
        level = [inner for each in nested for inner in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return ""
    return f"more than {DEEPEST} lists and objects are within each other"

"""The lines of evidence, read within bounded time and memory, whoever wrote them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pytest_gpufleet.safe_files import open_regular

LONGEST_LINE = 64 << 20  # bytes
DEEPEST = 64  # lists and objects within each other


class NotJson(ValueError):
    """A line that holds nothing, such as one that was cut short."""


def read(path: Path) -> Iterator[tuple[int, Any]]:
    """What each line holds, with its number. A last line that a dying machine cut short is left out.

    OSError if the file cannot be read; ValueError that names the line if one is not JSON, or beyond all bounds.
    """
    with open_regular(path) as file:
        number, ended = 0, False
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise ValueError(f"{path}, line {number}: it is longer than {LONGEST_LINE >> 20} MiB")
            try:
                event = parsed(line)
            except NotJson as wrong:
                if line.endswith(b"\n") or ended:
                    raise ValueError(f"{path}, line {number}: {wrong}") from None
                return
            except ValueError as wrong:
                raise ValueError(f"{path}, line {number}: not an event of a run ({wrong})") from None
            ended = isinstance(event, dict) and event.get("event") == "verdict"
            yield number, event


def parsed(line: bytes, made: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """What one line holds, of each object what is `made` of it. NotJson, or a ValueError for what is beyond all
    bounds."""
    try:
        event = json.loads(line, object_hook=made)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise NotJson("not JSON") from None
    if line.count(b"[") + line.count(b"{") > DEEPEST:  # as in nearly none
        _check_depth(event)
    return event


def _check_depth(event: Any) -> None:
    level = [event]
    for _ in range(DEEPEST):
        nested = [each for each in level if isinstance(each, dict | list)]
        level = [inner for each in nested for inner in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return
    raise ValueError(f"more than {DEEPEST} lists and objects are within each other")

"""A file that names hosts, one a line, as launchers have it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pytest_gpufleet.model.endings import Refused

NAME = re.compile(r"[A-Za-z0-9._-]+")
RANGES = re.compile(r"\[([^\[\]]*)\]")
RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
MOST_HOSTS = 100_000


def read(path: Path) -> tuple[str, ...]:
    """The names of the hosts, each once, in their order. Refused if it cannot be read or a line is no name.

    A line is a name, with ranges in brackets as Slurm writes them: `node-[001,003-007]`. What stands behind # is not
    read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    hosts: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        for name in _names(line.partition("#")[0].strip(), f"{path}, line {number}"):
            hosts[name] = None
            if len(hosts) > MOST_HOSTS:
                raise Refused(f"{path}, line {number}: these are more than {MOST_HOSTS:,} hosts")
    if not hosts:
        raise Refused(f"{path} names no host")
    return tuple(hosts)


def _names(text: str, where: str) -> Iterator[str]:
    if not text:
        return
    ranges = RANGES.search(text)
    if ranges is None:
        if not NAME.fullmatch(text):
            raise Refused(f"{where}: {text!r} is no name of a host")
        yield text
        return
    for each in ranges[1].split(","):
        for number in _numbers(each.strip(), where):
            yield from _names(text[: ranges.start()] + number + text[ranges.end() :], where)


def _numbers(text: str, where: str) -> Iterator[str]:
    """Of "003-007", with as many digits as its first number has."""
    found = RANGE.fullmatch(text)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise Refused(f"{where}: {text!r} is no range of numbers like 003-007")
    for number in range(int(found[1]), int(found[2] or found[1]) + 1):
        yield f"{number:0{len(found[1])}}"

"""Names of hosts, as a file or a launcher lists them."""

import re
from collections.abc import Iterator
from pathlib import Path

from pytest_gpufleet.model.endings import Refused

NAME = re.compile(r"[A-Za-z0-9._-]+")
RANGES = re.compile(r"\[([^\[\]]*)\]")
RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
BETWEEN = re.compile(r",(?![^\[]*\])")  # a comma that is not within brackets
MOST_HOSTS = 100_000


def read_hosts(path: Path) -> dict[str, str]:
    """The names of the hosts, each once, in their order, each with its rack or leaf switch ("" if the file does not
    say). Refused if it cannot be read or a line is no name. A line is a name, with ranges in brackets as Slurm writes
    them: `node-[001,003-007]`, and where it is known their rack or leaf switch behind a blank; # begins a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    hosts: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        names, _, rack = line.partition("#")[0].strip().replace("\t", " ").partition(" ")
        if rack and not NAME.fullmatch(rack.strip()):
            raise Refused(f"{where}: {rack.strip()!r} is no name of a rack or a switch")
        for name in expanded(names, where):
            hosts[name] = rack.strip()
            if len(hosts) > MOST_HOSTS:
                raise Refused(f"{where}: these are more than {MOST_HOSTS:,} hosts")
    if not hosts:
        raise Refused(f"{path} names no host")
    return hosts


def expanded(text: str, where: str) -> Iterator[str]:
    """The names of "node-[001,003-007],head". Refused if one is none: `where` it stands."""
    for each in BETWEEN.split(text):
        ranges = RANGES.search(each)
        if ranges is None and each and not NAME.fullmatch(each):
            raise Refused(f"{where}: {each!r} is no name of a host")
        if ranges is None:
            yield from filter(None, [each])
            continue
        for numbers in map(str.strip, ranges[1].split(",")):
            found = RANGE.fullmatch(numbers)
            if found is None or int(found[2] or found[1]) < int(found[1]):
                raise Refused(f"{where}: {numbers!r} is no range of numbers like 003-007")
            for number in range(int(found[1]), int(found[2] or found[1]) + 1):
                digits = f"{number:0{len(found[1])}}"  # as many as the first number has
                yield from expanded(each[: ranges.start()] + digits + each[ranges.end() :], where)

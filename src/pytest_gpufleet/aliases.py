"""Aliases for what tells a machine and its owner from all others, in evidence that is to be published (--fleet-alias).

One thing has one alias, wherever it stands, and on every node and in every run that has the same key: an alias is a
hash of the thing. So peers, resumed runs and fleets still see what is the same and what is not. An alias is left as it
is: the own runs of nodes have put in theirs before.
"""

import hmac
import os
import re
import socket
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from pytest_gpufleet import redaction

KEY = "GPUFLEET_ALIAS_KEY"  # the variable; without it who guesses a name can find out that the guess was right
# By their names in JSON: what stands there is replaced whatever it looks like.
NAMED = {"host", "uuid", "cluster", "guid", "serial", "serials", "board_serial", "chassis_serial"}
NO_CLUSTER = "0" * 32
ALIAS = re.compile(r"\balias-[0-9a-f]{12}\b")
# Too short, or a word that means something else in a text: there it is left, for it tells nobody apart either.
ANY_WORD = re.compile(r"(?i).{0,3}|\D{0,5}|(?:gpu|rank|node|rail|nic|numa|cpu)(?:0|[1-9]\d{0,2})|localhost")

_HEX = "[0-9A-Fa-f]"
_PATTERNS = (
    rf"(?<![\w-])(?:(?:GPU|MIG)-)?{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}(?![\w-])",  # UUID
    rf"(?<![\w-])(?:GPU|MIG)-{_HEX}{{8}}[-.\w]*",  # the same, as pytest shortens it
    rf"(?<![:\w])(?:{_HEX}{{2}}:){{5,19}}{_HEX}{{2}}(?![:\w])",  # MAC, which has 20 bytes over InfiniBand
    rf"(?<![:\w])(?:{_HEX}{{4}}:){{3}}{_HEX}{{4}}(?![:\w])",  # GUID
    r"^[\w.-]+(?=:\d+:\d+ \[)|(?<= hostname=\")[^\"]+",  # the host in NCCL's lines, and in junit.xml
    r"(?<=/home/)[^/\s:'\"<>]+|(?<=/Users/)[^/\s:'\"<>]+",
    r"(?P<address>(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\.?\w)"
    rf"|(?<![\w:.])[23fF]{_HEX}{{0,3}}:[0-9A-Fa-f:]{{3,34}}(?![\w:.]))",
)
_FOUND = re.compile("|".join(_PATTERNS), re.MULTILINE)


class Aliases:
    """`_known`: the names of hosts, users and parts, which have no form by which a text could be searched for them."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()
        self._known: dict[str, str] = {}
        self._names = re.compile(r"(?!)")
        self._learn(socket.gethostname())
        if Path.home().name != "root":
            self._learn(Path.home().name)

    def alias(self, thing: str) -> str:
        if ALIAS.search(thing) or thing == NO_CLUSTER:  # as a single machine has the UUID of its cluster
            return thing
        return f"alias-{hmac.new(self._key, thing.lower().encode(), 'sha256').hexdigest()[:12]}"

    def throughout(self, value: Any) -> Any:
        """JSON with aliases in all that it holds."""
        for thing in _things(value):
            self._learn(thing)
        return self._replaced(value)

    def text(self, text: str) -> str:
        return _FOUND.sub(self._by_form, self._names.sub(lambda found: self._known[found["name"]], text))

    def _by_form(self, found: re.Match[str]) -> str:
        return found[0] if found["address"] and not _tells_a_machine(found) else self.alias(found[0])

    def _learn(self, thing: str) -> None:
        new = [
            name
            for name in {thing, thing.partition(".")[0]}
            if name not in self._known and not ANY_WORD.fullmatch(name)
        ]
        if new and not ALIAS.search(thing):
            self._known.update(dict.fromkeys(new, self.alias(thing)))
            longest = "|".join(sorted(map(re.escape, self._known), key=len, reverse=True))
            self._names = re.compile(rf"(?<!\w)(?P<name>{longest})(?:\.[A-Za-z][\w-]+)*(?!\w)")

    def _replaced(self, value: Any, named: bool = False) -> Any:
        if isinstance(value, str):
            return self.alias(value) if named else self.text(value)
        if isinstance(value, list | tuple):
            return [self._replaced(each, named) for each in value]
        if isinstance(value, Mapping):
            keys = _named(value)
            return {self.text(key): self._replaced(each, key in keys) for key, each in value.items()}
        return value


def _named(value: Mapping[str, Any]) -> set[str]:
    return NAMED | {"name"} if "kernel" in value else NAMED  # the facts of a host


def _things(value: Any, named: bool = False) -> Iterator[str]:
    """What stands under these names."""
    if isinstance(value, Mapping):
        keys = _named(value)
        for key, each in value.items():
            yield from _things(each, key in keys)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _things(each, named)
    elif named and isinstance(value, str):
        yield value


def _tells_a_machine(found: re.Match[str]) -> bool:
    """Versions have four numbers too: an address is private, or stands where one does."""
    try:
        address = ip_address(found[0])
    except ValueError:
        return False
    placed = found.string[found.end() :][:1] in (":", "<") or found.string[: found.start()].endswith(("//", "@"))
    nobody = address.is_loopback or address.is_unspecified or address.is_multicast
    return not nobody and (address.version == 6 or address.is_private or placed)


_active: Aliases | None = None


def activate(wanted: bool) -> None:
    """From here on evidence and all that is told of tests has aliases; or has none any more."""
    global _active
    _active = Aliases(os.environ.get(KEY, "")) if wanted else None
    redaction.aliased = _active.text if _active else str


def throughout(value: Any) -> Any:
    """JSON as evidence is to have it."""
    return _active.throughout(value) if _active else value

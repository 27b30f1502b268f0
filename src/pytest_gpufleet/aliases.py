"""Aliases for what tells a machine and its owner from all others, in evidence that is to be published (--fleet-alias).

One thing has one alias, wherever it stands, and on every node and in every run that has the same key: an alias is a
hash of the thing. So peers, resumed runs and fleets still see what is the same and what is not. An alias has a form by
which it is known, and is left as it is: the own runs of nodes have put in theirs before.
"""

import hmac
import os
import re
import socket
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from pytest_gpufleet import redaction

KEY = "GPUFLEET_ALIAS_KEY"  # the variable; without it who guesses a name can find out that the guess was right
# By their names in JSON: what stands there is replaced whatever it looks like.
KINDS = {
    "host": "host", "uuid": "uuid", "cluster": "hex", "guid": "guid", "mac": "mac",
    **dict.fromkeys(("serial", "serials", "board_serial", "chassis_serial"), "serial"),
}  # fmt: skip
OURS = re.compile(r"alias-\w{10}|host-alias-\w{10}|user-alias-\w{10}|(?:[A-Z]+-)?a11a5\w{3}\S*|a11a:\S+|02:a1:1a:\S+")
# Too short, or a word that means something else in a text: there it is left, for it tells nobody apart either.
ANY_WORD = re.compile(r"(?i).{0,3}|\D{0,5}|(?:gpu|rank|node|rail|nic|numa|cpu)(?:0|[1-9]\d{0,2})|localhost")

_HEX = "[0-9A-Fa-f]"
_PATTERNS = {
    "uuid": rf"(?<![\w-])(?:GPU-|MIG-)?{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}(?![\w-])"
    rf"|(?<![\w-])(?:GPU|MIG)-{_HEX}{{8}}[-.\w]*",  # as pytest shortens it
    "host": r"^[\w.-]+(?=:\d+:\d+ \[)|(?<= hostname=\")[^\"]+",  # NCCL's lines, junit.xml
    "mac": rf"(?<![:\w])(?:{_HEX}{{2}}:){{5,19}}{_HEX}{{2}}(?![:\w])",  # of IP over InfiniBand it has 20 bytes
    "guid": rf"(?<![:\w])(?:{_HEX}{{4}}:){{3}}{_HEX}{{4}}(?![:\w])",
    # Of four numbers, which a version can have too, only what is an address by where it stands, or a private one.
    "address": r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\.?\w)",
    "address6": rf"(?<![\w:.])[23fF]{_HEX}{{0,3}}:[0-9A-Fa-f:]{{3,34}}(?![\w:.])",
    "user": r"(?<=/home/)[^/\s:'\"<>]+|(?<=/Users/)[^/\s:'\"<>]+",
}
_FOUND = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _PATTERNS.items()), re.MULTILINE)


class Aliases:
    """`learn`ed are the names that stand in a text without a form of their own: hosts and serial numbers."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()
        self._known: dict[str, str] = {}
        self._names: re.Pattern[str] | None = None
        self._learn("host", socket.gethostname())
        if len(home := Path.home().parts) > 2 or home[1:] not in ((), ("root",)):
            self._learn("user", home[-1])

    def alias(self, kind: str, thing: str) -> str:
        """Of a thing that is one of these kinds."""
        if not thing or OURS.fullmatch(thing) or (kind == "hex" and not thing.strip("0")):
            return thing
        digits = hmac.new(self._key, f"{kind} {thing.lower()}".encode(), "sha256").hexdigest()
        return FORMS[kind](digits, thing)

    def throughout(self, value: Any) -> Any:
        """JSON with aliases in all that it holds."""
        self._look_for_names(value)
        return self._replaced(value)

    def text(self, text: str) -> str:
        if self._names is not None:
            text = self._names.sub(lambda found: self._known[found["name"]], text)
        return _FOUND.sub(self._by_its_form, text)

    def _by_its_form(self, found: re.Match[str]) -> str:
        kind, thing = str(found.lastgroup), found[0]
        if kind.startswith("address") and not _tells_a_machine(found):
            return thing
        return self.alias(kind, thing)

    def _look_for_names(self, value: Any) -> None:
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
            self._look_for_names(each)
        if isinstance(value, dict):
            for key in value.keys() & KINDS.keys():
                for thing in value[key] if isinstance(value[key], list | tuple) else [value[key]]:
                    self._learn(KINDS[key], thing)
            if "kernel" in value:  # the facts of a host
                self._learn("host", value.get("name"))

    def _learn(self, kind: str, thing: Any) -> None:
        if not isinstance(thing, str) or thing in self._known:
            return
        names = [thing, thing.partition(".")[0]] if kind == "host" else [thing]
        if new := [name for name in names if not (ANY_WORD.fullmatch(name) or OURS.fullmatch(name))]:
            self._known.update(dict.fromkeys(new, self.alias(kind, thing)))
            longest = sorted(map(re.escape, self._known), key=len, reverse=True)
            self._names = re.compile(rf"(?<!\w)(?P<name>{'|'.join(longest)})(?:\.[A-Za-z][\w-]+)*(?!\w)")

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list | tuple):
            return [self._replaced(each) for each in value]
        if not isinstance(value, Mapping):
            return value
        kinds = {**KINDS, "name": "host"} if "kernel" in value else KINDS
        return {self.text(key): self._of_kind(kinds.get(key), each) for key, each in value.items()}

    def _of_kind(self, kind: str | None, value: Any) -> Any:
        if kind and isinstance(value, str):
            return self.alias(kind, value)
        if kind and isinstance(value, list | tuple):
            return [self._of_kind(kind, each) for each in value]
        return self._replaced(value)


def _in(size: int, digits: str) -> list[str]:
    return re.findall("." * size, digits)


def _uuid(digits: str, thing: str) -> str:
    kind = re.findall(r"^[A-Z]+(?=-)", thing)  # what NVIDIA puts before it: GPU or MIG
    return "-".join((*kind, f"a11a5{digits[:3]}", *_in(4, digits[3:15]), digits[15:27]))


FORMS: Mapping[str, Callable[[str, str], str]] = {
    "host": lambda digits, _: f"host-alias-{digits[:10]}",
    "serial": lambda digits, _: f"alias-{digits[:10]}",
    "user": lambda digits, _: f"user-alias-{digits[:10]}",
    "uuid": _uuid,
    "hex": lambda digits, _: f"a11a5{digits[:27]}",
    "mac": lambda digits, _: ":".join(("02:a1:1a", *_in(2, digits[:8]))),
    "guid": lambda digits, _: ":".join(("a11a", *_in(4, digits[:12]))),
    # Of networks that no machine has: RFC 1112, class E, and RFC 6666.
    "address": lambda digits, _: ".".join(("240", *(str(int(two, 16)) for two in _in(2, digits[:6])))),
    "address6": lambda digits, _: ":".join(("100:", *_in(4, digits[:16]))),
}


def _tells_a_machine(found: re.Match[str]) -> bool:
    try:
        address = ip_address(found[0])
    except ValueError:
        return False
    behind, before = found.string[found.end() : found.end() + 1], found.string[: found.start()][-2:]
    placed = behind in (":", "<") or before.endswith(("//", "@"))
    nobody = address.is_loopback or address.is_unspecified or address.is_multicast or address.is_reserved
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

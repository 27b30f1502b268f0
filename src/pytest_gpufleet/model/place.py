"""Where something belongs: a GPU of a node, a pair of GPUs, a node, or all of them together."""

import re
from collections.abc import Hashable, Iterable
from functools import lru_cache
from typing import ClassVar, TypeVar

Key = TypeVar("Key", bound=Hashable)
Thing = TypeVar("Thing")

CALLED = {  # by people
    "gpu": "GPU", "cpu": "CPU rank", "numa": "NUMA node", "nic": "NIC", "rail": "rail", "group": "group",
    "domain": "NVLink domain",
}  # fmt: skip
DEVICE = re.compile(r"(?:node(\d+)/)?([a-z]+)(\d+)")


class Where:
    """A Place or a Pair: a value, sorted by the devices that it consists of. Equal ones are one object: places are keys
    of every figure. No dataclass, which msgspec would take apart: in JSON it is a text, also as a key (see `codec`)."""

    __slots__ = ("_key", "parts")

    _key: tuple[tuple[int, str, int], ...]
    parts: tuple["Place", ...]

    def __lt__(self, other: "Where") -> bool:
        return self._key < other._key


class Place(Where):
    """A device of a node (`kind` "gpu", "cpu" for a rank of a rehearsal, "numa" for a NUMA node, "nic" for a port of a
    network adapter, "rail" for the way of its GPU or rank to other nodes; `index` counts on its node), a node ("node"),
    some nodes ("group"), the NVLink domain that a node is in ("domain"), or everything (WORLD). Its text is that of
    evidence: "gpu3", "node", "world"; of a node after the first "node1", "node1/gpu3"."""

    __slots__ = ("index", "kind", "node")
    _known: ClassVar[dict[tuple[int, str, int], "Place"]] = {}

    node: int
    kind: str
    index: int

    def __new__(cls, node: int, kind: str, index: int = 0) -> "Place":
        key = (node, kind, index)
        if (known := cls._known.get(key)) is None:
            known = super().__new__(cls)
            known.node, known.kind, known.index, known._key, known.parts = node, kind, index, (key,), (known,)
            known = cls._known.setdefault(key, known)  # another thread may have been faster
        return known

    def __reduce__(self) -> tuple[type["Place"], tuple[int, str, int]]:
        return Place, self._key[0]

    @property
    def is_device(self) -> bool:
        return self.kind not in ("node", "world")

    @property
    def is_on_node(self) -> bool:
        return self.kind not in ("group", "domain", "world")

    def __repr__(self) -> str:
        node = f"node{self.node}" if self.node else ""
        device = f"{self.kind}{self.index}" if self.is_device else ""
        return "/".join(filter(None, (node, device))) or self.kind


class Pair(Where):
    """Two devices and what lies between them, from the first to the second."""

    __slots__ = ("first", "second")
    _known: ClassVar[dict[tuple[Place, Place], "Pair"]] = {}

    first: Place
    second: Place

    def __new__(cls, first: Place, second: Place) -> "Pair":
        key = (first, second)
        if (known := cls._known.get(key)) is None:
            known = super().__new__(cls)
            known.first, known.second, known._key, known.parts = first, second, first._key + second._key, key
            known = cls._known.setdefault(key, known)
        return known

    def __reduce__(self) -> tuple[type["Pair"], tuple[Place, Place]]:
        return Pair, (self.first, self.second)

    def __repr__(self) -> str:
        return f"{self.first}-{self.second}"


WORLD = Place(0, "world")
THIS_NODE = Place(0, "node")


def gpu(index: int, node: int = 0) -> Place:
    return Place(node, "gpu", index)


def on_node(where: Where, node: int) -> Where:
    """The same place of another node. All ranks of a run on one machine are that node."""
    moved = [Place(node, "node" if part.kind == "world" else part.kind, part.index) for part in where.parts]
    return Pair(moved[0], moved[1]) if isinstance(where, Pair) else moved[0]


@lru_cache(maxsize=1 << 16)
def read(text: str) -> Where:
    """The place of a text. ValueError if it is none."""
    first, dash, second = text.partition("-")
    return Pair(_read(first), _read(second)) if dash else _read(first)


def where(given: Where | str) -> Where:
    return given if isinstance(given, Where) else read(given)


def _read(text: str) -> Place:
    if text in ("world", "node"):
        return Place(0, text)
    if not (device := DEVICE.fullmatch(text)):
        raise ValueError(f'{text!r} is no place: "world", "node", "gpu3", "gpu0-gpu5" or "node1/gpu3" are')
    on, kind, index = device.groups()
    return Place(int(index), "node") if kind == "node" and on is None else Place(int(on or 0), kind, int(index))


def grouped(pairs: Iterable[tuple[Key, Thing]]) -> dict[Key, list[Thing]]:
    """The things of each key; keys and things in the order in which they come."""
    found: dict[Key, list[Thing]] = {}
    for key, thing in pairs:
        found.setdefault(key, []).append(thing)
    return found

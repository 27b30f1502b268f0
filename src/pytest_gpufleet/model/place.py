"""Where something belongs: a GPU of a node, a pair of GPUs, a node, or all of them together."""

from __future__ import annotations

import re
from dataclasses import dataclass

NODE = re.compile(r"node(\d+)/")
DEVICE = re.compile(r"([a-z]+)(\d+)")


@dataclass(frozen=True, order=True)
class Place:
    """A device of a node (`kind` "gpu", or "cpu" for a rank of a rehearsal; `index` counts on its node), a node
    (`kind` "node"), or everything (WORLD)."""

    node: int
    kind: str
    index: int = 0

    @property
    def parts(self) -> tuple[Place, ...]:
        return (self,)

    def __str__(self) -> str:
        return write(self)


@dataclass(frozen=True, order=True)
class Pair:
    """Two devices and what lies between them."""

    first: Place
    second: Place

    @property
    def parts(self) -> tuple[Place, ...]:
        return (self.first, self.second)

    def __str__(self) -> str:
        return write(self)


Where = Place | Pair

WORLD = Place(0, "world")


def gpu(index: int, node: int = 0) -> Place:
    return Place(node, "gpu", index)


def write(where: Where) -> str:
    """A place as evidence has it: "gpu3", "gpu0-gpu5", "node", "world"; of a node after the first "node1/gpu3"."""
    if isinstance(where, Pair):
        return f"{write(where.first)}-{write(where.second)}"
    node = f"node{where.node}" if where.node else ""
    if where.kind in ("world", "node"):
        return node or where.kind
    return f"{node}/{where.kind}{where.index}" if node else f"{where.kind}{where.index}"


def read(text: str) -> Where:
    """The place that `write` wrote. ValueError if it is none."""
    first, dash, second = text.partition("-")
    return Pair(_read(first), _read(second)) if dash else _read(first)


def _read(text: str) -> Place:
    if text in ("world", "node"):
        return Place(0, text)
    if node := re.fullmatch(r"node(\d+)", text):
        return Place(int(node[1]), "node")
    on = NODE.match(text)
    device = DEVICE.fullmatch(text[on.end() if on else 0 :])
    if device is None:
        raise ValueError(f'{text!r} is no place: "world", "node", "gpu3", "gpu0-gpu5" or "node1/gpu3" are')
    return Place(int(on[1]) if on else 0, device[1], int(device[2]))

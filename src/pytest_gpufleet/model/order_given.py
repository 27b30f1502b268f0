"""What was bought: the order that a machine is held against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class Order(msgspec.Struct, frozen=True):
    """The file that was given with --fleet-order: its name, its SHA-256, and what it says, as TOML has it."""

    file: str
    sha256: str
    content: Mapping[str, Any]

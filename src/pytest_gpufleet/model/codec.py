"""Types of the model as JSON values, and back."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from pytest_gpufleet.model import place
from pytest_gpufleet.model.place import Where

T = TypeVar("T")


def plain(value: object) -> Any:
    """A value of the model as JSON has it; places are texts, also as keys."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_written)


def _written(value: object) -> str:
    if isinstance(value, Where):
        return place.write(value)
    raise NotImplementedError(f"{type(value).__name__} has no form in JSON")


def typed(value: Any, kind: type[T]) -> T:
    """The inverse of `plain`. ValueError that says what is wrong, and where."""
    return msgspec.convert(value, kind, dec_hook=_read)


def _read(kind: type, value: Any) -> Where:
    if isinstance(value, str):
        return place.read(value)
    raise ValueError(f"a place is a text, not {value!r}")

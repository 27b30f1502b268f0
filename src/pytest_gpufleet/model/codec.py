"""Types of the model as JSON values or as bytes, and back."""

import sys
from datetime import datetime
from functools import cache
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from msgspec import Meta

from pytest_gpufleet.model import place
from pytest_gpufleet.model.place import Where

T = TypeVar("T")

Amount = Annotated[float, Meta(ge=-1e15, le=1e15)]  # a time, a size or a reading
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


def about(description: str = "", names: Any = None, **rules: Any) -> Meta:
    """What a JSON Schema says of a field. `names`: a Literal of the keys of a table, of which msgspec tells nothing."""
    keys = {"propertyNames": {"enum": get_args(names)}} if names else None
    return Meta(description=description or None, extra_json_schema=keys, **rules)


class Moment(str):
    """A time with its zone, as ISO 8601 writes it; "" if nobody says."""

    @property
    def seconds(self) -> float:
        """Since the epoch; 0 if nobody says."""
        return datetime.fromisoformat(self).timestamp() if self else 0.0


def plain(value: object) -> Any:
    """A value of the model as JSON has it; places are texts, also as keys."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_written)


def _written(value: object) -> str:
    if isinstance(value, Where | str):  # of other classes than str itself, as a Moment is
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} has no form in JSON")


def typed(value: Any, kind: type[T]) -> T:
    """The inverse of `plain`. ValueError that says what is wrong, and where."""
    return msgspec.convert(value, kind, dec_hook=_read)


def packed(value: object) -> bytes:
    """A value of the model for another process of this version, maybe of another node."""
    return msgspec.msgpack.encode(value, enc_hook=_written)


def unpacked(data: bytes, kind: Any) -> Any:
    """The inverse of `packed`, as an object of this type, which may be a union. ValueError that says what is wrong."""
    return _decoder(kind).decode(data)


@cache  # for a union of many types it takes longer than most messages
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_read)


def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Reads JSON as objects of this type, faster than `typed` reads what json.loads makes of it. It refuses some JSON
    that this does not: NaN, infinities, halves of a character."""
    return msgspec.json.Decoder(kind, dec_hook=_read)


def _read(kind: type, value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    if kind is Moment and value and datetime.fromisoformat(value).tzinfo is None:
        raise ValueError(f"{value!r} has no time zone")
    return Moment(value) if kind is Moment else place.read(value)

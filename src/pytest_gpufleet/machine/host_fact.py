"""A fact of the host: its name in evidence, its type, and how it is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.gpu import Missing

T = TypeVar("T", covariant=True)


@dataclass(frozen=True)
class HostFact(Generic[T]):
    """`kind`: the type that evidence is decoded to, which `read` returns; it raises Absent or Unreadable where there is
    nothing to return. `subject`: the part of the host that it is about ("bmc"); "" if no check depends on it alone.
    `on_request`: it takes a program of the system or long, so it is read when a check asks for it."""

    name: str
    kind: Any
    read: Callable[[], T]
    subject: str = ""
    on_request: bool = False

    def of(self, host: Mapping[str, Any]) -> T | Missing:
        """This fact among those of a host, as evidence holds them."""
        value = host.get(self.name)
        if value is None:
            return Missing(f"this system has no {self.name.replace('_', ' ')} on record", absent=True)
        if isinstance(value, Missing):
            return value
        try:
            found: T = codec.typed(value, self.kind)
        except ValueError as error:
            return Missing(f"the {self.name.replace('_', ' ')} on record cannot be read ({error})")
        return found

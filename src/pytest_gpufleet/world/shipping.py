"""Functions on their way to the ranks, and results on their way back."""

from __future__ import annotations

import io
import os
import pickle
import pkgutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

# Above this a payload travels as a file: a socket holds a small message even when nobody reads it, so that neither side
# has to wait for a peer that hangs.
INLINE_BYTES = 8 * 1024

Parcel = bytes | Path


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, except for two. A tensor on a GPU travels as its copy on the CPU: the controller has no GPU context.
    A module that is more than a module, such as torch.backends.cudnn, travels by name."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type == "cuda":
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and _named(obj.__name__) is obj:
            return pkgutil.resolve_name, (obj.__name__,)
        return super().reducer_override(obj)


def _named(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return None


def pack(value: Any, folder: Path) -> Parcel:
    """Pickle a value, functions and classes of test modules included; a large one goes to a file in `folder`."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    if buffer.tell() <= INLINE_BYTES:
        return buffer.getvalue()
    descriptor, name = tempfile.mkstemp(dir=folder, suffix=".parcel")
    with os.fdopen(descriptor, "wb") as file:
        file.write(buffer.getbuffer())
    return Path(name)


def unpack(parcel: Parcel) -> Any:
    if isinstance(parcel, bytes):
        return pickle.loads(parcel)
    with parcel.open("rb") as file:
        return pickle.load(file)


def discard(parcel: Parcel) -> None:
    if isinstance(parcel, Path):
        parcel.unlink(missing_ok=True)


def unsendable(values: dict[str, Any]) -> list[str]:
    """The names of the values that cannot be pickled, each with the reason."""
    reasons = []
    for name, value in values.items():
        try:
            _Pickler(io.BytesIO()).dump(value)
        except Exception as error:  # pickling runs the objects' own code, which may raise anything
            reasons.append(f"{name} ({type(value).__name__}): {error}")
    return reasons


def describe(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


_by_value: set[str] = set()


def ship_by_value(module: ModuleType) -> None:
    """Send what a test module, its conftest files and its sibling helpers define, since no rank can import them."""
    if module.__name__ in _by_value:
        return
    _by_value.add(module.__name__)
    folder = os.path.dirname(module.__file__ or "")
    for other in list(sys.modules.values()):
        file = getattr(other, "__file__", None)
        if other is module or (file and (os.path.dirname(file) == folder or os.path.basename(file) == "conftest.py")):
            cloudpickle.register_pickle_by_value(other)

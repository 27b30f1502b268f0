"""Functions on their way to the ranks, and results on their way back: values as bytes."""

import io
import os
import pickle
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import cloudpickle


class CannotTravel(TypeError):
    """A function, or what it is called with, cannot be pickled."""


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


def pack(value: Any) -> bytes:
    """Pickle a value, functions and classes of test modules included."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpack(packed: bytes) -> Any:
    return pickle.loads(packed)


def pack_work(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """What a Call has as `work`. CannotTravel, which names the values that are to blame, if it cannot be pickled."""
    __tracebackhide__ = True
    try:
        return pack((function, args, kwargs))
    except Exception as error:  # pickling runs the objects' own code, which may raise anything
        parts = {describe(function): function, **{f"argument {i + 1}": arg for i, arg in enumerate(args)}}
        for key, value in kwargs.items():
            parts |= value if isinstance(value, dict) else {key: value}
        reasons = "; ".join(_unsendable(parts)) or str(error)
        raise CannotTravel(f"cannot be sent to the ranks: {reasons}; make it on the ranks instead") from None


def _unsendable(values: dict[str, Any]) -> list[str]:
    """The names of the values that cannot be pickled, each with the reason."""
    reasons = []
    for name, value in values.items():
        try:
            pack(value)
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

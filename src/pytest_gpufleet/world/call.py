"""What is run on ranks as it travels to them, and results on their way back: values as bytes."""

import io
import os
import pickle
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import cloudpickle

from pytest_gpufleet.model import place
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.place import Place


def nothing() -> None:
    pass


@dataclass(frozen=True)
class RankSpec:
    """Rank `index` of `size`, which is rank `local_index` of the `local_size` on its node. `device` is a torch device
    of that node ("cuda:3", "cpu"), `gpu` the GPU behind it; None in a rehearsal. `prepare` is called on the
    rank when it starts. `host`: the name of its node, where there are several. `environment`: variables that it finds
    whatever else there is. `packages`: those that it finds past sys.path, as loaded_packages tells them, beside those
    of the process that starts it."""

    index: int
    size: int
    node: int
    local_index: int
    local_size: int
    device: str
    gpu: Gpu | None
    cpu_threads: int | None = None
    prepare: Callable[[], None] = nothing
    host: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, tuple[str, list[str]]] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        return place.gpu(self.gpu.index, self.node) if self.gpu else Place(self.node, "cpu", self.local_index)

    @property
    def name(self) -> str:
        where = self.gpu.identity if self.gpu else "CPU"
        return f"rank {self.index} of {self.size}, {self.host and f'{self.host} '}{where}"


Members = tuple[int, ...]

MOST_RANKS = 16  # in a sentence
START = 0  # the call that a rank answers when it is ready: nobody has sent it


@dataclass(frozen=True)
class Reporting:
    """`filters`: those of the module warnings, packed; `log_level`: below it nothing is logged."""

    filters: bytes
    log_level: int


@dataclass(frozen=True)
class Call:
    """Run `work`, a packed (function, args, kwargs), on disjoint groups of ranks at the same time, with or without the
    process group of each. `local_sizes`: how many of these ranks each node has.

    `reporting`: what is to be heard of warnings and log records; None: what a rank does by itself.
    `number`: no other call of this world has it, and its answers bear it. `test`: no other test of this session has it.
    """

    name: str
    groups: tuple[Members, ...]
    local_sizes: dict[int, int]
    with_group: bool
    work: bytes
    number: int = START
    test: int = 0
    reporting: Reporting | None = None

    @property
    def ranks(self) -> Members:
        return tuple(rank for members in self.groups for rank in members)

    def group_of(self, rank: int) -> Members:
        return next(members for members in self.groups if rank in members)


def local_sizes(specs: Iterable[RankSpec]) -> dict[int, int]:
    return dict(Counter(spec.node for spec in specs))


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0, 2 and 3998 more" """
    numbers = sorted(ranks)
    more = f" and {len(numbers) - MOST_RANKS} more" if len(numbers) > MOST_RANKS else ""
    return f"rank {numbers[0]}" if len(numbers) == 1 else "ranks " + ", ".join(map(str, numbers[:MOST_RANKS])) + more


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

"""What is run on ranks as it travels to them, values as bytes; how a call ends there, and what it prints; and what an
Engine, a way of running rank processes, must be able to do."""

import io
import os
import pickle
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Protocol

import cloudpickle
import msgspec

from pytest_gpufleet.model import place
from pytest_gpufleet.model.endings import NotApplicable, NotJudged
from pytest_gpufleet.model.events import LossCurve
from pytest_gpufleet.model.place import Gpu, Place


def nothing() -> None:
    pass


@dataclass(frozen=True)
class RankSpec:
    """Rank `index` of `size`, which is rank `local_index` of the `local_size` on its node. `device`: of torch, on that
    node ("cuda:3", "cpu"). `gpu`: None in a rehearsal. `prepare` is called on the rank when it starts. `host`: the name
    of its node, where there are several. `environment`: variables that it finds whatever else there is."""

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
class Call:
    """Run `work`, a packed (function, args, kwargs), on disjoint groups of ranks at the same time, with or without the
    process group of each. `nodes`: of each of these ranks, group by group. `number`: of this call
    alone in its world; its answers bear it. `test`: no other test of this session has it."""

    name: str
    groups: tuple[Members, ...]
    nodes: tuple[int, ...]
    with_group: bool
    work: bytes
    number: int = START
    test: int = 0

    @property
    def ranks(self) -> Members:
        return tuple(rank for members in self.groups for rank in members)


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0, 2 and 3998 more" """
    numbers = sorted(ranks)
    more = f" and {len(numbers) - MOST_RANKS} more" if len(numbers) > MOST_RANKS else ""
    return f"rank {numbers[0]}" if len(numbers) == 1 else "ranks " + ", ".join(map(str, numbers[:MOST_RANKS])) + more


class CannotTravel(TypeError):
    """A function, or what it is called with, cannot be pickled."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, except for three. A tensor on a GPU travels as its copy on the CPU: the controller has no context.
    A module that is more than a module, such as torch.backends.cudnn, travels by name. Code keeps the name of its file,
    without which a traceback has no lines: cloudpickle writes "<dynamic-code>" for it from 3.1.3 on."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type == "cuda":
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
            with suppress(ImportError, AttributeError, ValueError):  # it has no name of its own
                if pkgutil.resolve_name(obj.__name__) is obj:
                    return pkgutil.resolve_name, (obj.__name__,)
        if isinstance(obj, CodeType):
            make, parts = self.dispatch_table[CodeType](obj)
            return make, tuple(obj.co_filename if part == "<dynamic-code>" else part for part in parts)
        return super().reducer_override(obj)


def pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


unpack = pickle.loads


def pack_work(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """What a Call has as `work`. CannotTravel, which names the values that are to blame, if it cannot be pickled."""
    __tracebackhide__ = True
    try:
        return pack((function, args, kwargs))
    except Exception as error:  # pickling runs the objects' own code, which may raise anything
        parts, reasons = {describe(function): function, **{f"argument {i + 1}": arg for i, arg in enumerate(args)}}, []
        for key, value in kwargs.items():
            parts |= value if isinstance(value, dict) else {key: value}
        for name, value in parts.items():
            try:
                pack(value)
            except Exception as why:
                reasons.append(f"{name} ({type(value).__name__}): {why}")
        text = "; ".join(reasons) or str(error)
        raise CannotTravel(f"cannot be sent to the ranks: {text}; make it on the ranks instead") from None


def describe(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", "").replace("<locals>.", "") or repr(function)


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


@dataclass(frozen=True)
class Outcome:
    """What a rank answers, as plain data: an exception often cannot be pickled. `kind`: "returned", "raised" or one
    of ENDINGS. `call`: its number. `result`: packed. `phase`: in which it was raised. `seconds`: how long it took."""

    kind: str
    call: int
    result: bytes = b""
    error_type: str = ""
    error_text: str = ""
    traceback: str = ""
    output: str = ""
    phase: str = ""
    seconds: float = 0.0
    losses: tuple[LossCurve, ...] = ()


class Answer(msgspec.Struct, frozen=True, tag_field="is", tag="answered"):
    """What a rank has sent: a pickled Outcome."""

    rank: int
    parcel: bytes


class Death(msgspec.Struct, frozen=True, tag_field="is", tag="died"):
    """A rank process is gone, or of no more use. `reason` goes on where "rank 3 died" ends: "by SIGSEGV (...)"."""

    rank: int
    reason: str


@dataclass(frozen=True)
class Trace:
    """What can be seen of a rank from outside, be it alive, stuck or dead. It is in `phase` for `seconds`. `stack`: of
    its Python threads, or as a fatal signal found it. `output`: the end of what it printed. `recorder`: torch's flight
    recorder, as JSON. `state`: what is unusual about its process, "(stopped by a signal)"."""

    phase: str = ""
    seconds: float = 0.0
    stack: str = ""
    output: str = ""
    recorder: str = ""
    state: str = ""


class Engine(Protocol):
    """Starts, feeds, examines and kills rank processes, on whatever machines. Waiting for a whole call, deadlines and
    diagnosis live above it. Nothing here waits for a rank longer than it says."""

    def start(self, specs: Sequence[RankSpec]) -> None:
        """Start one process for each spec. Does not wait for them: each answers the call START when it is ready."""

    def rendezvous(self) -> str:
        """By which init_method of torch.distributed the ranks that were started last find each other."""

    def submit(self, ranks: Iterable[int], parcel: bytes) -> None:
        """Send a pickled Call to ranks, which answer it once each. A rank that is gone shows in `wait`, not here."""

    def wait(self, timeout: float) -> list[Answer | Death]:
        """What happened on any rank, as soon as anything did; [] after `timeout` seconds. A death is reported once."""

    def examine(self, ranks: Iterable[int]) -> dict[int, Trace]:
        """What these ranks are doing, or did last. Asks those that live for their stacks, for a moment at most."""

    def kill(self, timeout: float) -> dict[int, str]:
        """End every rank with SIGKILL. Those that are still there after `timeout` seconds, with their state."""


# What ends a call and is no failure of it, as it is raised on a rank and again in the controller. By the kind of their
# outcome, the most special first. Who runs tests on a world adds those of its own, in the controller and on the ranks.
ENDINGS: dict[str, tuple[type[BaseException], Callable[[str], BaseException]]] = {
    "not applicable": (NotApplicable, NotApplicable),
    "not judged": (NotJudged, NotJudged),
}


def raise_again(outcomes: Mapping[int, Outcome]) -> None:
    """End the test as its ranks have ended it, if any has by what is no failure."""
    __tracebackhide__ = True
    for kind, (_, again) in ENDINGS.items():
        if texts := {rank: outcome.error_text for rank, outcome in outcomes.items() if outcome.kind == kind}:
            where = "" if len(texts) == len(outcomes) else f" (on {ranks_text(texts)} of {len(outcomes)} only)"
            raise again(next(iter(texts.values())) + where)


TAIL_BYTES = 8 * 1024


class Output:
    """On a rank: what it prints. The file has a descriptor of its own: a test may redirect or close 1 and 2."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.restore()

    def restore(self) -> None:
        """Whatever was made of the descriptors and of Python's streams, they lead to the file."""
        _flush()
        for number in (1, 2):
            os.dup2(self._file, number)
        sys.stdout, sys.stderr = (
            os.fdopen(number, "w", buffering=1, errors="backslashreplace", closefd=False) for number in (1, 2)
        )

    def take(self) -> str:
        """The end of what was printed since the last time; the file is emptied."""
        _flush()
        if (size := os.fstat(self._file).st_size) == 0:
            return ""
        tail = os.pread(self._file, TAIL_BYTES, max(0, size - TAIL_BYTES))
        os.ftruncate(self._file, 0)
        return tail.decode(errors="replace")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it was closed, or is anything that a test has put there
            stream.flush()

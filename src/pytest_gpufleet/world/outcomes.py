"""How a call can end on one rank."""

import logging
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO, TypeVar

from pytest_gpufleet.model.endings import NotApplicable, NotJudged
from pytest_gpufleet.model.events import LossCurve
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.world.call import Reporting, pack, ranks_text


@dataclass(frozen=True)
class Notice:
    """A warning as plain data; `category` is "module.name"."""

    category: str
    text: str
    file: str
    line: int


@dataclass(frozen=True)
class Outcome:
    """What a rank answers. Plain data: an exception itself often cannot be pickled. `kind`: "returned", "raised" or one
    of ENDINGS. `call` is the number of the call that it answers, `result` what was returned, packed, `phase` the one in
    which it was raised, `seconds` how long the call took on this rank, `notices` what it has warned of, and
    `losses` those of its trainings."""

    kind: str
    call: int
    result: bytes = b""
    error_type: str = ""
    error_text: str = ""
    traceback: str = ""
    output: str = ""
    phase: str = ""
    seconds: float = 0.0
    notices: tuple[Notice, ...] = ()
    losses: tuple[LossCurve, ...] = ()


# What ends a call and is no failure of it, as it is raised on a rank and again in the controller. By the kind of their
# outcome, the most special first. Who runs tests on a world adds those of its own, in the controller and on the ranks.
ENDINGS: dict[str, tuple[type[BaseException], Callable[[str], BaseException]]] = {
    "not applicable": (NotApplicable, NotApplicable),
    "not judged": (NotJudged, NotJudged),
}


def kind_of(error: BaseException) -> str:
    """The kind of the outcome of a call that raised this."""
    return next((kind for kind, (raised, _) in ENDINGS.items() if isinstance(error, raised)), "raised")


def raise_again(outcomes: Mapping[int, Outcome]) -> None:
    """End the test as its ranks have ended it, if any has by what is no failure."""
    __tracebackhide__ = True
    for kind, (_, again) in ENDINGS.items():
        if texts := {rank: outcome.error_text for rank, outcome in outcomes.items() if outcome.kind == kind}:
            text = next(iter(texts.values()))
            where = "" if len(texts) == len(outcomes) else f" (on {ranks_text(texts)} of {len(outcomes)} only)"
            raise again(text + where)


def echo_output(outcomes: Mapping[int, Outcome]) -> None:
    """Print what ranks printed, so that pytest's capture and -s show it with the test."""
    for rank in sorted(outcomes):
        for line in outcomes[rank].output.splitlines():
            sys.stdout.write(f"[rank {rank}] {line}\n")


T = TypeVar("T")
TAIL_BYTES = 8 * 1024


class Output:
    """On a rank: what it prints. The file is read and emptied by a descriptor of its own, since a test may have 1 and 2
    lead to a file of its own, or close them."""

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
        size = os.fstat(self._file).st_size
        if size == 0:
            return ""
        tail = os.pread(self._file, TAIL_BYTES, max(0, size - TAIL_BYTES))
        os.ftruncate(self._file, 0)
        return tail.decode(errors="replace")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it was closed, or is anything that a test has put there
            stream.flush()


NOTICES_LIMIT = 100  # of one call: a warning in each step of a long loop must not flood the report


def reporting() -> Reporting:
    """What holds in this process now, for a rank to do likewise."""
    return Reporting(_packed(tuple(warnings.filters)), logging.root.level)


@lru_cache(maxsize=8)
def _packed(filters: tuple[Any, ...]) -> bytes:
    return pack(list(filters))


def set_filters(filters: list[Any]) -> None:
    warnings.resetwarnings()  # which also drops what is cached of them
    warnings.filters[:] = filters  # type: ignore[index]  # a list, not declared as one


class Notices:
    """On a rank: the warnings that a test is to hear of. All others go where Python sends them."""

    def __init__(self) -> None:
        self._noticed: list[Notice] = []
        self._wanted: Reporting | None = None
        self._show_as_python_does = warnings.showwarning
        warnings.showwarning = self._show

    def heed(self, wanted: Reporting | None) -> None:
        """From here on do as the controller does, whose filters come before those of this process."""
        if wanted is None or wanted == self._wanted:
            return
        self._wanted = wanted
        logging.root.setLevel(wanted.log_level)
        with suppress(Exception):  # a category that cannot be imported here is not warned of here
            given = pickle.loads(wanted.filters)
            set_filters([*given, *warnings.filters])

    def forget(self) -> None:
        """Another test begins; the filters have been put back."""
        self._wanted = None

    def take(self) -> tuple[Notice, ...]:
        """Those since the last time."""
        taken, self._noticed = tuple(dict.fromkeys(self._noticed)), []
        return taken

    def _show(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        if self._wanted is None:
            self._show_as_python_does(message, category, filename, lineno, file, line)
        elif len(self._noticed) < NOTICES_LIMIT:
            name = f"{category.__module__}.{category.__qualname__}"
            self._noticed.append(Notice(name, str(message), filename, lineno))


def show_notices(outcomes: Mapping[int, Outcome]) -> None:
    """Hand on what ranks have warned of, each once, past the filters, which were asked on the rank."""
    by_notice = grouped((notice, rank) for rank in sorted(outcomes) for notice in outcomes[rank].notices)
    for notice, ranks in by_notice.items():
        category = loaded_type(notice.category, Warning) or UserWarning
        warnings.showwarning(f"{notice.text} ({ranks_text(ranks)})", category, notice.file, notice.line)


def loaded_type(name: str, kind: type[T]) -> type[T] | None:
    """The class "module.name", if it is loaded here and one of this kind."""
    module, _, attribute = name.rpartition(".")
    loaded = sys.modules.get(module or "builtins")
    found = vars(loaded).get(attribute) if loaded else None
    return found if isinstance(found, type) and issubclass(found, kind) else None

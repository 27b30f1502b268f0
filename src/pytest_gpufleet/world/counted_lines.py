"""Lines of tests that ran on ranks, for coverage in the controller, which counts those of its own process.

By itself coverage keeps what it counted in a file that a process writes at its end. Ranks are killed: they count in
memory, call by call, and answer with it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_gpufleet.world.outcomes import Outcome

# The options of coverage by which it chooses what to count: https://coverage.readthedocs.io/en/latest/config.html
OPTIONS = tuple(
    f"run:{name}" for name in ("branch", "source", "source_pkgs", "include", "omit", "cover_pylib", "relative_files")
)
# By file: the numbers of its lines, or pairs of them where branches are counted.
Lines = dict[str, list[Any]]


def wanted() -> dict[str, Any] | None:
    """By what coverage counts lines in this process, for ranks to do likewise; None if it does not."""
    counting = _coverage_here()
    return None if counting is None else {name: counting.get_option(name) for name in OPTIONS}


class LineCounter:
    """On a rank."""

    def __init__(self) -> None:
        self._coverage: Any = None

    def begin(self, options: Mapping[str, Any] | None) -> None:
        """Count from here on. Only functions that are called after this are counted."""
        if options is None:
            return
        with suppress(ImportError), _without_warnings():  # of another node, which has it not
            from coverage import Coverage

            self._coverage = Coverage(data_file=None, config_file=False)
            for name, value in options.items():
                self._coverage.set_option(name, value)
            self._coverage.start()

    def take(self) -> Lines:
        """What was counted, which ends here."""
        counting, self._coverage = self._coverage, None
        if counting is None:
            return {}
        with _without_warnings():
            counting.stop()
            data = counting.get_data()
        of_file = data.arcs if data.has_arcs() else data.lines
        return {file: counted for file in data.measured_files() if (counted := of_file(file))}


def add(outcomes: Mapping[int, Outcome]) -> None:
    """Have coverage in this process know what ranks have counted."""
    counting = _coverage_here()
    for outcome in outcomes.values():
        if counting is not None and outcome.lines:
            with _without_warnings():
                data = counting.get_data()
            (data.add_arcs if counting.get_option("run:branch") else data.add_lines)(outcome.lines)


def _coverage_here() -> Any:
    """What coverage has started in this process, and has not stopped."""
    known = getattr(sys.modules.get("coverage"), "Coverage", None)
    return known.current() if known is not None else None


@contextmanager
def _without_warnings() -> Iterator[None]:
    """What coverage has to say of its data ("no data was collected") it says once more at the end of the session."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

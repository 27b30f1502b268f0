"""What of others stood around the checks of the suite.

Whoever controls the Python environment can make pytest say anything. So what ran is on record (`what_ran`), and what
could change the outcome of a check of the suite leaves the verdict INCOMPLETE.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pytest_gpufleet
from pytest_gpufleet.model import suite
from pytest_gpufleet.model.levels import check_name
from pytest_gpufleet.plugin import compat
from pytest_gpufleet.plugin.keys import ENDED, REACHED
from pytest_gpufleet.plugin.what_ran import what_ran

if TYPE_CHECKING:
    from pytest_gpufleet.run.run import Run

# Hooks by which a failure can be made to pass, or a body be left out. What only sees items before they run is not among
# them: a check that is deselected, skipped, replaced or given other arguments shows. Those of the second kind are
# called for every test, by whatever conftest.py; the others by those in folders above it alone.
AROUND_A_TEST = (
    "pytest_runtest_setup",
    "pytest_runtest_call",
    "pytest_pyfunc_call",
    "pytest_runtest_makereport",
    "pytest_fixture_setup",
    "pytest_make_collect_report",
    "pytest_pycollect_makemodule",
)
AROUND_ALL = ("pytest_cmdline_main", "pytest_runtestloop", "pytest_runtest_protocol")
# By which a check may be given what its file does not: named only if one was.
AT_COLLECTION = (
    "pytest_generate_tests",
    "pytest_pycollect_makeitem",
    "pytest_itemcollected",
    "pytest_collection_modifyitems",
)
# Markers by which a check runs on fewer ranks, or does not apply.
DECIDING = ("spmd", "world_size", "needs")
UNKNOWN = "an unknown file"

# Packages with such hooks, or with fixtures, that leave the outcome of a check of the suite alone, and why.
HARMLESS = {
    compat.PACKAGE.name: "pytest itself",
    "pytest_gpufleet": "this plugin",
    "pytest_html": "adds links and images to reports",
    "pytest_metadata": "tells of what ran",
    "xdist": "does nothing without workers, and workers are refused",
    "pytest_timeout": "ends a test that takes too long, which fails by that",
    "pytest_cov": "counts lines",
    "pytest_randomly": "changes the order and the seeds of random numbers",
    "pytest_rerunfailures": "runs again what failed; that it failed stays on record",
    "pytest_asyncio": "calls bodies that are async; the suite has none",
    "anyio": "calls bodies that are async; the suite has none",
    "_hypothesis_pytestplugin": "looks after tests marked @given; the suite has none",
    "allure_pytest": "writes a report of its own",
    "pytest_jsonreport": "writes a report of its own",
    "pytest_benchmark": "looks after tests with its marker or its fixture; the suite has none",
    "faker": "makes names for tests that ask for them; the suite has none",
    "langsmith": "looks after tests with its marker; the suite has none",
    "logfire": "writes traces",
    "syrupy": "changes how PyCharm shows a difference",
}

KNOWN = pytest.StashKey[tuple[str, ...]]()


def interference(session: pytest.Session) -> list[dict[str, Any]]:
    """The hooks around checks of the suite, and what these were given by hooks, that are somebody else's."""
    items = [item for item in session.items if is_of_the_suite(item)]
    found: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for item in items:
        for kind, name, file in (*_hooks(item), *_fixtures(item), *_collection(item)):
            found[kind, name, file].add("" if kind == "hook" else check_name(item.nodeid))
    return [
        {"kind": kind, "name": name, "file": file, "checks": sorted(filter(None, checks))}
        for (kind, name, file), checks in sorted(found.items())
    ]


def is_of_the_suite(item: pytest.Item) -> bool:
    return check_name(item.nodeid) in suite.shipped().checks


@contextmanager
def witnessed(item: pytest.Function) -> Iterator[None]:
    """Around the call of a body: that it was called, and what it raised, whatever others make of that."""
    __tracebackhide__ = True
    item.stash[REACHED] = _is_its_own_body(item)
    try:
        yield
    except BaseException as error:
        item.stash[ENDED] = error
        raise


def _is_its_own_body(item: pytest.Function) -> bool:
    """Whether what is about to be called as the body of a check is the function that the file of this name defines."""
    named = check_name(item.nodeid) == f"{item.path.name}::{item.originalname}"
    own = item.obj is getattr(item.module, item.originalname, None)
    of_the_file = named and own and _file_of(item.obj) == str(item.path)
    # By its name alone: bytecode that was copied with its folder says where it was compiled.
    return of_the_file and Path(item.obj.__code__.co_filename).name == item.path.name


def _hooks(item: pytest.Item) -> Iterator[tuple[str, str, str]]:
    yield from _hooks_of_others(item, item.ihook, AROUND_A_TEST)
    yield from _hooks_of_others(item, item.config.hook, AROUND_ALL)


def _hooks_of_others(item: pytest.Item, caller: Any, names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    for name in names:
        for implementation in getattr(caller, name).get_hookimpls():
            if file := _of_others(implementation.function, item):
                yield "hook", name, file


def _fixtures(item: pytest.Item) -> Iterator[tuple[str, str, str]]:
    for name, definitions in compat.fixture_definitions(item).items():
        if file := _of_others(definitions[-1].func, item):
            yield "fixture", name, file


def _collection(item: pytest.Item) -> Iterator[tuple[str, str, str]]:
    """Who could have given a check what its file does not: arguments in the place of fixtures, other ranks, or a need
    for which it does not apply. Where no hook of the collection did, what it was given."""
    function, module = getattr(item, "function", None), item.getparent(pytest.Module)
    marks = [*getattr(function, "pytestmark", ()), *(module.own_markers if module else ())]
    case = getattr(item, "callspec", None)
    names = [mark.args[0] for mark in marks if mark.name == "parametrize"]
    own = {name.strip() for each in names for name in (each.split(",") if isinstance(each, str) else each)}
    given = {*getattr(case, "params", ())} - own
    marks += getattr(case, "marks", ())
    marked = {mark.name for mark in item.iter_markers() if mark.name in DECIDING and mark not in marks}
    if given or marked:
        unseen = [*(("fixture", name, UNKNOWN) for name in given), *(("marker", name, UNKNOWN) for name in marked)]
        yield from list(_hooks_of_others(item, item.ihook, AT_COLLECTION)) or unseen


def _of_others(function: Callable[..., object], item: pytest.Item) -> str:
    """The file of a function; "" if it is one of pytest's, of this plugin's or of a known plugin's, or stands in the
    suite's own files, which are held against their sums."""
    file = _file_of(function)
    own = (str(item.path), str(item.path.with_name(suite.CONFTEST)))
    return "" if file in own or file.startswith(_known_places(item.config)) else file


def _known_places(config: pytest.Config) -> tuple[str, ...]:
    """How the paths of files of pytest, of this plugin and of the plugins in HARMLESS begin. By where they are
    installed: a file of any name can say that it is one of theirs."""
    if KNOWN not in config.stash:
        folders = {str(dist.locate_file("")) for _, dist in config.pluginmanager.list_plugin_distinfo()}
        folders |= {str(compat.PACKAGE.parent), str(Path(str(pytest_gpufleet.__file__)).parents[1])}
        config.stash[KNOWN] = tuple(
            str(Path(folder, package)) + end for folder in folders for package in HARMLESS for end in ("/", ".py")
        )
    return config.stash[KNOWN]


def _file_of(function: Callable[..., object]) -> str:
    """The file whose module a function was defined in, whatever it says of itself."""
    return str(getattr(function, "__globals__", {}).get("__file__") or UNKNOWN)


class Witness:
    """Sees from within that the bodies of the suite's checks run, and tells what else ran."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._session: pytest.Session | None = None
        self._told: list[dict[str, Any]] = []

    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Call the body of a check, as pytest would do after this."""
        __tracebackhide__ = True
        if not is_of_the_suite(pyfuncitem):
            return None
        with witnessed(pyfuncitem):
            pyfuncitem.obj(**compat.arguments(pyfuncitem))
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._session = session
        self._run.record_event("session", **what_ran(session.config))
        self._tell()

    @pytest.hookimpl(tryfirst=True)  # before the verdict
    def pytest_sessionfinish(self) -> None:
        self._tell()

    def _tell(self) -> None:
        """What interferes, also of plugins that came while tests ran."""
        if self._session is not None:
            news = [each for each in interference(self._session) if each not in self._told]
            self._told += news
            if news:
                self._run.record_event("interference", found=news)

"""Which checks a run that was asked for has: those of its level, without those that an earlier run has done."""

from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import pytest

from pytest_gpufleet.model import levels, suite
from pytest_gpufleet.model.events import Deselected, Judging, Plugin, PythonFile, Session, SuiteSeen
from pytest_gpufleet.plugin import compat, markers
from pytest_gpufleet.plugin.compat import RUN
from pytest_gpufleet.plugin.options import path_of
from pytest_gpufleet.run.run import Run


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    run = config.stash[RUN]
    if run.carried:
        items[:] = [item for item in items if suite.shipped().known_as(item.nodeid) not in run.carried]
    if run.evidence is not None and (before := run.evidence.record.before):
        from pytest_gpufleet.verdict.across_runs.back_in_service import turn

        items.sort(key=lambda item: turn(item.nodeid, before, suite.shipped()))
    items.sort(key=lambda item: item.get_closest_marker("at_the_end") is not None)
    asked_for = [item for item in items if _is_asked_for(item, run)]
    # Where only checks between nodes are named, each says what it needs.
    others = [item for item in items if item not in asked_for] if asked_for else []
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = asked_for


def _is_asked_for(item: pytest.Item, run: Run) -> bool:
    """Whether it would be missing: what its level has, on one machine about one machine, or a repair requires."""
    options, returns = run.options, run.evidence.record.returns if run.evidence else None
    if returns and suite.shipped().contains(item.nodeid):
        return levels.check_name(item.nodeid) in returns.required
    of_several = options.nodes is None and markers.is_between_nodes(item)
    return levels.includes(options.level, level_of(item)) and not of_several


@pytest.hookimpl(trylast=True)  # when it is known how healthy the GPUs are at rest
def pytest_sessionstart(session: pytest.Session) -> None:
    """Ranks of the suite start while its files are imported, which takes as long. Others may find what they need only
    by what their files and folders do when they are collected."""
    run = session.config.stash[RUN]
    if run.evidence is None or run.options.nodes is not None:
        return
    # Of other files, whatever pytest is to collect of them, the first that is seen is enough.
    paths = [path_of(session.config, argument) for argument in session.config.args]
    files = (file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path]))
    first = next(files, None)
    if first is not None and suite.belongs(first) and all(map(suite.belongs, files)):
        run.ranks.begin()


def pytest_collection_finish(session: pytest.Session) -> None:
    run = session.config.stash[RUN]
    for item in filter(lambda item: suite.belongs(item.path), session.items):
        for name, definitions in compat.fixture_definitions(item).items():
            of_ours = [definition.func.__module__ == markers.FIXTURES for definition in definitions]
            if any(of_ours) and not of_ours[-1]:
                file = definitions[-1].func.__code__.co_filename
                raise pytest.UsageError(
                    f"the fixture {name} of {file} stands in the place of the one that {item.nodeid} is written for: "
                    "give it another name"
                )
    run.record(_registered(session.config.pluginmanager))
    if run.evidence is not None:
        from pytest_gpufleet.verdict.judgement import FORMULA, comparisons

        gpus, nodes, level = len(run.target.topology.gpus), len(run.evidence.record.hosts), run.options.level
        run.record(Judging(formula=FORMULA, comparisons=comparisons(suite.shipped(), level, gpus, nodes)))
    if not any(map(markers.uses_ranks, session.items)):
        run.ranks.let_go()
    if names := suite.altered({item.path for item in session.items}):
        run.record(SuiteSeen(altered=tuple(names)))


def _registered(manager: pytest.PytestPluginManager) -> Session:
    """The plugins of others with their versions, if these are known, and with their SHA-256 each conftest.py and what
    Python imports by itself when it starts, which may have taken itself out of sys.modules since."""
    versions = {plugin: dist.version for plugin, dist in manager.list_plugin_distinfo()}
    named = [(name, plugin) for name, plugin in manager.list_name_plugin() if isinstance(plugin, ModuleType)]
    ours = ("_pytest.", "pytest_gpufleet.")
    others = [(name, plugin) for name, plugin in named if not plugin.__name__.startswith(ours)]
    files = {name: Path(str(plugin.__file__)) for name, plugin in others}
    conftests = [name for name, file in files.items() if file.name == suite.CONFTEST]
    specs = map(PathFinder.find_spec, ("sitecustomize", "usercustomize"))
    first = [Path(spec.origin) for spec in specs if spec and spec.origin]
    plugins = (Plugin(name, versions.get(plugin, "")) for name, plugin in others if name not in conftests)
    imported = (PythonFile(str(file), suite.digest(file)) for file in (*map(files.__getitem__, conftests), *first))
    return Session(plugins=tuple(plugins), conftests=tuple(imported))


def pytest_deselected(items: list[pytest.Item]) -> None:
    for config in {item.config for item in items}:
        run = config.stash[RUN]
        if wanted := [item.nodeid for item in items if _is_asked_for(item, run)]:
            run.record(Deselected(checks=tuple(wanted)))


def level_of(item: pytest.Item) -> str:
    if (marker := item.get_closest_marker("level")) is None:
        return "quick"
    if marker.args not in [(name,) for name in levels.LEVELS]:
        raise pytest.UsageError(f"{item.nodeid}: level() takes one of {', '.join(levels.LEVELS)}")
    return str(marker.args[0])

"""The house as docs/architecture.md draws it: what may know what, how long things are, and what they are called."""

import ast
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest_gpufleet

SRC = Path(__file__).parents[1] / "src"
PACKAGE = SRC / "pytest_gpufleet"

# What each room may import beside itself and the leaves; plugin and commands stand on top.
LEAVES = {"safe_files", "redaction", "__init__"}
ROOMS = {
    "model": set(),
    "machine": {"model"},
    "world": {"model", "machine"},
    "probes": {"model", "machine", "world"},
    "verdict": {"model", "machine"},
    "report": {"model", "machine", "verdict"},
    "nodes": {"model", "machine", "world", "verdict"},
    "run": {"model", "machine", "world", "verdict", "nodes"},
    "plugin": {"model", "machine", "world", "probes", "verdict", "nodes", "report", "run"},
    "commands": {"model", "machine", "verdict", "report", "run"},
    "cli": {"model", "commands", "machine", "report", "run"},
    "__main__": {"cli", "run"},
}
VAGUE = ("utils", "helpers", "common", "base", "manager")
MOST_LINES_OF_A_MODULE, MOST_LINES_OF_A_FUNCTION = 600, 60


def name_of(path):
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def nodes(path):
    return [*ast.walk(ast.parse(path.read_text()))]


@cache
def imports(path):
    """The modules that a module imports, wherever in it, and be it for their types alone."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            wholes = (f"{node.module}.{alias.name}" for alias in node.names)
            found.update(whole if whole in MODULES else str(node.module) for whole in wholes)
    return frozenset(found)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room(module):
    return [*module.split("."), "__init__"][1]


def test_no_room_knows_what_stands_to_its_right():
    wrong = {
        f"{name} -> {imported}"
        for name, path in MODULES.items()
        for imported in imports(path)
        if imported in MODULES and room(name) not in LEAVES
        if room(imported) not in {room(name)} | LEAVES | ROOMS[room(name)]
    }
    assert wrong == set()


def test_no_modules_import_each_other():
    graph = {
        name: {imported for imported in imports(path) if imported in MODULES}
        for name, path in MODULES.items()
        if name != "pytest_gpufleet"  # which loads all of its names late
    }
    for imported in graph.values():
        imported.discard("pytest_gpufleet")
    TopologicalSorter(graph).prepare()


def outside(module):
    return {name.partition(".")[0] for name in imports(MODULES[module])} - {*sys.stdlib_module_names, "pytest_gpufleet"}


def test_the_model_needs_the_standard_library_and_msgspec_alone():
    assert set().union(*(outside(name) for name in MODULES if room(name) == "model")) <= {"msgspec"}


def test_pytest_is_known_to_its_plugin_alone_and_its_private_names_to_one_module():
    knowing = {name for name in MODULES if {"pytest", "_pytest"} & outside(name)}
    assert {name.removeprefix("pytest_gpufleet.") for name in knowing if room(name) != "plugin"} == set()
    private = {name.removeprefix("pytest_gpufleet.") for name in knowing if "_pytest" in outside(name)}
    assert private == {"plugin.compat"}


def test_one_name_is_one_thing_in_its_room():
    names = Counter((room(name), path.stem) for name, path in MODULES.items() if path.stem != "__init__")
    assert {name for name, count in names.items() if count > 1} == set()


def test_names_say_something():
    assert [path for path in PACKAGE.rglob("*") if any(vague in path.stem for vague in VAGUE)] == []


def test_no_module_and_no_function_is_long():
    modules = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    functions = {
        f"{name.removeprefix('pytest_gpufleet.')}.{node.name}": node.end_lineno - node.lineno + 1
        for name, path in MODULES.items()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert [name for name, lines in modules.items() if lines > MOST_LINES_OF_A_MODULE] == []
    assert [name for name, lines in functions.items() if lines > MOST_LINES_OF_A_FUNCTION] == []


def test_every_public_name_is_where_the_package_says():
    assert len([getattr(pytest_gpufleet, name) for name in pytest_gpufleet.__all__]) == 35

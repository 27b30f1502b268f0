"""What else ran in this session: for the record, whatever it did.

It can run code in the process of the checks, so whoever signs a verdict has to know of it.
"""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pytest_gpufleet
from pytest_gpufleet.model import suite
from pytest_gpufleet.plugin import compat
from pytest_gpufleet.redaction import command, redacted

OURS = Path(str(pytest_gpufleet.__file__)).parent
CUSTOMIZE = ("sitecustomize", "usercustomize")  # which Python imports when it starts, wherever they are
OF_RANKS = ("torch", "numpy", "triton")  # which only they import, by the path that this process has


def what_ran(config: pytest.Config) -> dict[str, Any]:
    """Plugins with their versions or files, conftest files and other Python files with their SHA-256, and where else
    options and modules came from."""
    versions = {plugin: dist.version for plugin, dist in config.pluginmanager.list_plugin_distinfo()}
    plugins, conftests = [], []
    for name, plugin in config.pluginmanager.list_name_plugin():
        file = _file(plugin)
        if plugin is None or file.startswith((f"{compat.PACKAGE}/", f"{OURS}/")):
            continue
        if Path(file).name == suite.CONFTEST:
            conftests.append(file)
        else:
            known_as = type(plugin).__qualname__ if name == str(id(plugin)) else name
            plugins.append({"name": known_as, "version": versions.get(plugin, ""), "file": file})
    return {
        "plugins": plugins,
        "conftests": _with_sums(conftests),
        "other_files": _with_sums(sorted({*_other_files()} - {*conftests})),
        "asked_for": [str(each) for each in config.getoption("plugins", None) or []],
        "PYTEST_ADDOPTS": command(shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))),
        "PYTEST_PLUGINS": os.environ.get("PYTEST_PLUGINS", ""),
        **{name: redacted(os.environ.get(name, "")) for name in ("PYTHONPATH", "LD_LIBRARY_PATH")},
        "ini_file": str(config.inipath or ""),
        "ini_options": command([str(each) for each in config.getini("addopts")]),
        "rootdir": str(config.rootpath),
    }


def _with_sums(files: Iterable[str]) -> list[dict[str, str]]:
    return [{"file": file, "sha256": suite.digest(Path(file))} for file in files]


def _other_files() -> Iterator[str]:
    """The modules of this process that belong neither to Python nor to anything installed, nor to the suite; of a
    package its own file. One beside the suite can stand in the place of one that is installed."""
    installed = _installed()
    files = {name: _origin(module) for name, module in list(sys.modules.items())}
    specs = {name: PathFinder.find_spec(name) for name in OF_RANKS if name not in files}
    files |= {name: str(spec.origin or "") for name, spec in specs.items() if spec}
    others = {name for name, file in files.items() if os.path.isabs(file) and not _is_below(file, installed)}
    others = {name for name in others if not suite.belongs(Path(files[name]))}
    for name in others | files.keys() & {*CUSTOMIZE}:
        if name.rpartition(".")[0] not in others:
            yield files[name]


def _installed() -> tuple[str, ...]:
    """The folders of Python, of its scripts, of what is installed, and of this package."""
    places = sysconfig.get_paths()
    folders = {places[each] for each in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
    folders |= {each for each in sys.path if each.rstrip("/").endswith("-packages")}
    folders |= {str(compat.PACKAGE.parent), str(OURS)}
    return tuple({f"{each.rstrip('/')}/" for folder in folders for each in (folder, os.path.realpath(folder))})


def _is_below(file: str, folders: tuple[str, ...]) -> bool:
    return file.startswith(folders) or os.path.realpath(file).startswith(folders)


def _file(plugin: object) -> str:
    """Where a plugin, which may be a module or an object, was written."""
    return _origin(plugin if isinstance(plugin, ModuleType) else sys.modules.get(type(plugin).__module__))


def _origin(module: object) -> str:
    """What Python loaded a module from, whatever it says of itself; a script has only that. It is not asked: one that
    is loaded at its first use would be, and what else anybody puts in the place of a module may raise."""
    known: Mapping[str, Any] = {}
    with suppress(AttributeError):
        known = object.__getattribute__(module, "__dict__")
    spec = known.get("__spec__")
    return str((getattr(spec, "origin", None) if spec else known.get("__file__")) or "")

"""Packages that the controller has loaded past sys.path, as with --import-mode=importlib: ranks find them too."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from types import ModuleType


def beside_the_path() -> dict[str, tuple[str, list[str]]]:
    """By name the file of each (\"\" of a namespace) and its folders, of those that stand at the top."""
    packages = {name: module for name, module in list(sys.modules.items()) if "." not in name}
    return {
        name: (getattr(module, "__file__", None) or "", list(module.__path__))
        for name, module in packages.items()
        if isinstance(module, ModuleType) and hasattr(module, "__path__") and PathFinder.find_spec(name) is None
    }


class Finder:
    """On a rank, asked when nobody else knows a module."""

    def __init__(self, packages: Mapping[str, tuple[str, list[str]]]) -> None:
        self._packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._packages:
            return None
        file, folders = self._packages[name]
        if file:
            return spec_from_file_location(name, file, submodule_search_locations=folders)
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = folders
        return spec

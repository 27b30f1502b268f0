"""The modules of this package are imported as Python imports any, from the bytecode that was installed with them.

pytest rewrites the assertions of all that belongs to an installed plugin, and here are none that explain anything to
anybody. Where it cannot keep what comes of that (a read-only environment, PYTHONDONTWRITEBYTECODE), it would compile
some 300 modules again in every run, for 0.6 s.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

OURS, SUITE = "pytest_gpufleet.", "pytest_gpufleet.acceptance"  # the suite's assertions are those that users read


class OwnModules(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(OURS) and not fullname.startswith(SUITE):
            return PathFinder.find_spec(fullname, path, target)
        return None


sys.meta_path.insert(0, OwnModules())  # before pytest's

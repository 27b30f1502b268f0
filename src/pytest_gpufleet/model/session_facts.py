"""What else ran in the session of a run: plugins and Python files, and what of others took part in its checks."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pytest_gpufleet.model.language import some


class Plugin(msgspec.Struct, frozen=True):
    name: str
    version: str
    file: str


class PythonFile(msgspec.Struct, frozen=True):
    file: str
    sha256: str


@dataclass(frozen=True)
class Interference:
    """A hook around checks of the suite, a fixture that these use, or a marker on them, that is neither pytest's nor
    this plugin's nor the suite's own."""

    kind: str  # hook, fixture or marker
    name: str
    file: str
    checks: tuple[str, ...] = ()  # that have the fixture or the marker; a hook stands around all

    def __str__(self) -> str:
        if not self.checks:
            return f"the hook {self.name} of {self.file} stood around the suite's checks and could change their outcome"
        return f"the {self.kind} {self.name} of {self.file} took part in {some(self.checks, 1)}"

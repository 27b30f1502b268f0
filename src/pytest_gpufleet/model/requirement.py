"""What somebody requires of a machine, line by line (--fleet-requirements)."""

import msgspec


class Requirement(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of --fleet-requirements: the checks and metrics that answer it, or why none does."""

    id: str
    text: str
    checks: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    out_of_scope: str = ""


class Requirements(msgspec.Struct, frozen=True):
    """The file that was given with --fleet-requirements: its name, its SHA-256, its title and its lines."""

    file: str
    sha256: str
    name: str
    content: tuple[Requirement, ...]

"""Whether the files of the acceptance suite are those that belong to this version."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

# Lines as `sha256sum` prints them. `python docs/make_checks.py` writes it; a test holds it to acceptance/.
SHIPPED = Path(__file__).with_name("suite.sha256")
CONFTEST = "conftest.py"


def digest(path: Path) -> str:
    """SHA-256 of a file of text, whatever ends its lines here; "" if there is none."""
    try:
        return hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()
    except OSError:
        return ""


def altered(paths: Iterable[Path]) -> list[str]:
    """The names of those test files that are called like one of the suite and are not it, and of the conftest.py beside
    them if that is another one. Files with other names are checks of somebody's own."""
    lines = SHIPPED.read_text(encoding="utf-8").splitlines()
    shipped = {name: sum_ for sum_, name in (line.split() for line in lines)}
    ours = {path for path in paths if path.name in shipped}
    ours |= {path.with_name(CONFTEST) for path in ours}
    return sorted({path.name for path in ours if digest(path) != shipped[path.name]})

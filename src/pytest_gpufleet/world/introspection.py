"""pytest's assertion introspection, on a rank.

A rewritten test body explains itself wherever it runs, but the `==` diffs come from a hook that pytest sets in its own
process. That hook is private to pytest; all of this project's use of it is here, and a test holds it in place.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import _pytest.assertion.util as assertion_util


def install() -> None:
    """Make `assert a == b` on this rank show what differs, as it does in an ordinary test."""
    terminal = SimpleNamespace(_highlight=lambda source, lexer="python": source)
    config: Any = SimpleNamespace(
        get_verbosity=lambda kind=None: 1, get_terminal_writer=lambda: terminal, getoption=lambda *_: 1
    )

    def explain(operator: str, left: object, right: object) -> str | None:
        lines = assertion_util.assertrepr_compare(config=config, op=operator, left=left, right=right)
        return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%") if lines else None

    assertion_util._reprcompare = explain

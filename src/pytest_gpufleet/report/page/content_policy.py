"""The Content-Security-Policy of the pages: nothing comes from elsewhere, and no script runs but one that is known.

All text is escaped; the policy stands behind that, for what nobody has thought of.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from markupsafe import Markup

from pytest_gpufleet import safe_files

# Style attributes colour cells and drawings.
RULES = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
)


def meta(script: str = "") -> Markup:
    """The element for the beginning of a page's head. `script`: the text of the inline script that may run."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    known = f"; script-src 'sha256-{digest}'" if script else ""
    return Markup(f'<meta http-equiv="Content-Security-Policy" content="{RULES}{known}">')


def enforce(page: Path) -> None:
    """Put the policy into a page that pytest-html has written, once. OSError if that cannot be done.

    The script that may run is the last one of the page: pytest-html's own stands there, after all data.
    """
    if not page.is_file():  # --html=/dev/stdout
        return
    text = page.read_text(encoding="utf-8")
    rules = meta(text.rpartition("<script>")[2].partition("</script>")[0])
    if rules not in text:
        safe_files.write_text(page, text.replace("<head>", f"<head>\n    {rules}", 1))

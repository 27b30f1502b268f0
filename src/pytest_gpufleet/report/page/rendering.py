"""How the pages of a report are made of the templates beside this file."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from pytest_gpufleet import __version__, safe_files
from pytest_gpufleet.model.language import current_language, say, some
from pytest_gpufleet.model.suite import titled
from pytest_gpufleet.report import wording

# The Content-Security-Policy of the pages: nothing comes from elsewhere, and no script runs but one that is known.
#
# All text is escaped; the policy stands behind that, for what nobody has thought of.

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


HERE = Path(__file__).parent
ABSENT = "—"


def render(template: str, **content: object) -> str:
    """A template of this folder as a page that needs no other file."""
    style = stylesheet().read_text(encoding="utf-8")
    return templates().get_template(template).render(policy=meta(), style=style, version=__version__, **content)


@cache
def templates() -> jinja2.Environment:
    """The templates of this folder. What they say themselves goes through the filter `say`: not the i18n extension of
    Jinja, since that marks what it says as safe HTML and would not show it as `_shown` does."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "prose": _prose,
        "titled": titled,
        "say": jinja2.pass_context(
            lambda _, text, **values: say(text, **values)
        ),  # not folded when a template is compiled
        "gap": wording.gap,
        "some": some,
        "moment": wording.moment,
        "upper_first": wording.capitalised,
    }
    environment.globals["language"] = current_language
    return environment


def stylesheet() -> Path:
    """The file for pytest-html's option --css. It styles the whole page, pytest-html's own tables too."""
    return HERE / "report.css"


def _shown(value: Any) -> Any:
    """What the template prints for a value: a dash where nothing is known, no control characters."""
    if isinstance(value, Markup | int | float):
        return value
    return ABSENT if value is None or value == "" else wording.clean(str(value))


def _prose(text: str) -> Markup:
    """A paragraph of a docstring, with what stands between backticks set as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(wording.clean(text)))))

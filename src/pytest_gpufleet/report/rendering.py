"""How the pages of a report are made of the templates beside this file."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from pytest_gpufleet import __version__
from pytest_gpufleet.model.language import current_language, say, some
from pytest_gpufleet.model.suite import titled
from pytest_gpufleet.report import wording

# The Content-Security-Policy of the pages: nothing comes from elsewhere, and no script runs. Style attributes colour
# cells and drawings. All text is escaped; the policy stands behind that, for what nobody has thought of.
RULES = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
POLICY = Markup(f'<meta http-equiv="Content-Security-Policy" content="{RULES}">')

TEMPLATES = Path(__file__).parent / "templates"
STYLESHEET = TEMPLATES / "report.css"


def render(template: str, title: str, made: str, **content: object) -> str:
    """A template as a page that needs no other file. `made`: from what, and by which tool."""
    made, style = say(made, tool=f"pytest-gpufleet {__version__}"), STYLESHEET.read_text(encoding="utf-8")
    of_frame = {"title": wording.clean(title), "made": made, "policy": POLICY, "style": style, "version": __version__}
    return templates().get_template(template).render(of_frame, **content)


@cache
def templates() -> jinja2.Environment:
    """What they say themselves goes through the filter `say`: not the i18n extension of Jinja, since that marks what it
    says as safe HTML and would not show it as `_shown` does."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, finalize=_shown, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    saying = jinja2.pass_context(lambda _, text, **values: say(text, **values))  # not folded when compiled
    environment.filters |= {
        "prose": _prose, "titled": titled, "say": saying, "gap": wording.gap, "some": some, "moment": wording.moment,
        "upper_first": wording.capitalised,
    }  # fmt: skip
    environment.globals |= {
        "language": current_language,
        # By which browsers choose the forms of characters.
        "html_language": lambda: {"zh": "zh-CN"}.get(current_language(), current_language()),
    }
    return environment


def _shown(value: Any) -> Any:
    """What the template prints for a value: a dash where nothing is known, no control characters."""
    if isinstance(value, Markup | int | float):
        return value
    return "—" if value is None or value == "" else wording.clean(str(value))


def _prose(text: str) -> Markup:
    """A paragraph of a docstring, with what stands between backticks set as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(wording.clean(text)))))

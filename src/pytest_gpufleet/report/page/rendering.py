"""How the pages of a report are made of the templates beside this file."""

from __future__ import annotations

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from pytest_gpufleet import __version__
from pytest_gpufleet.model.language import Language
from pytest_gpufleet.model.suite import titled
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.page import content_policy
from pytest_gpufleet.report.translation import says

HERE = Path(__file__).parent
ABSENT = "—"


def render(template: str, language: Language = "en", **content: object) -> str:
    """A template of this folder as a page that needs no other file."""
    style = stylesheet().read_text(encoding="utf-8")
    return (
        templates(language)
        .get_template(template)
        .render(policy=content_policy.meta(), style=style, version=__version__, **content)
    )


@cache
def templates(language: Language) -> jinja2.Environment:
    """The templates of this folder. What they say themselves goes through the filter `say`: not the i18n extension of
    Jinja, since that marks what it says as safe HTML and would not show it as `_shown` does."""
    say = says(language)
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
        "titled": partial(titled, say=say),
        "say": say,
        "gap": wording.gap,
        "moment": wording.moment,
        "upper_first": wording.capitalised,
    }
    environment.globals |= {"language": language, "say": say}
    return environment


def stylesheet() -> Path:
    """The file for pytest-html's option --css. It styles the whole page, pytest-html's own tables too."""
    return HERE / "report.css"


def _shown(value: Any) -> Any:
    """What the template prints for a value: a dash where nothing is known, no control characters."""
    if value is None or value == "":
        return ABSENT
    return value if isinstance(value, Markup | int | float) else wording.clean(str(value))


def _prose(text: str) -> Markup:
    """A paragraph of a docstring, with what stands between backticks set as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(wording.clean(text)))))

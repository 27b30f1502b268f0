"""The whole report as one file, made from evidence alone: where pytest-html had no chance to write it."""

from __future__ import annotations

from pytest_gpufleet import __version__
from pytest_gpufleet.model.check import Check
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.page import content_policy, summary_html


def page(record: Record, sha256: str) -> str:
    """A self-contained HTML page: the report as pytest-html's page has it, and a plain table of every check.

    `sha256`: of the whole evidence file.
    """
    return render(
        "page.html.jinja",
        host=record.run.host or "unknown host",
        fragment=summary_html.summary(record, sha256),
        checks=[_row(check) for check in record.checks.values()],
    )


def _row(check: Check) -> tuple[str, ...]:
    return (
        check.outcome,
        wording.SYMBOLS.get(check.outcome, "○"),
        wording.clean(check.title),
        wording.clean(check.id),
        f"{check.seconds:,.1f}",
        wording.clean(check.message),
    )


def render(template: str, **content: object) -> str:
    """A template of this folder as a page that needs no other file."""
    style = summary_html.stylesheet().read_text(encoding="utf-8")
    return (
        summary_html.templates()
        .get_template(template)
        .render(policy=content_policy.meta(), style=style, version=__version__, **content)
    )

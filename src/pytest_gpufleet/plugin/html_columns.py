"""The columns that figures get in the results table of pytest-html."""

from __future__ import annotations

from html import escape

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.report import wording

# Measured and Limit are not sortable: pytest-html sorts as text, and the rows carry different units.
HEADER = (
    "<th>Measured</th>",
    "<th>Limit</th>",
    '<th class="sortable" data-column-type="worstPlace">Worst place</th>',
)
COLUMNS = ("measured", "limit", "worstPlace")
URGENCY = {"missed": 0, "not judged": 1, "met": 2, "for information": 3}


def header(cells: list[str]) -> None:
    """Insert the columns Measured, Limit and Worst place after the one with the test's name."""
    at = _after_test(cells)
    cells[at:at] = HEADER


def row(cells: list[str], findings: list[Finding], hosts: wording.Hosts = wording.ALONE) -> None:
    """Insert the cells of one test; of several findings the one nearest to trouble is shown."""
    if not cells:  # another plugin has taken the row out
        return
    at = _after_test(cells)
    texts = _texts(findings, hosts)
    # Bare text only: pytest-html opens a row by the parent of what was clicked, which has to be the row.
    cells[at:at] = [
        f'<td class="col-{name}">{escape(wording.clean(text))}</td>' for name, text in zip(COLUMNS, texts, strict=True)
    ]


def _after_test(cells: list[str]) -> int:
    return next((index + 1 for index, cell in enumerate(cells) if "testId" in cell), len(cells))


def _texts(findings: list[Finding], hosts: wording.Hosts) -> tuple[str, str, str]:
    measured = [finding for finding in findings if finding.measurement.values]
    if not measured:
        return "", "", ""
    finding = min(measured, key=lambda finding: (URGENCY.get(finding.state, 0), wording.margin(finding)))
    worst = wording.worst(finding)
    assert worst is not None  # it has values
    place, value = worst
    text = wording.quantity(value, wording.metric(finding).unit)
    if finding.slower_than_peers and not finding.missed:
        limit = "peers"  # its own limit is met, and would read as a contradiction
    elif finding.limit:
        text, limit = wording.value_and_limit(value, finding.limit)
    else:
        limit = "none" if finding.slower_than_peers is None else "peers"
    more = f" (tightest of {len(measured)})" if len(measured) > 1 else ""
    return text + more, limit, wording.place(place, hosts)

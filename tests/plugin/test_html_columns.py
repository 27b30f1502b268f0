"""The columns in pytest-html's table of results."""

import re
from dataclasses import replace

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import Metric
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.plugin import html_report

HEADER = [
    '<th class="sortable" data-column-type="result">Result</th>',
    '<th class="sortable" data-column-type="testId">Test</th>',
    '<th class="sortable" data-column-type="duration">Duration</th>',
    "<th>Links</th>",
]
ROW = [
    '<td class="col-result">Passed</td>',
    '<td class="col-testId">test_a.py::test_b</td>',
    '<td class="col-duration">1 ms</td>',
    '<td class="col-links"></td>',
]


def row_of(findings: list[Finding]) -> list[str]:
    cells = list(ROW)
    html_report.row(cells, findings)
    return [re.sub("<.*?>", "", cell) for cell in cells[2:5]]


def test_header_and_row_grow_alike_after_the_test() -> None:
    header, row = list(HEADER), list(ROW)
    html_report.header(header)
    html_report.row(row, [])
    assert len(header) == len(row) == 7
    assert [re.sub("<.*?>", "", cell) for cell in header[1:5]] == ["Test", "Measured", "Limit", "Worst place"]
    # pytest-html sorts a column by the word after "col-", which has to be the header's column type.
    assert 'data-column-type="worstPlace"' in header[4]
    assert 'class="col-worstPlace"' in row[4]


def test_row_shows_what_missed(bad_gpu: Record) -> None:
    measured, limit, place = row_of([f for f in bad_gpu.findings if f.measurement.metric == "busbw"])
    assert measured == "177.7 GB/s (tightest of 63)"
    assert limit == "≥ 263.2 GB/s"
    assert place == "all ranks together"


def test_slower_than_peers_shows_no_limit_that_was_met(bad_gpu: Record) -> None:
    slow = next(f for f in bad_gpu.findings if f.slower_than_peers and f.limit)
    assert row_of([replace(slow, missed=())])[1:] == ["peers", "GPU 5"]


def test_row_without_cells_stays_without() -> None:
    cells: list[str] = []
    html_report.row(cells, [])
    assert cells == []


def test_cells_are_escaped() -> None:
    finding = Finding(
        "a", Measurement("<b>", {"gpu0": 1.0}, {}, definition=Metric("<b>", "<i>", "higher", "<b>")), "not judged"
    )
    cells = list(ROW)
    html_report.row(cells, [finding])
    assert "<b>" not in "".join(cells)
    assert "<i>" not in "".join(cells)

"""The drawings: that they are drawn when there is something to draw, small and always the same."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from pytest_gpufleet.report.plots import busbw_svg, training_svg
from pytest_gpufleet.verdict.evidence import Record
from pytest_gpufleet.verdict.finding import Finding
from pytest_gpufleet.verdict.measurement import Measurement


def words_in(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter() if "text" in element.tag]


def test_busbw_names_lines_sizes_and_limits(rejected: Record) -> None:
    svg = busbw_svg(rejected.findings)
    assert svg is not None
    words = words_in(svg)
    assert {"all_reduce", "all_gather", "reduce_scatter", "64 MiB", "1 GiB", "8 GiB"} <= set(words)
    assert any("limit" in word for word in words)


def test_training_has_a_bar_for_one_and_for_all(accepted: Record) -> None:
    svg = training_svg(accepted.findings)
    assert svg is not None
    assert {"7,541", "58,100", "1 rank", "8 ranks", "limit"} <= set(words_in(svg))


@pytest.mark.parametrize("draw", [busbw_svg, training_svg])
def test_drawing_is_small_repeatable_and_described(accepted: Record, draw: object) -> None:
    assert callable(draw)
    svg = draw(accepted.findings)
    assert svg == draw(accepted.findings)
    assert len(svg) < 60_000
    assert svg.startswith('<svg role="img" aria-label="')
    assert "#ffffff" not in svg
    assert "currentColor" in svg  # readable in dark mode and on paper


@pytest.mark.parametrize("draw", [busbw_svg, training_svg])
def test_nothing_to_draw_draws_nothing(draw: object) -> None:
    assert callable(draw)
    assert draw([]) is None
    broken = [Finding("a", Measurement(m, {"world": float("nan")}, {"bytes": 8}), "not judged")
              for m in ("busbw", "train_throughput")]  # fmt: skip
    assert draw(broken) is None

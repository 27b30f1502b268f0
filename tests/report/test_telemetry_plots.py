"""The plots over the whole run: what they show, that they stay small and readable."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pytest_gpufleet.model import place
from pytest_gpufleet.model.measurement import SLOW_BEAT
from pytest_gpufleet.model.record import read
from pytest_gpufleet.report.plots.telemetry_plots import svgs

START = 1795166043.0  # 09:14:03 UTC
PLACES = [place.gpu(index) for index in range(8)]
TITLES = [
    "GPU utilisation",
    "GPU memory used",
    "Temperature of the GPU",
    "Temperature of the GPU memory",
    "Power",
    "SM clock",
    "PCIe traffic, sent and received, as read in one sample of 5",
]


def gpu(**changes: Any) -> dict[str, Any]:
    return {
        "utilization_percent": 97,
        "memory_used_bytes": 64 << 30,
        "temperature_c": 61,
        "memory_temperature_c": 72,
        "power_watts": 612.5,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "clock_event_reasons": 4,
        "pcie_transmitted_kilobytes_per_second": 1_200_000,
        "pcie_received_kilobytes_per_second": 300_000,
    } | changes


def samples(count: int, **changes: Any) -> list[dict[str, Any]]:
    return [{"time": START + second, "gpus": [gpu(**changes) for _ in PLACES]} for second in range(count)]


def checks(files: int, each: int, length: float) -> list[tuple[str, float, float]]:
    step = length / files / each
    ids = [f"acceptance/test_{file}_part.py::test_it[{n}]" for file in range(files) for n in range(each)]
    return [(name, START + index * step, START + (index + 1) * step) for index, name in enumerate(ids)]


def words_in(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter() if "text" in element.tag]


def test_a_plot_for_each_quantity_with_a_line_for_each_gpu_and_the_files_of_tests() -> None:
    drawn = svgs(samples(301), PLACES, checks(7, 12, 300))
    assert [title for title, _ in drawn] == TITLES
    for _, svg in drawn:
        words = words_in(svg)
        assert {f"GPU {index}" for index in range(8)} <= set(words)
        assert [word for word in words if word.endswith("part")] == [f"{file} part" for file in range(7)]
        assert {"0:00", "5:00", "minutes:seconds since 09:14:03 UTC"} <= set(words)
        assert svg.startswith('<svg role="img" aria-label="')
        assert "currentColor" in svg
        assert "#ffffff" not in svg
        assert set(re.findall(r"url\(#([^)]+)\)", svg)) <= set(re.findall(r'\bid="([^"]+)"', svg))
    ids = [each for _, svg in drawn for each in set(re.findall(r'\bid="([^"]+)"', svg))]
    assert len(ids) == len(set(ids))
    assert drawn[0] == svgs(samples(301), PLACES, checks(7, 12, 300))[0]  # whenever it is drawn
    labels = [svg.split('"')[3] for _, svg in drawn]
    assert labels[1] == "GPU memory used of 8 GPUs over 5:00 (minutes:seconds): 64 GiB to 64 GiB"
    assert labels[6].endswith("1,500 MB/s to 1,500 MB/s")


def test_a_long_run_stays_small_and_keeps_its_peaks() -> None:
    run: list[dict[str, Any]] = [
        {"time": START + second, "gpus": [{"power_watts": 600 + second % 7} for _ in PLACES]}
        for second in range(40_000)
    ]
    run[12_345]["gpus"][5] = {"power_watts": 699}
    run[23_456]["gpus"][2] = {"power_watts": 88}
    svg = dict(svgs(run, PLACES, []))["Power"]
    assert ": 88 W to 699 W" in svg.split('"')[3]
    assert max(path.count("L") for path in re.findall(r' d="([^"]+)"', svg)) <= 600
    assert len(svg) < 250_000
    assert "hours:minutes since 09:14:03 UTC" in words_in(svg)


def test_what_no_gpu_told_has_no_plot_and_a_gap_breaks_the_line() -> None:
    run = samples(12, memory_temperature_c=None)
    assert [title for title, _ in svgs(run, PLACES, [])] == [title for title in TITLES if title != TITLES[3]]
    whole = dict(svgs(run, PLACES[:1], []))["Power"]
    for second in range(3, 3 + SLOW_BEAT):
        run[second]["gpus"][0] = dict.fromkeys(gpu())
    run[11]["gpus"] = []
    broken = dict(svgs(run, PLACES[:1], []))["Power"]
    lines = [max(re.findall(r' d="([^"]+)"', svg), key=lambda d: (d.count("M"), len(d))) for svg in (whole, broken)]
    assert [line.count("M") for line in lines] == [1, 2]


def longest_path(svg: str) -> str:
    return max(re.findall(r' d="([^"]+)"', svg), key=lambda path: (path.count("M"), len(path)))


def test_of_what_is_read_seldom_each_reading_is_drawn_and_nothing_between() -> None:
    """PCIe traffic is in every fifth sample only; as a real run recorded it."""
    run = read(Path(__file__).parents[1] / "recorded" / "h200x4-neighbour" / "evidence.jsonl")
    drawn = dict(svgs(run.telemetry, PLACES[:1], []))
    had = [each for each in run.telemetry if each["gpus"][0].get("pcie_received_kilobytes_per_second") is not None]
    path = longest_path(drawn[TITLES[-1]])
    assert path.count("M") == path.count("L") == len(had) > 10
    assert longest_path(drawn["Power"]).count("M") == 1


def test_time_without_samples_is_a_gap_and_a_lone_value_is_seen() -> None:
    run = samples(40)
    with_gap = [*run[:10], *run[20:]]  # ten seconds in which nobody looked
    run[11]["gpus"][0] = run[13]["gpus"][0] = {}  # what is between them stands alone
    assert longest_path(dict(svgs(with_gap, PLACES[:1], []))["Power"]).count("M") == 2
    assert longest_path(dict(svgs(run, PLACES[:1], []))["Power"]).count("M") == 3


@pytest.mark.parametrize("count", [0, 1])
def test_too_little_to_draw_draws_nothing(count: int) -> None:
    assert svgs(samples(count), PLACES, checks(2, 2, 1)) == []


def test_a_clock_that_was_set_back_during_the_run() -> None:
    run = samples(20)
    for sample in run[10:]:
        sample["time"] -= 3600
    drawn = svgs(run, PLACES, checks(3, 2, 19))
    assert [title for title, _ in drawn] == TITLES
    assert " over 0:09 (minutes:seconds)" in drawn[0][1].split('"')[3]
    assert svgs([run[0], *run[10:]], PLACES, checks(3, 2, 19)) == []  # no time has passed


def test_of_too_many_files_the_longest_are_named() -> None:
    many = checks(90, 1, 290)
    many.append(("acceptance/test_long_one.py::test_it", START + 290, START + 300))
    words = words_in(svgs(samples(301), PLACES, many)[0][1])
    named = [word for word in words if word.endswith(" part")]
    assert 20 < len(named) < 40
    assert "long one" in words


def test_any_name_can_be_drawn() -> None:
    hostile = "a/test_<b>&$x^2$\x1b[31m.py::test_x", "test_" + "long_" * 30 + ".py", "", "no_python::x"
    run = [(name, START + second, START + second + 1) for second, name in enumerate(hostile)]
    words = words_in(svgs(samples(5), PLACES[:1], run)[0][1])
    assert "<b>&$x^2$" in words
    assert "long long lon..." in words


def test_checks_beyond_the_samples_and_many_gpus() -> None:
    places = [place.gpu(index) for index in range(16)]
    before_and_after = [("test_a.py::x", START - 50, START + 1), ("test_b.py::x", START + 900, START + 999)]
    svg = svgs(samples(5), places, before_and_after)[0][1]
    assert {"GPU 15", "a", "b"} <= set(words_in(svg))

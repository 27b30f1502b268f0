"""The page: what it says, that it says it safely, and that it stands on its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from pytest_gpufleet.probes.reading import MiB
from pytest_gpufleet.report.html import stylesheet, summary
from pytest_gpufleet.verdict.evidence import Check, Record
from pytest_gpufleet.verdict.finding import Finding
from pytest_gpufleet.verdict.measurement import Measurement

VOID = {"br", "img", "hr", "input", "meta", "link"}
HOSTILE = "<script>alert('x')</script> & \x1b[31mred\x1b[0m \x00 \ud800 \"quoted\""


class Page(HTMLParser):
    """What a browser would find: tags in balance, text, headings, attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    @property
    def text(self) -> str:
        return " ".join(" ".join(text for _, text in self.texts).split())

    def headings(self) -> list[str]:
        return [tag for tag in self.seen if tag in {"h1", "h2", "h3", "h4", "h5", "h6"}]

    def of(self, tag: str) -> list[str]:
        return [text.strip() for at, text in self.texts if at == tag and text.strip()]


def test_every_page_is_whole_and_stands_on_its_own(every_record: Record) -> None:
    html = summary(every_record)
    page = Page(html)
    links = [value for name, value in page.attributes if name in {"src", "href", "xlink:href", "data"}]
    assert all(value and value.startswith("#") for value in links)
    assert not {"script", "link", "iframe", "img"} & set(page.seen)
    assert not re.search(r"url\(|@import", stylesheet().read_text(encoding="utf-8"))


def test_tables_and_headings_serve_a_screen_reader(every_record: Record) -> None:
    page = Page(summary(every_record))
    assert page.seen.count("caption") == page.seen.count("table")
    levels = [int(tag[1]) for tag in page.headings()]
    assert levels[0] == 2
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert page.attributes.count(("role", "img")) == page.seen.count("svg")
    ids = [value for name, value in page.attributes if name == "id" and value and value.startswith("fleet")]
    assert len(ids) == len(set(ids))


def test_verdict_comes_first(every_record: Record) -> None:
    page = Page(summary(every_record))
    assert every_record.verdict in page.of("h2")
    assert all(reason in page.text for reason in every_record.reasons)


def test_accepted_shows_machine_figures_and_a_place_to_sign(accepted: Record) -> None:
    text = Page(summary(accepted)).text
    for gpu in accepted.topology.gpus:
        assert gpu.uuid in text
        assert gpu.pci_bus_id in text
        assert str(gpu.serial) in text
    assert "all_reduce, 8 GiB, float32, 8 ranks, NVLS off" in text
    for words in ("366.9 GB/s", "≥ 329.4 GB/s", "140.4", "NV18", "2.28.9", "NCCL_NVLS_ENABLE", "96.03 %"):
        assert words in text
    for words in ("Vendor", "Customer", "Signature"):
        assert words in text
    assert "What was missed" not in text


def test_rejected_names_the_bad_gpu_before_the_machine(rejected: Record) -> None:
    text = Page(summary(rejected)).text
    missed = text[text.index("What was missed") : text.index("The machine")]
    bad = rejected.topology.gpus[5]
    for words in (bad.uuid, str(bad.serial), bad.pci_bus_id, "7,093 images/s, 6.2 % worse than its peers"):
        assert words in missed
    for words in (
        "301.3 GB/s",
        "≥ 329.4 GB/s",
        "MLE: stas00/ml-engineering",
        "What to do: reseat GPU 5's module",
    ):
        assert words in missed
    assert rejected.topology.gpus[3].uuid not in missed


def test_rehearsal_never_looks_accepted(rehearsal: Record) -> None:
    rehearsal.verdict = "ACCEPTED"
    page = Page(summary(rehearsal))
    assert page.of("h2")[-1] == "REHEARSAL"
    assert "can never say ACCEPTED" in page.text
    assert "No GPU took part" in page.text
    assert "not judged" in page.text
    assert ("class", "fleet-banner fleet-accepted") not in [
        (name, " ".join((value or "").split()[-2:])) for name, value in page.attributes if name == "class"
    ]


def test_incomplete_lists_what_is_open_and_why(incomplete: Record) -> None:
    text = Page(summary(incomplete)).text
    left_open = text[text.index("What this report leaves open") :]
    for words in (
        "never finished",
        "test_burn_in",
        "deselected",
        "test_throughput",
        "has no limit for these",
    ):
        assert words in left_open
    assert left_open.count("profile H200 has no limit for these conditions") == 1


def test_no_verdict_is_incomplete() -> None:
    page = Page(summary(Record()))
    assert "INCOMPLETE" in page.of("h2")
    assert "did not reach its end" in page.text


@pytest.mark.parametrize("verdict", ["ACCEPTED", "REJECTED", "INCOMPLETE", "SURPRISE"])
def test_hostile_text_is_shown_not_run(verdict: str) -> None:
    measurement = Measurement(HOSTILE, {HOSTILE: 1.0}, {HOSTILE: HOSTILE, "bytes": HOSTILE}, {}, {HOSTILE: HOSTILE})
    record = Record(
        run={"host": HOSTILE, "command": HOSTILE, "environment": {HOSTILE: HOSTILE}},
        findings=[
            Finding("a", measurement, "missed", reason=HOSTILE),
            Finding("b", measurement, "not judged"),
        ],
        checks={HOSTILE: Check(HOSTILE, "failed", 0.1, HOSTILE, HOSTILE, HOSTILE)},
        deselected=[HOSTILE],
        verdict=verdict,
        reasons=[HOSTILE],
    )
    html = summary(record)
    assert "script" not in Page(html).seen
    assert "<script>alert" in Page(html).text  # as text
    assert not set(html) & {"\x1b", "\x00"}
    html.encode("utf-8")


def test_very_long_message_keeps_its_ends(record_of: Callable[..., Record]) -> None:
    message = "the first line\n" + "x" * 500_000 + "\nthe last line"
    html = summary(record_of(checks=[Check("a.py::b", "failed", 1.0, message=message)], verdict="REJECTED"))
    assert len(html) < 100_000
    for words in ("the first line", "the last line", "characters left out"):
        assert words in html


def test_nan_is_the_worst_place(record_of: Callable[..., Record]) -> None:
    measurement = Measurement("busbw", {"gpu0": 400.0, "gpu1": float("nan")}, {"bytes": MiB})
    text = Page(summary(record_of(findings=[Finding("a", measurement, "not judged")]))).text
    assert "not a number" in text
    assert "GPU 1" in text


def test_empty_measurement_does_not_stop_the_report(record_of: Callable[..., Record]) -> None:
    nothing = Finding("a", Measurement("busbw", {}, {}), "missed")
    assert "Figures beside their limits" in summary(record_of(findings=[nothing]))


def test_matplotlib_waits_for_a_report() -> None:
    modules = "html, terminal, columns"
    code = f"import sys; from pytest_gpufleet.report import {modules}; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_stylesheet_knows_dark_mode_and_paper() -> None:
    assert isinstance(stylesheet(), Path)
    css = stylesheet().read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in css
    assert "@media print" in css

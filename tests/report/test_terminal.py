"""The last lines on the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pytest_gpufleet.model.events import Check
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.report.banner import reasons, why
from pytest_gpufleet.report.terminal.summary_lines import summary_lines

# As recorded by runs at level standard.
ABOVE = [f"acceptance/{name}" for name, check in shipped().checks.items() if check.level == "burnin"]


def text_of(record: Record) -> str:
    return " ".join(" ".join(text.split()) for text, _ in summary_lines(record))


def test_verdict_stands_first_in_its_colour(every_record: Record) -> None:
    colours = {"ACCEPTED": "green", "REJECTED": "red", "INCOMPLETE": "yellow", "REHEARSAL": "cyan"}
    line, markup = summary_lines(every_record)[0]
    word, _, stands_on = line.partition("; ")
    assert word == every_record.verdict
    assert bool(stands_on) == (word == "ACCEPTED")
    assert markup == {colours[word]: True, "bold": True}
    assert why(every_record) in text_of(every_record)
    assert all(reason in text_of(every_record) for reason in reasons(every_record))


def test_lines_fit_eighty_columns_and_identities_stay_whole(every_record: Record) -> None:
    for text, _ in summary_lines(every_record):
        assert len(text) <= 80
        assert "\n" not in text
    bad_gpu = every_record.topology.gpus[5].uuid if every_record.verdict == "REJECTED" else ""
    assert any(bad_gpu in text for text, _ in summary_lines(every_record))


def test_rehearsal_never_says_accepted_as_its_verdict(rehearsal: Record) -> None:
    rehearsal.verdict = "ACCEPTED"
    assert summary_lines(rehearsal)[0][0] == "REHEARSAL"


@pytest.mark.parametrize("message", ["", "\n\n", "\x1b[2J\x1b[31mowned\x07", "word " * 100_000])
def test_terminal_is_safe_from_messages(message: str) -> None:
    record = Record(checks={"a": Check("a", "failed", 0.1, message=message)}, verdict="REJECTED")
    result = summary_lines(record)
    assert len(result) < 20
    assert not any("\x1b" in text or "\x07" in text for text, _ in result)


def test_every_gpu_that_a_message_names_is_told() -> None:
    """As pytest words an assertion of several lines."""
    message = "AssertionError: GPU 0 X: process 7\n  GPU 2 Y: process 7\nassert not ['GPU 0 X: process 7', 'GPU 2 Y']"
    told = [text for text, _ in summary_lines(Record(checks={"a": Check("a", "failed", 0.1, message=message)}))]
    assert "    GPU 0 X: process 7" in told
    assert "    GPU 2 Y: process 7" in told
    assert not any("assert not" in text for text in told)


def test_what_does_not_apply_is_not_left_open(record_of: Callable[..., Record], standard: Record) -> None:
    checks = [replace(check, message="one GPU") for check in standard.checks.values()]
    checks[5] = replace(checks[5], outcome="not applicable")
    text = text_of(record_of(checks=checks, deselected=ABOVE, verdict="ACCEPTED"))
    assert "Not applicable: 1 check: one GPU (1)" in text
    assert "Left open" not in text
    checks[6] = replace(checks[6], outcome="skipped")
    assert "Left open: 1 check skipped" in text_of(record_of(checks=checks, verdict="INCOMPLETE"))


def test_the_commonest_reasons_why_checks_do_not_apply_are_told(
    record_of: Callable[..., Record], standard: Record
) -> None:
    reasons = ["no --fleet-order was given"] * 3 + ["needs 4 ranks, this run has 2"] * 2 + ["no BMC", "no port"]
    checks = list(standard.checks.values())
    for place, reason in enumerate(reasons):
        checks[place] = replace(checks[place], outcome="not applicable", message=f"not applicable: {reason}")
    told = " ".join(text_of(record_of(checks=checks, deselected=ABOVE, verdict="ACCEPTED")).split())
    assert "Not applicable: 7 checks: no --fleet-order was given (3); needs 4 ranks, this run has 2 (2)" in told
    assert "and for 2 other reasons, which the report lists" in told


def test_a_level_that_judges_no_figure_does_not_say_that_all_met(standard: Record) -> None:
    standard.findings.clear()
    told = " ".join(text_of(standard).split())
    assert "and found nothing wrong. No figure was judged." in told
    assert " 0 " not in told


def test_empty_record_is_incomplete() -> None:
    assert summary_lines(Record())[0][0] == "INCOMPLETE"

"""What is signed, what stands in the head and at the foot of each printed page."""

from __future__ import annotations

import re

import msgspec
import pytest

from pytest_gpufleet.model.events import HostFound, NodeFound
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report.page import machine_section
from pytest_gpufleet.report.page.report_page import summary
from tests.report.page import Page

GIVEN = {"technician": "J. Roe", "cost_centre": "88", "order": "4711", "remarks": "</style><b>bold</b>"}


@pytest.fixture
def noted(standard: Record) -> Record:
    node = NodeFound(0, "node7", "ABC123")
    standard.run = msgspec.structs.replace(standard.run, notes=GIVEN, commit="0123abcd-dirty", nodes=(node,))
    standard.machines = {0: HostFound(host={"dmi": {"vendor": "Dell Inc.", "product": "PowerEdge XE9680"}})}
    standard.ended, standard.lasted = "2026-11-20T09:45:15+00:00", 1872.0
    return standard


def test_notes_stand_in_the_head_and_beside_the_signatures(noted: Record) -> None:
    page = Page(summary(noted, "5e" * 32))
    head = page.text[: page.text.index("Sign-off")]
    for words in ("Order number: 4711", "Technician: J. Roe", "Cost centre: 88", "</style><b>bold</b>"):
        assert words in head
    signed = dict(row for row in page.table("What this is about").rows)
    assert list(signed)[:4] == ["Order number", "Technician", "Remarks", "Cost centre"]
    assert signed["Machine"] == "Dell Inc. PowerEdge XE9680, serial ABC123"
    assert signed["Suite"].endswith(", commit 0123abcd-dirty")
    assert signed["Time"] == "2026-11-20 09:14:03 UTC to 2026-11-20 09:45:15 UTC, 31 min 12 s"
    assert "5e5e" in signed["Evidence"]
    assert "b" not in page.headings()
    assert "b" not in {tag for tag, _ in page.seen}


def test_what_is_signed_is_the_first_part_after_the_verdict(noted: Record) -> None:
    """On paper it ends the first page; the screen has it last, by the style."""
    text = Page(summary(noted)).text
    assert text.index("ACCEPTED") < text.index("Sign-off") < text.index("The GPUs at a glance")


def test_a_run_that_says_less_says_nothing_in_its_place(standard: Record) -> None:
    standard.run = msgspec.structs.replace(standard.run, nodes=(), notes={}, commit="")
    standard.machines, standard.ended = {}, ""
    signed = dict(machine_section.signed(standard))
    assert not {"Machine", "Order number"} & set(signed)
    assert signed["Time"].endswith("not ended")
    assert "commit" not in signed["Suite"]


def test_the_foot_of_a_page_names_host_run_and_evidence_and_ends_nothing(noted: Record) -> None:
    host = 'a"}</style><script>x\\'
    noted.run = msgspec.structs.replace(noted.run, host=host)
    rules = machine_section.page_foot(noted, "5e" * 32)
    content = re.search(r'@bottom-left \{ content: "([^"]*)"', rules)
    assert content
    assert "<" not in rules
    said = re.sub(r"\\([0-9a-f]+) ", lambda code: chr(int(code[1], 16)), content[1])
    assert said.split("\\A ") == [f"{host} · run of 2026-11-20 09:14:03 UTC", f"evidence SHA-256 {'5e' * 32}"]


def test_many_gpus_and_notes_leave_room_for_signatures(noted: Record) -> None:
    noted.run = msgspec.structs.replace(noted.run, notes={f"key{number}": "x" for number in range(40)})
    rows = machine_section.signed(noted)
    assert len(rows) < 20
    assert ("And", "28 more notes, which evidence.jsonl has") in rows

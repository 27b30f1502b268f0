"""What docs/planted-faults.md says is what the program says, and is right: each fault is found at its places, and
nothing healthy is rejected."""

import runpy
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.planted import Row


@pytest.fixture(scope="module")
def make() -> dict[str, Any]:
    """What docs/make_planted_faults.py defines."""
    return runpy.run_path(str(ROOT / "docs" / "make_planted_faults.py"))


@pytest.fixture(scope="module")
def rows(make: dict[str, Any]) -> list[Row]:
    return [row for _, rows in make["SUBJECTS"].values() for row in rows]


def test_every_fault_is_found_at_its_places_and_at_no_other(rows: list[Row]) -> None:
    wrong = []
    for row in rows:
        named = [[case.named(size) for case in row.cases] for size in row.sizes or (0,)]
        places = [[{place for _, place in found} for found in each] for each in named]
        everywhere = bool(row.cases) and all(
            found == case.at for found, case in zip(places[-1], row.cases, strict=True)
        )
        elsewhere = any(found - case.at for each in places for found, case in zip(each, row.cases, strict=True))
        codes = {code for each in named for found in each for code, _ in found}
        if elsewhere or everywhere == bool(row.later) or (row.code not in codes and not row.later):
            wrong.append((row.planted, named[-1]))
    assert wrong == []


def test_nothing_healthy_is_rejected(rows: list[Row], make: dict[str, Any]) -> None:
    assert [row.alike for row in rows if row.alike and row.healthy()] == []
    verdicts = {name: make["by_todays_limits"](make["read"](path / "evidence.jsonl")).verdict
                for name, path in make["RECORDED"].items()}  # fmt: skip
    assert [name for name, verdict in verdicts.items() if verdict == "REJECTED"] == []


def test_the_page_is_up_to_date(make: dict[str, Any]) -> None:
    assert make["PAGE"].read_text(encoding="utf-8") == make["page"](), f"run `{make['COMMAND']}`"
    for test in make["ELSEWHERE"].values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")

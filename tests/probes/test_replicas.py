"""Copies that differ between ranks: which rank is named."""

from tests.conftest import INNER


def test_who_differs(fleet):
    run = fleet(INNER / "differing_replicas.py", ranks=4)
    assert run.status == 0, run.text
    assert list(run.outcomes.values()) == ["passed"] * 3

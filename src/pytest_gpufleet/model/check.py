"""A check after it ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pytest_gpufleet.model.codec import Amount

Outcome = Literal["passed", "failed", "skipped", "not applicable"]

# What made a check fail: figures that missed their limits and nothing else, or anything else. Only the first can be
# undone by judging the figures against other limits.
FailedBy = Literal["", "limits", "other"]


@dataclass(frozen=True)
class Check:
    """One acceptance test after it ran."""

    id: str
    outcome: Outcome
    seconds: Amount
    title: str = ""  # first line of its docstring
    doc: str = ""  # the rest: why it matters, what to do
    message: str = ""  # why it failed, was skipped or does not apply
    run: str = ""  # the earlier run that this was carried over from
    failed_by: FailedBy = ""

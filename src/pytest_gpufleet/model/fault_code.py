"""What there is to say of a kind of fault.

`action` is the severity, as what happens to the node next: MONITOR (keep it, watch), CONFIG (a setting is wrong, no
part is broken), RESET (reset the GPU or reboot), ISOLATE (take it out of service, a part is broken), TRIAGE (take it
out until a person has found the part).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["MONITOR", "CONFIG", "RESET", "ISOLATE", "TRIAGE"]


@dataclass(frozen=True)
class Code:
    """A kind of fault. `explains`: the categories of faults at the same place that may be its effects."""

    number: int
    name: str
    category: str
    action: Action
    message: str
    next_step: str
    explains: tuple[str, ...] = ()

"""torch's flight recorder, read for the report of a hang: which collective each rank had come to."""

from __future__ import annotations

import json
from pathlib import Path


def last_collective(path: Path) -> tuple[str, int]:
    """The last collective in a rank's dump with its state, and its number: ("nccl:all_reduce, started", 7)."""
    try:
        entries = json.loads(path.read_text()).get("entries", [])
    except (OSError, ValueError):
        return "", 0
    collectives = [entry for entry in entries if not entry.get("is_p2p")]
    if not collectives:
        return "", 0
    last = collectives[-1]
    return f"{last.get('profiling_name')}, {last.get('state')}", int(last.get("collective_seq_id", 0))

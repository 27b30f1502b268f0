"""torch's flight recorder, read for the report of a hang: which collective each rank had come to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def last_collectives(dumps: Mapping[int, str]) -> dict[int, tuple[str, int]]:
    """By rank the last collective in its dump with its state, and its number: ("nccl:all_reduce, started", 7).

    All of one process group, the last that any rank used, since every group counts for itself.
    """
    entries = {rank: _collectives(dump) for rank, dump in dumps.items()}
    newest = max((entry for each in entries.values() for entry in each), key=_created, default={})
    group = newest.get("process_group")
    return {
        rank: _told([entry for entry in each if entry.get("process_group") == group]) for rank, each in entries.items()
    }


def _collectives(dump: str) -> list[dict[str, Any]]:
    try:
        entries = json.loads(dump).get("entries", [])
    except ValueError:  # there is none, or it was cut off
        return []
    return [entry for entry in entries if not entry.get("is_p2p")]


def _created(entry: Mapping[str, Any]) -> int:
    return int(entry.get("time_created_ns", 0))


def _told(entries: list[dict[str, Any]]) -> tuple[str, int]:
    if not entries:
        return "", 0
    last = entries[-1]
    return f"{last.get('profiling_name')}, {last.get('state')}", int(last.get("collective_seq_id", 0))

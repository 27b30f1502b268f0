"""What tells a run from every other one: what is signed, and what stands at the foot of each printed page."""

from __future__ import annotations

import re
from typing import Any

from markupsafe import Markup

from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.language import Say, english
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording

# Keys of --fleet-note that have words of their own; the others are called as they were given.
NOTES = {
    "order": "Order number",
    "asset": "Asset tag",
    "location": "Location",
    "technician": "Technician",
    "remarks": "Remarks",
}
MOST_NOTES, MOST_NAMED = 12, 16  # that the page with the signatures has room for


def shown(record: Record, sha256: str, say: Say) -> dict[str, Any]:
    """What the templates take of this module."""
    return {
        "when": time_taken(record, say),
        "machine": "" if record.of_cluster else machine(record, say),
        "notes": notes(record),
        "signed": signed(record, say),
        "page_foot": page_foot(record, sha256),
    }


def notes(record: Record) -> list[tuple[str, str]]:
    """What --fleet-note gave, under the names that people read."""
    given = record.run.notes
    keys = [*(key for key in NOTES if key in given), *(key for key in given if key not in NOTES)]
    return [(NOTES.get(key) or wording.capitalised(key.replace("_", " ")), given[key]) for key in keys]


def time_taken(record: Record, say: Say = english) -> str:
    """From when to when, and how long: "2026-11-22 08:00:00 UTC to 2026-11-22 08:31:12 UTC, 31 min 12 s"."""
    begin = wording.moment(record.run.utc)
    if not record.ended:
        return say("{begin}, not ended", begin=begin)
    lasted = wording.duration(record.lasted)
    return say("{begin} to {end}, {lasted}", begin=begin, end=wording.moment(record.ended), lasted=lasted)


def suite(record: Record) -> str:
    """What the run was made with: "pytest-gpufleet 0.3.0, commit 5109..."."""
    version = f"pytest-gpufleet {record.run.plugin}"
    return f"{version}, commit {record.run.commit}" if record.run.commit else version


def machine(record: Record, say: Say = english) -> str:
    """Who made the machine, and its serial number, as far as its firmware tells."""
    told = record.machine.host.get("dmi") or {}
    model = " ".join(filter(None, (told.get("vendor"), told.get("product")))) if isinstance(told, dict) else ""
    serials = [node.serial for node in record.run.nodes if node.serial]
    return ", ".join(filter(None, (model, say("serial {serial}", serial=serials[0]) if serials else "")))


def signed(record: Record, say: Say = english) -> list[tuple[str, str]]:
    """What is signed, beside the verdict: a name and a value each."""
    noted = notes(record)
    more = len(noted) - MOST_NOTES
    rows = [
        *noted[:MOST_NOTES],
        ("And", say("{count} more notes, which evidence.jsonl has", count=more) if more > 0 else ""),
        *(_nodes(record, say) if record.of_cluster else [("Host", record.run.host), ("Machine", machine(record, say))]),
        ("GPUs", "" if record.of_cluster else _gpus(record, say)),
        ("Time", time_taken(record, say)),
        ("Level", record.run.level),
        ("Suite", suite(record)),
    ]
    return [(name, value) for name, value in rows if value]


def _nodes(record: Record, say: Say) -> list[tuple[str, str]]:
    told = [
        f"{node.host} ({say('serial {serial}', serial=node.serial)})" if node.serial else node.host
        for node in record.run.nodes
    ]
    return [("Nodes", _first(told, say))]


def _gpus(record: Record, say: Say) -> str:
    return _first([_gpu(gpu, say) for gpu in record.topology.gpus], say)


def _gpu(gpu: Gpu, say: Say) -> str:
    where = f" ({gpu.position})" if gpu.position else ""
    return f"{gpu.index}{where}: {say('serial {serial}', serial=gpu.serial) if gpu.serial else gpu.uuid}"


def _first(told: list[str], say: Say) -> str:
    more = say(" and {count} more", count=len(told) - MOST_NAMED) if len(told) > MOST_NAMED else ""
    return ", ".join(told[:MOST_NAMED]) + more


def page_foot(record: Record, sha256: str) -> Markup:
    """The rules that put host, run and the sum of its evidence at the foot of each printed page."""
    of = f"{record.run.host} · run of {wording.moment(record.run.utc)}"
    lines = [of, f"evidence SHA-256 {sha256}"] if sha256 else [of]
    told = "\\A ".join(_css(wording.clean(line)) for line in lines)
    return Markup(
        "@media print { @page { margin-bottom: 18mm; "
        f'@bottom-left {{ content: "{told}"; white-space: pre; font: 6.5pt/1.4 monospace; }} '
        '@bottom-right { content: counter(page) " / " counter(pages); font: 6.5pt/1.4 sans-serif; } } }'
    )


def _css(text: str) -> str:
    """Text for a string of CSS, inside HTML: whatever could end either is written as a number."""
    return re.sub(r"[^A-Za-z0-9 ._:/-]", lambda found: f"\\{ord(found[0]):x} ", text)

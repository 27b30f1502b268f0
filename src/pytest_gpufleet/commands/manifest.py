"""What is signed: one small file that says which files, of which run, who signs them, and when."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.run.folder import EVIDENCE, REPORT, SUMMARY
from pytest_gpufleet.verdict.basis import told

SCHEMA = 1
SIGNED = (EVIDENCE, SUMMARY, REPORT)
RUN = ("host", "utc", "verdict", "basis")
MOST_NOTE = 1000
# What can stand in a file of allowed signers as a principal, means nothing there as a pattern, and is a file name.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9@._+-]{0,99}")


@dataclass(frozen=True)
class Manifest:
    """`name`: the signer's; `time`: by the signer's clock, in UTC: both as claimed. `note`: what the signer wants to
    add. `run`: what it was, by RUN. `sha256`: of each file of SIGNED. ValueError for what `gpufleet sign` never writes.
    """

    name: str
    time: str
    note: str
    run: Mapping[str, str]
    sha256: Mapping[str, str]

    def __post_init__(self) -> None:
        check_name(self.name)
        check_note(self.note)
        if datetime.fromisoformat(self.time).utcoffset() != timedelta(0):
            raise ValueError(f"{self.time!r} is no time in UTC")
        if not all(text.isprintable() for text in (self.time, *self.run.values())):
            raise ValueError(f"{self.run} cannot be printed")
        if self.run.keys() != {*RUN} or self.sha256.keys() != {*SIGNED}:
            raise ValueError("something is missing or too much")

    def to_bytes(self) -> bytes:
        """The manifest as its file has it."""
        return (json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """What `to_bytes` wrote, byte for byte: whatever else it said, another reader might take it differently.
        ValueError for anything else."""
        try:
            fields: dict[str, Any] = json.loads(data)
            schema = fields.pop("schema")
            if schema != SCHEMA:
                raise ValueError(f"it has schema {schema!r}, but this version of the program knows {SCHEMA}")
            manifest = cls(**fields)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"it is no manifest of `gpufleet sign` ({type(error).__name__}: {error})") from None
        if manifest.to_bytes() != data:
            raise ValueError("it is not written as `gpufleet sign` writes it")
        return manifest


def check_name(text: str) -> str:
    """The name of a signer as it is. ValueError says what it may be."""
    if not _NAME.fullmatch(text):
        raise ValueError(
            f"{text!r} is no name to sign with: letters without accents, digits and @ . _ + - are, 100 of them at most "
            "and a letter or digit first, like ann@example.com; --note has room for more"
        )
    return text


def check_note(text: str) -> str:
    """A note as it is. ValueError says what it may be."""
    if len(text) > MOST_NOTE or not text.isprintable():
        raise ValueError(f"a note is one line of at most {MOST_NOTE:,} characters that can be printed")
    return text


def of_run(record: Record) -> dict[str, str]:
    """What a manifest says about a run."""
    said = {**codec.plain(record.run), "verdict": record.verdict, "basis": told(record)}
    return {name: said.get(name) or "" for name in RUN}

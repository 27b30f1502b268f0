"""The signatures in the folder of a run: two files for each signer, a manifest and the signature over it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_gpufleet import safe_files
from pytest_gpufleet.commands.manifest import SIGNED, Manifest, check_name, of_run
from pytest_gpufleet.commands.openssh import AllowedSigners
from pytest_gpufleet.commands.writing import SIGNED_BY
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.safe_files import sha256

_ENDINGS = (".json", ".json.sig")
_MOST_BYTES = 64 << 10  # of one file: a manifest, or the signature of a FIDO key with its certificate, is much shorter


@dataclass(frozen=True)
class Signature:
    """What became of a signature: why it does not count, or what it says."""

    problems: tuple[str, ...]
    text: str = ""


def names(folder: RunFolder) -> list[str]:
    """Who signed a run, as the names of files say it. Refused if that cannot be read."""
    try:
        entries = os.listdir(folder.path)
    except OSError as error:
        raise Refused(f"{folder} cannot be read: {error.strerror}") from None
    found = {entry.removeprefix(SIGNED_BY) for entry in entries if entry.startswith(SIGNED_BY)}
    return sorted({entry.removesuffix(".sig").removesuffix(".json") for entry in found})


def add(folder: RunFolder, manifest: Manifest, signature: bytes) -> Path:
    """Put a signature into the folder of a run; its manifest's path. Refused if that cannot be done, or if there
    is one of that name: none is ever replaced."""
    made: list[Path] = []
    try:
        for path, content in zip(_paths(folder, manifest.name), (manifest.to_bytes(), signature), strict=True):
            with path.open("xb") as file:
                made.append(path)
                file.write(content)
    except OSError as error:
        for half in made:  # which would be a bad signature
            half.unlink()
        raise Refused(f"{path} cannot be written: {error.strerror}") from None
    return made[0]


def sums(folder: RunFolder, evidence: str) -> dict[str, str]:
    """SHA-256 of each file that is signed; "" of what is no file. Of the evidence: as it was read."""
    return {SIGNED[0]: evidence} | {name: _sum(folder / name) for name in SIGNED[1:]}


def _sum(path: Path) -> str:
    try:
        return sha256(path)
    except OSError:  # it is missing, or a link, or no regular file
        return ""


def check(folder: RunFolder, record: Record, evidence: str, allowed: AllowedSigners | None) -> list[Signature]:
    """Each signature of a run held against the run's files and, if it is known who may sign, against the key.
    `evidence`: its SHA-256. That a signature was removed cannot be seen."""
    signers = names(folder)
    now = sums(folder, evidence) if signers else {}
    return [_check(folder, name, of_run(record), now, allowed) for name in signers]


def _check(
    folder: RunFolder, name: str, run: Mapping[str, str], now: Mapping[str, str], allowed: AllowedSigners | None
) -> Signature:
    who = f"the signature of {name!a}"
    try:
        check_name(name)
        # Read once: what is checked is what is told.
        data, signature = (_content(path) for path in _paths(folder, name))
        if allowed and (objection := allowed.objection(data, signature, name)):
            return Signature((f"{who} is not good: {objection}",))
        manifest = Manifest.from_bytes(data)
    except OSError as error:
        return Signature((f"{who} cannot be read: {error.filename}: {error.strerror}",))
    except ValueError as error:
        return Signature((f"{who} is not good: {error}",))
    if problems := tuple(f"{who} {problem}" for problem in _differences(manifest, name, run, now)):
        return Signature(problems)
    if allowed is None:
        return Signature((), f"{who} was not checked: --allowed-signers FILE says who may sign")
    remark = f': "{manifest.note}"' if manifest.note else ""
    verdict = "; ".join(filter(None, (run["verdict"], run["basis"])))
    return Signature((), f"signed by {name}, at {manifest.time} by the signer's clock, {verdict}{remark}")


def _differences(manifest: Manifest, name: str, run: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    if manifest.name != name:
        yield f"is one of {manifest.name}"
    if other := [f"{key} {value}" for key, value in manifest.run.items() if run[key] != value]:
        yield f"is of a run with another {', '.join(other)}"
    if changed := [file for file, stated in manifest.sha256.items() if now[file] != stated]:
        yield f"is of another {', '.join(changed)} than is here"


def _paths(folder: RunFolder, name: str) -> tuple[Path, Path]:
    manifest, signature = (folder / f"{SIGNED_BY}{name}{ending}" for ending in _ENDINGS)
    return manifest, signature


def _content(path: Path) -> bytes:
    with safe_files.open_regular(path, _MOST_BYTES) as file:
        return file.read()

"""`gpufleet sign`: a signature over a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from pytest_gpufleet.commands import openssh, signatures
from pytest_gpufleet.commands.command import Command, printing, tell
from pytest_gpufleet.commands.manifest import Manifest, check_name, check_note, of_run
from pytest_gpufleet.commands.recorded import examined
from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.run.folder import EVIDENCE, RunFolder
from pytest_gpufleet.verdict.verdict import DIED


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=RunFolder.of, metavar="DIR", help="the folder of a run")
    parser.add_argument(
        "--key", type=Path, required=True, metavar="FILE",
        help="an OpenSSH key: the private one, or the public one of a key that ssh-agent holds",
    )  # fmt: skip
    parser.add_argument(
        "--as", type=_told(check_name), required=True, dest="name", metavar="NAME",
        help="who signs, as the list of allowed signers has it, like ann@example.com",
    )  # fmt: skip
    parser.add_argument(
        "--note", type=_told(check_note), default="", metavar="TEXT", help="a remark that is signed too"
    )


def _told(check: Callable[[str], str]) -> Callable[[str], str]:
    """`check` for argparse, which tells a ValueError in words of its own."""

    def checked(text: str) -> str:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _run(given: argparse.Namespace) -> int:
    folder, name = given.folder, given.name
    openssh.ssh_keygen()  # that there is none should be known before anything is read
    found, _ = examined(folder)
    record, digest = found.record, found.digest
    if record.verdict is None:
        raise Refused(f"{folder} cannot be signed: {DIED}, so it has no verdict")
    if name in signatures.names(folder):
        raise Refused(f"{folder} is signed by {name} already; remove that signature's files to sign it anew")
    if found.missing:
        raise Refused(f"{folder} cannot be signed: {' and '.join(found.missing)} is missing")
    try:
        manifest = Manifest(
            name,
            datetime.now(timezone.utc).isoformat(timespec="seconds"),
            given.note,
            of_run(record),
            signatures.sums(folder, digest),
        )
    except ValueError as error:
        raise Refused(f"{folder} cannot be signed: {error}") from None
    with printing():  # before somebody gives a passphrase
        tell(f"{folder}: signing as {name}: {', '.join(filter(None, manifest.run.values()))}")
    path = signatures.add(folder, manifest, openssh.sign(manifest.to_bytes(), given.key))
    with printing():
        tell(f"{path}: signed, SHA-256 of {EVIDENCE} {digest}")
    return 0


SIGN = Command(
    "sign the evidence, report and summary of a run with an OpenSSH key",
    _arguments,
    _run,
    "It writes two files into the folder of the run, beside those of others who signed: what is signed, "
    "signed-by-NAME.json, and the signature over it. `gpufleet verify --allowed-signers` checks them.",
)

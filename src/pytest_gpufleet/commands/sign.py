"""`gpufleet sign`: a signature over a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_gpufleet.commands import signatures
from pytest_gpufleet.commands.command import Command, printing, tell
from pytest_gpufleet.commands.recorded import examined
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.run.folder import EVIDENCE, RunFolder
from pytest_gpufleet.verdict.verdict import DIED


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=RunFolder.of, metavar="DIR", help="the folder of a run")
    parser.add_argument(
        "--key", type=Path, required=True, metavar="FILE",
        help="an OpenSSH key: the private one, or the public one of a key that ssh-agent holds",
    )  # fmt: skip
    parser.add_argument(
        "--as", required=True, dest="name", metavar="NAME",
        help="who signs, as the list of allowed signers has it, like ann@example.com",
    )  # fmt: skip


def _run(given: argparse.Namespace) -> int:
    folder, name = given.folder, given.name
    found, _ = examined(folder)
    run = found.record.run
    if found.record.verdict is None:
        raise Refused(f"{folder} cannot be signed: {DIED}, so it has no verdict")
    if found.missing:
        raise Refused(f"{folder} cannot be signed: {' and '.join(found.missing)} is missing")
    if name in signatures.names(folder):
        raise Refused(f"{folder} is signed by {name} already; remove that signature to sign it anew")
    with printing():  # before somebody gives a passphrase
        tell(f"{folder}: signing as {name}: {run.host}, {run.utc}, {found.record.verdict}")
    path = signatures.sign(folder, name, given.key)
    with printing():
        tell(f"{path}: signed, SHA-256 of {EVIDENCE} {found.digest}")
    return 0


SIGN = Command(
    "sign a run with an OpenSSH key",
    _arguments,
    _run,
    "It signs summary.json, which has the SHA-256 of the evidence and of the report, and writes signed-by-NAME.sig "
    "into the folder of the run, beside the signatures of others. `gpufleet verify --allowed-signers` checks them.",
)

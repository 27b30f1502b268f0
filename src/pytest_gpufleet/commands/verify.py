"""`gpufleet verify`: whether evidence, report and summary of a run belong together."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_gpufleet import __version__
from pytest_gpufleet.commands.command import Command, printing, tell
from pytest_gpufleet.commands.recorded import examined
from pytest_gpufleet.commands.signatures import Signers
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.run.folder import EVIDENCE, REPORT, SUMMARY, RunFolder
from pytest_gpufleet.verdict.verdict import DIED, ended


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=RunFolder.of, metavar="DIR", help="the folder of a run")
    parser.add_argument(
        "--allowed-signers", type=Path, metavar="FILE",
        help="check signatures: who may sign, with which keys, as ssh-keygen(1) has it; one signature must be there",
    )  # fmt: skip
    parser.add_argument(
        "--revoked-keys", type=Path, metavar="FILE", help="keys that no longer count: public keys, or a KRL of OpenSSH"
    )


def _run(given: argparse.Namespace) -> int:
    folder = given.folder
    if given.revoked_keys and not given.allowed_signers:
        raise Refused("--revoked-keys is about signatures, which only --allowed-signers checks")
    signers = Signers(given.allowed_signers, given.revoked_keys) if given.allowed_signers else None
    found, said = examined(folder, signers)
    record = ended(found.record)
    with printing():
        verdict = record.verdict if found.record.verdict else f"{record.verdict}; {DIED}"
        whose = f" of the run and of {len(record.finished)} nodes" if record.of_cluster else ""
        files = [name for name in (EVIDENCE, SUMMARY, REPORT) if name not in found.missing]
        held = f"{' and '.join(files)}{whose} belong together" if len(files) > 1 else f"{EVIDENCE}{whose} stands alone"
        tell(f"{folder}: {held}, SHA-256 {found.digest}: {verdict}")
        if (made_by := record.run.plugin) != __version__:
            said.append(f"made by pytest-gpufleet {made_by}, so its verdict and its summary were not derived again")
        for line in said:
            tell(f"{folder}: {line}")
    return 0


VERIFY = Command(
    "check that evidence, report and summary of a run belong together, and its signatures",
    _arguments,
    _run,
    "Every command that reads a run does so first. This shows whether a file was changed or mixed up later. It cannot "
    "show who wrote them: for that, check who signed them with --allowed-signers, or compare the SHA-256 with the one "
    "on the signed paper.",
    "1 also if anything differs, or if a signature is not good.",
)

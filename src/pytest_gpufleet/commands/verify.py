"""`gpufleet sign` and `gpufleet verify`: a signature over a run, and whether its files belong together."""

import argparse

from pytest_gpufleet import __version__
from pytest_gpufleet.commands import signatures
from pytest_gpufleet.commands.command import Command, argument, examined, file, folder, printing, tell
from pytest_gpufleet.commands.signatures import Signers
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.run import integrity
from pytest_gpufleet.run.folder import EVIDENCE, REPORT, SUMMARY
from pytest_gpufleet.verdict.verdict import DIED, ended


def _sign(given: argparse.Namespace) -> int:
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
    _sign,
    (
        folder(),
        file(
            "--key",
            required=True,
            help="an OpenSSH key: the private one, or the public one of a key that ssh-agent holds",
        ),
        argument(
            "--as",
            required=True,
            dest="name",
            metavar="NAME",
            help="who signs, as the list of allowed signers has it, like ann@example.com",
        ),
    ),
    "It signs summary.json, which has the SHA-256 of the evidence and of the report, and writes signed-by-NAME.sig "
    "into the folder of the run, beside the signatures of others. `gpufleet verify --allowed-signers` checks them.",
)


def _verify(given: argparse.Namespace) -> int:
    folder = given.folder
    if given.revoked_keys and not given.allowed_signers:
        raise Refused("--revoked-keys is about signatures, which only --allowed-signers checks")
    signers = Signers(given.allowed_signers, given.revoked_keys) if given.allowed_signers else None
    found, said = examined(folder, signers)
    record = ended(found.record)
    if SUMMARY in found.missing and REPORT not in found.missing:
        raise Refused(
            f"{folder}: {SUMMARY}, which has the SHA-256 of {REPORT}, is missing, so nobody knows whether the page was "
            f"changed; `gpufleet report {folder}` makes both again from the evidence"
        )
    with printing():
        verdict = record.verdict if found.record.verdict else f"{record.verdict}; {DIED}"
        whose = f" of the run and of {len(record.finished)} nodes" if record.of_cluster else ""
        files = [name for name in (EVIDENCE, SUMMARY, REPORT) if name not in found.missing]
        held = f"{' and '.join(files)}{whose} belong together" if len(files) > 1 else f"{EVIDENCE}{whose} stands alone"
        tell(f"{folder}: {held}, SHA-256 {found.digest}: {verdict}")
        if not integrity.of_this_code(record):
            run = record.run
            state = f", commit {run.commit[:12]}" if run.commit else ""
            said.append(
                f"made by pytest-gpufleet {run.plugin}{state}, not by this state of {__version__}: verified by what "
                "it recorded, its verdict and its summary were not derived again"
            )
        if not found.knows_page:
            said.append(
                f"{SUMMARY} has no SHA-256 of {REPORT}, as before 0.4: nobody knows whether the page was changed"
            )
        for line in said:
            tell(f"{folder}: {line}")
    return 0


VERIFY = Command(
    "check that evidence, report and summary of a run belong together, and its signatures",
    _verify,
    (
        folder(),
        file(
            "--allowed-signers",
            help="check signatures: who may sign, with which keys, as ssh-keygen(1) has it; one signature must be "
            "there",
        ),
        file("--revoked-keys", help="keys that no longer count: public keys, or a KRL of OpenSSH"),
    ),
    "Every command that reads a run does so first. This shows whether a file was changed or mixed up later. It cannot "
    "show who wrote them: for that, check who signed them with --allowed-signers, or compare the SHA-256 with the one "
    "on the signed paper.",
    "1 also if anything differs, or if a signature is not good.",
)

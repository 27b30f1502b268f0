"""The runs that commands read: each is checked first, its files and its signatures.

Signatures are those of OpenSSH over summary.json, which has the SHA-256 of its evidence and of its page; ssh-keygen
makes and checks them. Source: ssh-keygen(1), -Y and ALLOWED SIGNERS."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from pytest_gpufleet import __version__, safe_files
from pytest_gpufleet.commands.command import FOLDER, SIGNED_BY, argument, file, print_line, printing, subcommand
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.run import integrity
from pytest_gpufleet.run.folder import EVIDENCE, REPORT, SUMMARY, RunFolder
from pytest_gpufleet.run.integrity import Checked
from pytest_gpufleet.verdict.verdict import DIED

NAMESPACE = "pytest-gpufleet"  # a signature of something else, like a git commit, is none of a run
SECONDS = 30.0  # for what waits for nobody
ENDING = ".sig"
MOST_BYTES = 64 << 10  # the signature of a FIDO key with its certificate is much shorter
# What can stand in a file of allowed signers as a principal, means nothing there as a pattern, and is a file name.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9@._+-]{0,99}")

Signers = tuple[Path, Path | None]  # the file of who may sign, and that of keys which no longer count


def examined(folder: RunFolder, signers: Signers | None = None, nodes: bool = True) -> tuple[Checked, list[str]]:
    """The run in a folder, and what is to be said of it. Refused if files or signatures are not as they have to be, or
    if somebody may sign and nobody did."""
    found = integrity.check(folder, nodes)
    missing = ", ".join(found.missing)
    remarks = [f"missing, as after a run that was killed: {missing}"] if missing else []
    names, document = signed_by(folder), folder.content(SUMMARY) or b""
    if signers and not names:
        raise Refused(f"{folder}: nobody signed it")
    for name in names:
        if signers is None and shutil.which("ssh-keygen") is None:
            remarks.append(f"the signature of {name!a} was not checked: there is no ssh-keygen")
        elif why := _objection(document, _path(folder, name), name, signers):
            raise Refused(f"{folder}: the signature of {name!a} is not good: {why}")
        else:
            remarks.append(f"signed by {name}" + ("" if signers else ", whose key --allowed-signers FILE checks"))
    return found, remarks


def checked(folder: RunFolder, nodes: bool = True) -> Checked:
    """The run in a folder. What is to be said of it goes to standard error."""
    found, remarks = examined(folder, nodes=nodes)
    for line in remarks:
        print_line(f"{folder}: {line}", sys.stderr)
    return found


def all_checked(folders: Sequence[RunFolder]) -> dict[str, Checked]:
    """Several runs by a name for each: its folder's, or the path where that is not clear enough."""
    short = [folder.name for folder in folders]
    names = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    if len({folder.path.resolve() for folder in folders}) < len(folders):
        raise Refused("the same folder is given twice")
    return {name: checked(folder) for name, folder in zip(names, folders, strict=True)}


def signed_by(folder: RunFolder) -> list[str]:
    """Who signed a run, as the names of files say it. Refused if that cannot be read."""
    try:
        entries = os.listdir(folder.path)
    except OSError as error:
        raise Refused(f"{folder} cannot be read: {error.strerror}") from None
    found = (entry.removeprefix(SIGNED_BY) for entry in entries if entry.startswith(SIGNED_BY))
    return sorted(entry.removesuffix(ENDING) for entry in found if entry.endswith(ENDING))


def _objection(document: bytes, path: Path, name: str, signers: Signers | None) -> str:
    """Why a signature does not count; "" if it does. A key must be valid now, whatever time the signer claims."""
    try:
        safe_files.open_regular(path, MOST_BYTES).close()
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if _refuses(document, "check-novalidate", "-s", path):
        return f"{SUMMARY} was changed since, or it is one of something else"
    if signers is None:
        return ""
    allowed, revoked = signers
    why = _refuses(document, "verify", "-I", name, "-f", allowed, "-s", path, *(("-r", revoked) if revoked else ()))
    return why and f"by {allowed} its key may not sign as {name} today ({why})"


def _refuses(document: bytes, action: str, *arguments: str | Path) -> str:
    """What ssh-keygen says where it does not accept a signature."""
    try:
        ended = subprocess.run(_ssh_keygen(action, *arguments), input=document, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise Refused(f"ssh-keygen did not end within {SECONDS:g} s") from None
    lines = (ended.stdout + ended.stderr).decode(errors="replace").split("\n")
    return "; ".join(filter(None, lines)) or "without a word" if ended.returncode else ""


def _ssh_keygen(action: str, *arguments: str | Path) -> list[str | Path]:
    if (program := shutil.which("ssh-keygen")) is None:
        raise Refused("signatures need ssh-keygen, which is not on PATH: install OpenSSH 8.2 or later")
    return [program, "-Y", action, "-n", NAMESPACE, *arguments]


def _path(folder: RunFolder, name: str) -> Path:
    """Refused if `name` is none that can be signed with."""
    if not _NAME.fullmatch(name):
        raise Refused(
            f"{name!a} is no name to sign with: letters without accents, digits and @ . _ + - are, 100 of them at most "
            "and a letter or digit first, like ann@example.com"
        )
    return folder / f"{SIGNED_BY}{name}{ENDING}"


@subcommand(
    "sign a run with an OpenSSH key",
    FOLDER,
    file("--key", required=True, help="an OpenSSH key: the private one, or the public one of a key in ssh-agent"),
    argument("--as", required=True, dest="name", metavar="NAME",
             help="who signs, as the list of allowed signers has it, like ann@example.com"),
    details="It signs summary.json, which has the SHA-256 of the evidence and of the report, and writes "
    "signed-by-NAME.sig into the folder of the run, beside the signatures of others. `gpufleet verify "
    "--allowed-signers` checks them.",
)  # fmt: skip
def sign(given: argparse.Namespace) -> int:
    """ssh-keygen itself asks for a passphrase, a PIN or a touch, and takes its time. No signature is ever replaced."""
    folder, name = given.folder, given.name
    found, _ = examined(folder)
    run, path = found.record.run, _path(folder, name)
    if found.record.verdict is None:
        raise Refused(f"{folder} cannot be signed: {DIED}, so it has no verdict")
    if found.missing:
        raise Refused(f"{folder} cannot be signed: {' and '.join(found.missing)} is missing")
    if name in signed_by(folder):
        raise Refused(f"{folder} is signed by {name} already; remove that signature to sign it anew")
    with printing():  # before somebody gives a passphrase
        print_line(f"{folder}: signing as {name}: {run.host}, {run.utc}, {found.record.verdict}")
    try:
        with tempfile.TemporaryDirectory(prefix="gpufleet-") as temporary:
            copy = Path(temporary, SUMMARY)
            copy.write_bytes(folder.content(SUMMARY) or b"")
            # The terminal stays its standard input.
            if subprocess.run(_ssh_keygen("sign", "-q", "-f", given.key, copy)).returncode:
                raise Refused(f"nothing was signed: ssh-keygen cannot use the key {given.key}, and says above why")
            with path.open("xb") as file, ExitStack() as undone:
                undone.callback(path.unlink)  # half of a signature would be one that is not good
                file.write(copy.with_name(SUMMARY + ENDING).read_bytes())
                file.flush()
                undone.pop_all()
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from None
    with printing():
        print_line(f"{path}: signed, SHA-256 of {EVIDENCE} {found.digest}")
    return 0


@subcommand(
    "check that evidence, report and summary of a run match, and its signatures",
    FOLDER,
    file("--allowed-signers", help="check signatures: who may sign, with which keys, as ssh-keygen(1) has it; one "
         "signature must be there"),
    file("--revoked-keys", help="keys that no longer count: public keys, or a KRL of OpenSSH"),
    details="Every command that reads a run does so first. This shows whether a file was changed or mixed up later. It "
    "cannot show who wrote them: for that, check who signed them with --allowed-signers, or compare the SHA-256 with "
    "the one on the signed paper.",
    statuses="1 also if anything differs, or if a signature is not good.",
)  # fmt: skip
def verify(given: argparse.Namespace) -> int:
    folder = given.folder
    if given.revoked_keys and not given.allowed_signers:
        raise Refused("--revoked-keys is about signatures, which only --allowed-signers checks")
    found, remarks = examined(folder, given.allowed_signers and (given.allowed_signers, given.revoked_keys))
    record = found.ended
    if SUMMARY in found.missing and REPORT not in found.missing:
        raise Refused(
            f"{folder}: {SUMMARY}, which has the SHA-256 of {REPORT}, is missing, so nobody knows whether the page was "
            f"changed; `gpufleet report {folder}` makes both again from the evidence"
        )
    verdict = record.verdict if found.record.verdict else f"{record.verdict}; {DIED}"
    whose = f" of the run and of {len(record.finished)} nodes" if record.of_cluster else ""
    files = [name for name in (EVIDENCE, SUMMARY, REPORT) if name not in found.missing]
    held = f"{' and '.join(files)}{whose} belong together" if len(files) > 1 else f"{EVIDENCE}{whose} stands alone"
    if not integrity.of_this_code(record):
        commit = f", commit {record.run.commit[:12]}" if record.run.commit else ""
        remarks.append(
            f"made by pytest-gpufleet {record.run.plugin}{commit}, not by this state of {__version__}: verified by "
            "what it recorded, its verdict and its summary were not derived again"
        )
    with printing():
        for line in (f"{held}, SHA-256 {found.digest}: {verdict}", *remarks):
            print_line(f"{folder}: {line}")
    return 0

"""Signatures over a run: those of OpenSSH over summary.json, which has the SHA-256 of its evidence and of its page.

ssh-keygen makes and checks them. Source: ssh-keygen(1), -Y and ALLOWED SIGNERS.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_gpufleet import safe_files
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.run.folder import SUMMARY, RunFolder

NAMESPACE = "pytest-gpufleet"  # a signature of something else, like a git commit, is none of a run
SECONDS = 30.0  # for what waits for nobody
SIGNED_BY, ENDING = "signed-by-", ".sig"  # how the files of signatures begin and end
MOST_BYTES = 64 << 10  # the signature of a FIDO key with its certificate is much shorter
# What can stand in a file of allowed signers as a principal, means nothing there as a pattern, and is a file name.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9@._+-]{0,99}")


@dataclass(frozen=True)
class Signers:
    """The file of who may sign, and that of keys which no longer count."""

    allowed: Path
    revoked: Path | None = None


def names(folder: RunFolder) -> list[str]:
    """Who signed a run, as the names of files say it. Refused if that cannot be read."""
    try:
        entries = os.listdir(folder.path)
    except OSError as error:
        raise Refused(f"{folder} cannot be read: {error.strerror}") from None
    found = (entry.removeprefix(SIGNED_BY) for entry in entries if entry.startswith(SIGNED_BY))
    return sorted(entry.removesuffix(ENDING) for entry in found if entry.endswith(ENDING))


def sign(folder: RunFolder, name: str, key: Path) -> Path:
    """Put the signature of `name` into the folder of a run. ssh-keygen itself asks for a passphrase, a PIN or a touch,
    on the terminal and for as long as that takes. Refused if nothing was signed; no signature is ever replaced."""
    program, path = _ssh_keygen(), _path(folder, name)
    try:
        with tempfile.TemporaryDirectory(prefix="gpufleet-") as temporary:
            copy = Path(temporary, SUMMARY)
            copy.write_bytes(folder.content(SUMMARY) or b"")
            # The terminal stays its standard input.
            if subprocess.run([program, "-q", "-Y", "sign", "-n", NAMESPACE, "-f", key, copy]).returncode:
                raise Refused(f"nothing was signed: ssh-keygen cannot use the key {key}, and says above why")
            with path.open("xb") as file:
                file.write(copy.with_name(SUMMARY + ENDING).read_bytes())
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from None
    return path


def check(folder: RunFolder, signers: Signers | None) -> Iterator[str]:
    """What each signature of a run says. Refused if one is not good, or if somebody may sign and nobody did."""
    signed = names(folder)
    if signers and not signed:
        raise Refused(f"{folder}: nobody signed it")
    document = folder.content(SUMMARY) or b""
    for name in signed:
        if signers is None and shutil.which("ssh-keygen") is None:
            yield f"the signature of {name!a} was not checked: there is no ssh-keygen"
        elif why := _objection(document, _path(folder, name), name, signers):
            raise Refused(f"{folder}: the signature of {name!a} is not good: {why}")
        else:
            yield f"signed by {name}" + ("" if signers else ", whose key --allowed-signers FILE checks")


def _objection(document: bytes, path: Path, name: str, signers: Signers | None) -> str:
    """Why a signature does not count; "" if it does. Keys must be valid now: a time that the signer claims would let a
    stolen key sign after it expired."""
    try:
        safe_files.open_regular(path, MOST_BYTES).close()
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if _refuses(document, "check-novalidate", "-n", NAMESPACE, "-s", path):
        return f"{SUMMARY} was changed since, or it is one of something else"
    if signers is None:
        return ""
    revoked = ("-r", signers.revoked) if signers.revoked else ()
    if said := _refuses(document, "verify", "-n", NAMESPACE, "-I", name, "-f", signers.allowed, "-s", path, *revoked):
        return f"by {signers.allowed} its key may not sign as {name} today ({said})"
    return ""


def _refuses(document: bytes, *arguments: str | Path) -> str:
    """What ssh-keygen says where it does not accept a signature."""
    try:
        ended = subprocess.run([_ssh_keygen(), "-Y", *arguments], input=document, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise Refused(f"ssh-keygen did not end within {SECONDS:g} s") from None
    said = (ended.stdout + ended.stderr).decode(errors="replace").split("\n")
    return "; ".join(filter(None, said)) or "without a word" if ended.returncode else ""


def _ssh_keygen() -> str:
    program = shutil.which("ssh-keygen")
    if program is None:
        raise Refused("signatures need ssh-keygen, which is not on PATH: install OpenSSH 8.2 or later")
    return program


def _path(folder: RunFolder, name: str) -> Path:
    """Refused if `name` is none that can be signed with."""
    if not _NAME.fullmatch(name):
        raise Refused(
            f"{name!a} is no name to sign with: letters without accents, digits and @ . _ + - are, 100 of them at most "
            "and a letter or digit first, like ann@example.com"
        )
    return folder / f"{SIGNED_BY}{name}{ENDING}"

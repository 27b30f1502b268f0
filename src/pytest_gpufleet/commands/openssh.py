"""Signatures of OpenSSH, made and checked by its ssh-keygen. Source: ssh-keygen(1), -Y and ALLOWED SIGNERS."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pytest_gpufleet.model.refused import Refused

NAMESPACE = "pytest-gpufleet"  # a signature of something else, like a git commit, is none of a run
VERSION = "OpenSSH 8.2 or later"
SECONDS = 30.0  # for what waits for nobody


def ssh_keygen() -> str:
    """The program. Refused if there is none that knows signatures."""
    program = shutil.which("ssh-keygen")
    if program is None:
        raise Refused(
            f"signatures need ssh-keygen, which is not on PATH: install {VERSION} "
            "(the package is openssh-client or openssh-clients)"
        )
    if b"-Y find-principals" not in _run(program, "-?").stderr:  # no option tells the version
        raise Refused(f"{program} is too old to sign, or to check what is signed: install {VERSION}")
    return program


def sign(data: bytes, key: Path) -> bytes:
    """The signature of `data`. ssh-keygen itself asks for a passphrase, a PIN or a touch, on the terminal and for as
    long as that takes. Refused if nothing was signed."""
    with _files({"manifest": data}) as paths:  # the terminal stays its standard input
        command = [ssh_keygen(), "-q", "-Y", "sign", "-n", NAMESPACE, "-f", str(key), paths["manifest"]]
        status = subprocess.run(command).returncode
        signature = Path(paths["manifest"] + ".sig")
        if status or not signature.exists():
            raise Refused(f"nothing was signed: ssh-keygen cannot use the key {key}, and says above why")
        return signature.read_bytes()


@dataclass(frozen=True)
class AllowedSigners:
    """Who may sign, with which keys. The lists are read once: they may come from a pipe."""

    path: Path
    lists: Mapping[str, bytes]  # "allowed" as in ALLOWED SIGNERS; "revoked": public keys, or a KRL
    program: str

    @classmethod
    def read(cls, allowed: Path, revoked: Path | None) -> AllowedSigners:
        """Refused if that cannot be read, or if there is nothing to check signatures with."""
        given = {"allowed": _content(allowed), "revoked": _content(revoked) if revoked else b""}
        return cls(allowed, given, ssh_keygen())

    def objection(self, data: bytes, signature: bytes, name: str) -> str:
        """Why `signature` does not count as one of `name` over `data`; "" if it does.

        Keys must be valid now: a time that the signer claims would let a stolen key sign after it expired.
        """
        with _files({**self.lists, "signature": signature}) as paths:
            over = ("-s", paths["signature"])
            by = ("-f", paths["allowed"])
            verify = ("verify", "-n", NAMESPACE, "-I", name, *by, *over)

            def refused(*arguments: str) -> bool:
                return _run(self.program, "-Y", *arguments, data=data).returncode != 0

            if not refused(*verify, "-r", paths["revoked"]):
                return ""
            if refused("check-novalidate", "-n", NAMESPACE, *over):
                return "one of the two was changed, or it was made for something else than a run"
            if refused("find-principals", *by, *over):
                return f"its key is not in {self.path}, or not valid today"
            if refused(*verify):
                return f"{self.path} does not let its key sign runs as {name}"
            return "its key was revoked"


@contextmanager
def _files(contents: Mapping[str, bytes]) -> Iterator[dict[str, str]]:
    """The paths of files that nobody else can touch, by name."""
    with ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpufleet-")))
            for name, content in contents.items():
                (folder / name).write_bytes(content)
        except OSError as error:
            raise Refused(f"ssh-keygen needs a temporary folder, set TMPDIR to one: {error.strerror}") from None
        yield {name: str(folder / name) for name in contents}


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}") from None


def _run(program: str, *arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run([program, *arguments], input=data, capture_output=True, timeout=SECONDS)
    except OSError as error:
        raise Refused(f"{program} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise Refused(f"{program} did not end within {SECONDS:g} s") from None

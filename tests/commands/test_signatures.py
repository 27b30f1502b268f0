"""Signatures over a run: made with real keys by the real ssh-keygen, and whatever somebody may do to them."""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_gpufleet import cli
from tests import runs
from tests.edited_evidence import seal

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen of OpenSSH")

VENDOR, CUSTOMER = "vendor@example.com", "customer@example.com"
PASSPHRASE = "correct horse"


@dataclass(frozen=True)
class Stand:
    """A run in `folder` that VENDOR signed, and what is around it."""

    folder: Path
    keys: Path
    signers: Path
    run: Callable

    def public(self, name):
        return (self.keys / f"{name}.pub").read_text().strip()

    def sign(self, key="customer", name=CUSTOMER):
        return self.run("sign", self.folder, "--key", self.keys / key, f"--as={name}")

    def verify(self, *options):
        return self.run("verify", self.folder, "--allowed-signers", self.signers, *options)

    def signature(self, name=VENDOR):
        return self.folder / f"signed-by-{name}.sig"


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    root = tmp_path_factory.mktemp("signed")
    for name, passphrase in (("vendor", ""), ("customer", ""), ("stranger", ""), ("encrypted", PASSPHRASE)):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", root / name], check=True)
    lines = [f"{who} {(root / name).with_suffix('.pub').read_text()}"
             for who, name in ((VENDOR, "vendor"), (CUSTOMER, "customer"), (CUSTOMER, "encrypted"))]  # fmt: skip
    (root / "signers").write_text("".join(lines))
    folder = str(runs.record(root / "run"))
    assert cli.main(["sign", folder, "--key", str(root / "vendor"), "--as", VENDOR]) == 0
    return root


@pytest.fixture
def stand(signed, tmp_path, gpufleet):
    folder = shutil.copytree(signed / "run", tmp_path / "run")
    return Stand(folder, signed, Path(shutil.copy(signed / "signers", tmp_path)), gpufleet)


def test_vendor_and_customer_sign_and_verify_says_who(stand):
    status, text = stand.sign()
    assert (status, f"signing as {CUSTOMER}: node7, 2026-11-21T01:40:06+00:00, INCOMPLETE" in text) == (0, True)
    status, text = stand.verify()
    assert (status, f"signed by {VENDOR}" in text, f"signed by {CUSTOMER}" in text) == (0, True, True)
    status, text = stand.run("judge", stand.folder)
    assert f"signed by {VENDOR}, whose key --allowed-signers FILE checks" in text
    another_run(stand)
    status, text = stand.run("judge", stand.folder)
    assert (status, f"the signature of '{CUSTOMER}' is not good" in text) == (1, True)


def test_a_signature_for_which_there_is_no_room_is_not_there(stand, monkeypatch):
    usual = Path.open

    def full(path, mode="r", *how, **more):
        return path.touch() or open("/dev/full", "wb") if mode == "xb" else usual(path, mode, *how, **more)

    monkeypatch.setattr(Path, "open", full)
    status, text = stand.sign()
    assert (status, "cannot be written: No space left on device" in text) == (1, True), text
    assert not stand.signature(CUSTOMER).exists()
    assert stand.verify()[0] == 0


def test_what_is_signed_can_be_checked_without_this_program_and_who_expects_a_signature_misses_it(stand):
    with (stand.folder / "summary.json").open("rb") as summary:
        verify = ["ssh-keygen", "-Y", "verify", "-n", "pytest-gpufleet", "-I", VENDOR, "-f", stand.signers, "-s"]
        subprocess.run([*verify, stand.signature()], stdin=summary, check=True)
    stand.signature().unlink()
    assert stand.run("verify", stand.folder)[0] == 0
    status, text = stand.verify()
    assert (status, "nobody signed it" in text) == (1, True)


def signers(line):
    """A list of who may sign with this line alone; {} is the vendor's key."""
    return lambda stand: stand.signers.write_text(line.format(stand.public("vendor")) + "\n")


def by_another_program(stand):
    with (stand.folder / "summary.json").open("rb") as summary, stand.signature().open("wb") as signature:
        sign = ["ssh-keygen", "-Y", "sign", "-n", "git", "-f", stand.keys / "vendor"]
        subprocess.run(sign, stdin=summary, stdout=signature, check=True)


def another_run(stand):
    evidence = stand.folder / "evidence.jsonl"
    evidence.write_text(evidence.read_text().replace("node7", "node8"))
    seal(stand.folder)


def a_link(stand):
    stand.signature().symlink_to(stand.signature().rename(stand.folder.with_name("elsewhere")))


NOT_GOOD = {
    "another run": (another_run, "summary.json was changed since"),
    "no summary": (lambda stand: (stand.folder / "summary.json").unlink(), "summary.json was changed since"),
    "of something else": (by_another_program, "one of something else"),
    "unknown key": (signers(f"{CUSTOMER} ssh-ed25519 AAAA"), "its key may not sign"),
    "one beside a good one": (lambda stand: stand.sign("stranger"), f"the signature of '{CUSTOMER}' is not good"),
    "another name": (signers("other@example.com {}"), f"its key may not sign as {VENDOR}"),
    "expired key": (signers(f'{VENDOR} valid-before="20200101" {{}}'), "its key may not sign"),
    "empty": (lambda stand: stand.signature().write_bytes(b""), "summary.json was changed since"),
    "a link": (a_link, "it is a link"),
    "a strange name": (lambda stand: stand.signature().rename(stand.signature("\x1b[2Ja")), r"'\x1b[2Ja' is no name"),
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_GOOD)
def test_a_signature_that_is_not_good(stand, what):
    change, words = NOT_GOOD[what]
    change(stand)
    status, text = stand.verify()
    assert (status, words in text, "\x1b" in text, f"signed by {VENDOR}" in text) == (1, True, False, False), text


def test_a_revoked_key_no_longer_counts(stand, tmp_path):
    (tmp_path / "revoked").write_text(stand.public("vendor"))
    assert stand.verify("--revoked-keys", tmp_path / "revoked")[0] == 1
    (tmp_path / "revoked").write_text(stand.public("stranger"))
    assert stand.verify("--revoked-keys", tmp_path / "revoked")[0] == 0
    status, text = stand.run("verify", stand.folder, "--revoked-keys", tmp_path / "revoked")
    assert (status, "which only --allowed-signers checks" in text) == (1, True)


def test_what_is_signed_stays_as_it_is(stand, tmp_path):
    before = {path.name: path.read_bytes() for path in stand.folder.iterdir()}
    status, text = stand.run("report", stand.folder)
    assert (status, f"is signed by '{VENDOR}': write this report to" in text) == (1, True)
    status, text = stand.sign("vendor", VENDOR)
    assert (status, f"is signed by {VENDOR} already" in text) == (1, True)
    assert stand.run("judge", stand.folder, "-o", stand.signature())[0] == 1
    assert {path.name: path.read_bytes() for path in stand.folder.iterdir()} == before
    assert stand.run("report", stand.folder, "-o", tmp_path / "again.html")[0] == 0


def test_what_is_not_whole_is_not_signed(stand):
    stand.signature().unlink()
    for name in ("report.html", "summary.json", "evidence.jsonl"):
        (stand.folder / name).unlink()
        assert stand.sign()[0] == 1
        assert not stand.signature(CUSTOMER).exists()


def test_a_name_that_cannot_stand_in_a_list_of_signers_and_signatures_without_ssh_keygen(stand, monkeypatch):
    for name in ("", "a b", "*", "!a", "../a", "-a", ".a", "a\n", "ä", "a" * 101):
        status, text = stand.sign("customer", name)
        assert (status, "is no name to sign with" in text) == (1, True), name
    monkeypatch.setenv("PATH", "")
    for status, text in (stand.sign(), stand.verify()):
        assert (status, "signatures need ssh-keygen, which is not on PATH" in text) == (1, True), text
    status, text = stand.run("verify", stand.folder)
    assert (status, "was not checked: there is no ssh-keygen" in text) == (0, True)


@pytest.mark.parametrize(("passphrase", "status"), [(PASSPHRASE, 0), ("wrong", 1)])
def test_ssh_keygen_itself_asks_for_the_passphrase(stand, tmp_path, monkeypatch, passphrase, status):
    ask = tmp_path / "ask"
    ask.write_text(f"#!/bin/sh\necho '{passphrase}'\n")
    ask.chmod(0o700)
    for name, value in {"SSH_ASKPASS": ask, "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": ":0"}.items():
        monkeypatch.setenv(name, str(value))
    ended, text = stand.sign("encrypted")
    assert (ended, stand.signature(CUSTOMER).exists()) == (status, not status), text
    assert stand.verify()[0] == 0

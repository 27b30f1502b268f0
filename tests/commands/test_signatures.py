"""Signatures over a run: made with real keys by the real ssh-keygen, and whatever somebody may do to them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pytest_gpufleet import cli
from pytest_gpufleet.commands import openssh, signatures
from pytest_gpufleet.commands.manifest import Manifest
from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.safe_files import sha256
from tests import runs

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen of OpenSSH")

VENDOR, CUSTOMER = "vendor@example.com", "customer@example.com"
PASSPHRASE = "correct horse"


@dataclass(frozen=True)
class Stand:
    """A run in `folder` that VENDOR signed, and what is around it."""

    folder: Path
    keys: Path
    signers: Path
    capsys: pytest.CaptureFixture[str]

    def key(self, name: str) -> Path:
        return self.keys / name

    def public(self, name: str) -> str:
        return (self.keys / f"{name}.pub").read_text().strip()

    def run(self, *arguments: object) -> tuple[int, str]:
        """The exit status of gpufleet, and all that it printed, its lines joined as a reader joins them."""
        self.capsys.readouterr()
        status = cli.main([str(argument) for argument in arguments])
        printed = self.capsys.readouterr()
        return status, " ".join((printed.out + printed.err).split())

    def sign(self, key: str = "customer", name: str = CUSTOMER, *options: str) -> tuple[int, str]:
        return self.run("sign", self.folder, "--key", self.key(key), f"--as={name}", *options)

    def verify(self, *options: object) -> tuple[int, str]:
        return self.run("verify", self.folder, "--allowed-signers", self.signers, *options)

    def path(self, name: str, ending: str = ".json") -> Path:
        return self.folder / f"signed-by-{name}{ending}"

    def put(self, data: bytes, name: str = VENDOR, namespace: str = openssh.NAMESPACE) -> None:
        """Whatever `data` is, with a good signature of the vendor's over it: a signer need not use this program."""
        self.path(name).write_bytes(data)
        self.path(name, ".json.sig").unlink(missing_ok=True)
        command = ["ssh-keygen", "-q", "-Y", "sign", "-n", namespace, "-f", self.key("vendor"), self.path(name)]
        subprocess.run(command, check=True)

    def manifest(self) -> Manifest:
        return Manifest.from_bytes(self.path(VENDOR).read_bytes())


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys, a list of who may sign, and a run that the vendor signed."""
    root = tmp_path_factory.mktemp("signed")
    for name, passphrase in (("vendor", ""), ("customer", ""), ("stranger", ""), ("encrypted", PASSPHRASE)):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", root / name], check=True)
    lines = [f"{who} {(root / name).with_suffix('.pub').read_text()}"
             for who, name in ((VENDOR, "vendor"), (CUSTOMER, "customer"), (CUSTOMER, "encrypted"))]  # fmt: skip
    (root / "signers").write_text("".join(lines))
    runs.record(root / "run")
    assert cli.main(["report", str(root / "run")]) == 0
    vendor = ["--key", str(root / "vendor"), "--as", VENDOR, "--note", "Ürdingen, Halle 3"]
    assert cli.main(["sign", str(root / "run"), *vendor]) == 0
    return root


@pytest.fixture
def stand(signed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Stand:
    """A copy of it, to do to it what one likes."""
    folder = shutil.copytree(signed / "run", tmp_path / "run")
    return Stand(folder, signed, Path(shutil.copy(signed / "signers", tmp_path)), capsys)


def test_vendor_and_customer_sign_and_verify_says_who_and_when(stand: Stand) -> None:
    status, text = stand.sign()
    assert status == 0
    assert f"signing as {CUSTOMER}: node7, 2026-11-21T01:40:06+00:00, INCOMPLETE" in text, "before it is done"
    status, text = stand.verify()
    assert status == 0
    assert "evidence, report and summary belong together" in text
    claimed = stand.manifest().time
    assert f'signed by {VENDOR}, at {claimed} by the signer\'s clock, INCOMPLETE: "Ürdingen, Halle 3"' in text
    assert f"signed by {CUSTOMER}, at " in text


def test_what_is_signed_can_be_checked_without_this_program(stand: Stand) -> None:
    """By sha256sum and ssh-keygen, as docs/commands.md says."""
    signed = json.loads(stand.path(VENDOR).read_text())
    for name, stated in signed["sha256"].items():
        assert subprocess.check_output(["sha256sum", stand.folder / name], text=True).split()[0] == stated
    with stand.path(VENDOR).open("rb") as manifest:
        verify = ["ssh-keygen", "-Y", "verify", "-n", "pytest-gpufleet", "-I", VENDOR, "-f", stand.signers, "-s"]
        subprocess.run([*verify, stand.path(VENDOR, ".json.sig")], stdin=manifest, check=True)


def test_signatures_that_nobody_asked_about_are_told_and_not_vouched_for(stand: Stand) -> None:
    status, text = stand.run("verify", stand.folder)
    assert status == 0
    assert f"the signature of '{VENDOR}' was not checked: --allowed-signers FILE says who may sign" in text
    with (stand.folder / "report.html").open("a") as report:
        report.write(" ")
    status, text = stand.run("verify", stand.folder)
    assert (status, f"the signature of '{VENDOR}' is of another report.html" in text) == (1, True)


def edit(name: str, old: str, new: str) -> Callable[[Stand], None]:
    def change(stand: Stand) -> None:
        text = (stand.folder / name).read_text()
        assert old in text
        (stand.folder / name).write_text(text.replace(old, new, 1))

    return change


def signers(line: str) -> Callable[[Stand], object]:
    """A list of who may sign with this line alone; {} is the vendor's key."""
    return lambda stand: stand.signers.write_text(line.format(stand.public("vendor")) + "\n")


def claims(**changed: object) -> Callable[[Stand], None]:
    return lambda stand: stand.put(replace(stand.manifest(), **changed).to_bytes())


def says(old: str, new: str) -> Callable[[Stand], None]:
    """The vendor signs something that this program does not write."""

    def change(stand: Stand) -> None:
        text = stand.path(VENDOR).read_text()
        assert old in text
        stand.put(text.replace(old, new, 1).encode())

    return change


def of_another_run(stand: Stand) -> None:
    """The vendor's signature moves to a run of another machine, in which all else fits."""
    evidence, was = stand.folder / "evidence.jsonl", sha256(stand.folder / "evidence.jsonl")
    evidence.write_text(evidence.read_text().replace("node7", "node8"))
    for path in (stand.folder / "summary.json", stand.folder / "report.html"):
        path.write_text(path.read_text().replace("node7", "node8").replace(was, sha256(evidence)))
    assert stand.run("verify", stand.folder)[1].count("run: ") == 2


def under_another_name(stand: Stand) -> None:
    """The customer seems to have signed, with a key that may sign for both."""
    for ending in (".json", ".json.sig"):
        stand.path(VENDOR, ending).rename(stand.path(CUSTOMER, ending))
    stand.signers.write_text(f"*@example.com {stand.public('vendor')}\n")


def a_link_to_the_report(stand: Stand) -> None:
    (stand.folder / "report.html").rename(stand.folder.with_name("report.html"))
    (stand.folder / "report.html").symlink_to(stand.folder.with_name("report.html"))


def by_a_strange_name(stand: Stand) -> None:
    for ending in (".json", ".json.sig"):
        stand.path(VENDOR, ending).rename(stand.path("\x1b[2Ja", ending))


def by_a_fifo(stand: Stand) -> None:
    stand.path(VENDOR).unlink()
    os.mkfifo(stand.path(VENDOR))


def by_a_link(stand: Stand) -> None:
    stand.path(VENDOR).rename(stand.folder.with_name("elsewhere"))
    stand.path(VENDOR).symlink_to(stand.folder.with_name("elsewhere"))


NOT_GOOD = {
    "changed report": (edit("report.html", "<title>", "<title>x"), "is of another report.html"),
    "changed evidence": (edit("evidence.jsonl", '"node7"', '"node9"'), "is of another evidence.jsonl"),
    "changed summary": (edit("summary.json", "node7", "node9"), "is of another summary.json"),
    "report removed": (lambda stand: (stand.folder / "report.html").unlink(), "is of another report.html"),
    "report a link": (a_link_to_the_report, "report.html cannot be read: it is a link"),
    "changed manifest": (
        edit(f"signed-by-{VENDOR}.json", "INCOMPLETE", "ACCEPTED"), "one of the two was changed"),
    "another run": (of_another_run, "is of a run with another host node7"),
    "another verdict": (
        claims(run={"host": "node7", "utc": "2026-11-21T01:40:06+00:00", "verdict": "ACCEPTED", "basis": ""}),
        "is of a run with another verdict ACCEPTED"),
    "another name": (under_another_name, f"the signature of '{CUSTOMER}' is one of {VENDOR}"),
    "namespace of another program": (
        lambda stand: stand.put(stand.path(VENDOR).read_bytes(), namespace="git"), "made for something else"),
    "unknown key": (signers(f"{CUSTOMER} ssh-ed25519 AAAA"), "its key is not in"),
    "name not allowed": (signers("other@example.com {}"), f"does not let its key sign runs as {VENDOR}"),
    "key for other things": (
        signers(f'{VENDOR} namespaces="git" {{}}'), f"does not let its key sign runs as {VENDOR}"),
    "expired key": (signers(f'{VENDOR} valid-before="20200101" {{}}'), "or not valid today"),
    "key not valid yet": (signers(f'{VENDOR} valid-after="20990101" {{}}'), "or not valid today"),
    "manifest lost": (lambda stand: stand.path(VENDOR).unlink(), "No such file"),
    "signature lost": (lambda stand: stand.path(VENDOR, ".json.sig").unlink(), "No such file"),
    "signature empty": (lambda stand: stand.path(VENDOR, ".json.sig").write_bytes(b""), "one of the two was changed"),
    "FIFO": (by_a_fifo, "it is not a regular file"),
    "link": (by_a_link, "it is a link"),
    "too long": (lambda stand: stand.put(b" " * (1 << 20)), "at most 65,536 are read"),
    "strange name": (by_a_strange_name, r"'\x1b[2Ja' is no name"),
    "no JSON": (lambda stand: stand.put(b"\xff"), "no manifest"),
    "deep": (lambda stand: stand.put(b"[" * 60_000), "no manifest"),
    "a list": (lambda stand: stand.put(b"[]"), "no manifest"),
    "schema": (says('"schema": 1', '"schema": 2'), "has schema 2"),
    "two verdicts": (says('"verdict"', '"verdict": "x", "verdict"'), "not written as"),
    "a file too much": (says('"report.html"', '"junit.xml": "", "report.html"'), "missing or too much"),
    "escape codes": (says("Halle", "\\u001b[2J"), "can be printed"),
    "local time": (says("+00:00", "+01:00"), "no time in UTC"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "told"), NOT_GOOD.values(), ids=NOT_GOOD)
def test_a_signature_that_is_not_good(stand: Stand, change: Callable[[Stand], None], told: str) -> None:
    change(stand)
    status, text = stand.verify()
    assert status == 1
    assert told in text
    assert f"signed by {VENDOR}" not in text
    assert "\x1b" not in text


def test_one_bad_signature_beside_a_good_one(stand: Stand) -> None:
    assert stand.sign("stranger")[0] == 0
    status, text = stand.verify()
    assert status == 1
    assert f"the signature of '{CUSTOMER}' is not good: its key is not in" in text
    assert f"signed by {VENDOR}, at " in text


def test_a_revoked_key_no_longer_counts(stand: Stand, tmp_path: Path) -> None:
    (tmp_path / "revoked").write_text(stand.public("vendor"))
    status, text = stand.verify("--revoked-keys", tmp_path / "revoked")
    assert (status, "is not good: its key was revoked" in text) == (1, True)
    (tmp_path / "revoked").write_text(stand.public("stranger"))
    assert stand.verify("--revoked-keys", tmp_path / "revoked")[0] == 0
    status, text = stand.run("verify", stand.folder, "--revoked-keys", tmp_path / "revoked")
    assert (status, "which only --allowed-signers checks" in text) == (1, True)


def test_whoever_expects_a_signature_misses_it(stand: Stand) -> None:
    """One of several that was removed cannot be seen: docs/commands.md says so."""
    for ending in (".json", ".json.sig"):
        stand.path(VENDOR, ending).unlink()
    assert stand.run("verify", stand.folder)[0] == 0
    status, text = stand.verify()
    assert (status, "nobody signed it" in text) == (1, True)


def test_what_is_signed_stays_as_it_is(stand: Stand, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in stand.folder.iterdir()}
    status, text = stand.run("report", stand.folder)
    assert (status, f"is signed by '{VENDOR}': write this report to" in text) == (1, True)
    status, text = stand.sign("vendor", VENDOR)
    assert (status, f"is signed by {VENDOR} already" in text) == (1, True)
    for taken in (stand.path(VENDOR), stand.path("someone")):
        assert stand.run("judge", stand.folder, "-o", taken)[0] == 1
    assert {path.name: path.read_bytes() for path in stand.folder.iterdir()} == before
    assert stand.run("report", stand.folder, "-o", tmp_path / "again.html")[0] == 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (edit("summary.json", "node7", "node9"), "does not say what the evidence says"),
        (edit("evidence.jsonl", '"node7"', '"node9"'), "was made of other evidence"),
        (lambda stand: (stand.folder / "report.html").unlink(), "report.html is missing"),
        (edit("report.html", "<title>", "<title>x"), f"the signature of '{VENDOR}' is of another report.html"),
    ],
)
def test_what_does_not_belong_together_is_not_signed(stand: Stand, change: Callable[[Stand], None], told: str) -> None:
    change(stand)
    status, text = stand.sign()
    assert (status, told in text, "cannot be signed" in text) == (1, True, True)
    assert not stand.path(CUSTOMER).exists()


def test_a_run_without_a_verdict_is_not_signed(stand: Stand) -> None:
    evidence = stand.folder / "evidence.jsonl"
    evidence.write_text("".join(evidence.read_text().splitlines(keepends=True)[:-1]))
    status, text = stand.sign()
    assert (status, "the run did not come to its end, so it has no verdict" in text) == (1, True)


@pytest.mark.parametrize("name", ["", "a b", "a,b", "*", "?", "!a", "../a", "a/b", "-a", ".a", "a\n", "ä", "a" * 101])
def test_a_name_that_cannot_stand_in_a_list_of_signers(stand: Stand, name: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        stand.sign("customer", name)
    assert "is no name to sign with" in stand.capsys.readouterr().err


@pytest.mark.parametrize("note", ["two\nlines", "\x1b[2J", "\u202egood", "\udcff", "a" * 1001])
def test_a_note_that_could_upset_a_reader(stand: Stand, note: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        stand.sign("customer", CUSTOMER, f"--note={note}")
    assert "a note is one line" in stand.capsys.readouterr().err


@pytest.mark.parametrize(("passphrase", "status"), [(PASSPHRASE, 0), ("wrong", 1)])
def test_ssh_keygen_itself_asks_for_the_passphrase(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passphrase: str, status: int
) -> None:
    ask = tmp_path / "ask"
    ask.write_text(f"#!/bin/sh\necho '{passphrase}'\n")
    ask.chmod(0o700)
    for name, value in {"SSH_ASKPASS": ask, "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": ":0"}.items():
        monkeypatch.setenv(name, str(value))
    before = sorted(stand.folder.iterdir())
    ended, text = stand.sign("encrypted")
    assert ended == status, text
    assert stand.verify()[0] == 0
    if status:
        assert "nothing was signed: ssh-keygen cannot use the key" in text
        assert sorted(stand.folder.iterdir()) == before


def test_a_key_that_only_the_agent_has(stand: Stand, tmp_path: Path) -> None:
    shutil.copy(stand.key("customer"), tmp_path / "secret")
    shutil.copy(stand.key("customer.pub"), tmp_path / "public.pub")
    sign = f"{sys.executable} -m pytest_gpufleet sign {stand.folder} --key public.pub --as {CUSTOMER}"
    subprocess.run(
        ["ssh-agent", "sh", "-c", f"ssh-add -q secret && rm secret && {sign}"], cwd=tmp_path, check=True, timeout=120
    )
    assert f"signed by {CUSTOMER}" in stand.verify()[1]


PROGRAMS = {
    "none": ("", "signatures need ssh-keygen, which is not on PATH: install OpenSSH 8.2 or later"),
    "old": ("echo 'ssh-keygen: unknown option -- Y' >&2; exit 1", "is too old"),
    "hangs": ("exec sleep 600", "did not end within 0.5 s"),
}


@pytest.mark.parametrize(("script", "told"), PROGRAMS.values(), ids=PROGRAMS)
def test_without_an_ssh_keygen_that_can_sign(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, told: str
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sleep").symlink_to("/bin/sleep")
    if script:
        (tmp_path / "bin" / "ssh-keygen").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / "ssh-keygen").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(openssh, "SECONDS", 0.5)
    for status, text in (stand.sign(), stand.verify()):
        assert (status, told in text) == (1, True), text
    assert stand.run("verify", stand.folder)[0] == 0, "which checks no signature"
    assert not stand.path(CUSTOMER).exists()


def test_without_a_temporary_folder(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(stand.folder / "evidence.jsonl"))
    for status, text in (stand.sign(), stand.verify()):
        assert (status, "ssh-keygen needs a temporary folder, set TMPDIR to one" in text) == (1, True), text
    assert not stand.path(CUSTOMER).exists()


def test_nothing_is_followed_or_replaced_by_a_signature(stand: Stand, tmp_path: Path) -> None:
    """Somebody puts a link there while the signer types a passphrase."""
    manifest = replace(stand.manifest(), name=CUSTOMER)
    stand.path(CUSTOMER, ".json.sig").symlink_to(tmp_path / "victim")
    with pytest.raises(Refused, match=r"json\.sig cannot be written: File exists"):
        signatures.add(RunFolder(stand.folder), manifest, b"")
    assert not (tmp_path / "victim").exists()
    assert not stand.path(CUSTOMER).exists(), "nor is half of a signature left behind"


@pytest.mark.parametrize("command", ["sign", "verify"])
def test_ctrl_c_is_no_success(stand: Stand, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(openssh.subprocess, "run", interrupted)
    status, _ = {"sign": stand.sign, "verify": stand.verify}[command]()
    assert status == 130
    assert not stand.path(CUSTOMER).exists()

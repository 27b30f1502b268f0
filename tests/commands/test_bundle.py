"""One archive for the return of hardware: what is in it, what is missing and why, and that nothing else gets in."""

import gzip
import json
import os
import shutil
import socket
import stat
import tarfile
from pathlib import Path

import pytest

from pytest_gpufleet import cli
from pytest_gpufleet.hardware import vendor_reports
from pytest_gpufleet.hardware.tools import Untold

RECORDED = Path(__file__).parents[1] / "recorded" / "h200x4-b"
SECRET = "ghp_0123456789abcdefghij"


@pytest.fixture
def run(tmp_path):
    """The folder of a run on this host, with report and summary."""
    folder = tmp_path / "run"
    shutil.copytree(RECORDED, folder)
    evidence = folder / "evidence.jsonl"
    first, *others = evidence.read_text().splitlines()
    told = {"t": json.loads(others[0])["t"], "event": "host_fact", "fact": "dcgm", "value": {"said": SECRET}}
    machine = next(number for number, line in enumerate(others) if json.loads(line)["event"] == "machine")
    others.insert(machine + 1, json.dumps(told))
    header = {**json.loads(first), "host": socket.gethostname()}
    evidence.write_text("".join(f"{line}\n" for line in (json.dumps(header), *others)))
    assert cli.main(["report", str(folder)]) == 0
    return folder


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """program(name, script): a program of this name is the only one on the path, beside the system's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.defpath}")

    def program(name, script):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return program


def bundled(folder, output, *more):
    assert cli.main(["bundle", str(folder), "-o", str(output), *more]) == 0
    with tarfile.open(output) as archive:
        members = archive.getmembers()
        return members, {each.name: archive.extractfile(each).read() for each in members}


def missing(contents):
    lines = contents["run/CONTENTS.txt"].decode().splitlines()
    return dict(line.split(": left out: ") for line in lines if ": left out: " in line)


def test_all_of_it_is_there_and_secrets_are_hidden(run, programs, tmp_path):
    programs("nvidia-bug-report.sh", f'echo "token={SECRET}" | gzip > "$2.gz"')
    members, contents = bundled(run, tmp_path / "x.tar.gz")
    for name in ("evidence.jsonl", "summary.json", "report.html"):
        assert contents[f"run/{name}"] == (run / name).read_bytes()
    assert contents["run/nvidia-bug-report.log"] == b"token=(hidden)\n"
    assert json.loads(contents["run/dcgmi-diag.json"]) == {"said": "(hidden)"}
    assert missing(contents).keys() == {"junit.xml", "ibdiagnet-errors.txt"}
    assert {(member.mode, member.uid, member.gid, member.uname, member.isreg()) for member in members} == {
        (0o600, 0, 0, "", True)
    }
    assert all(name.startswith("run/") and ".." not in name for name in contents)
    assert stat.S_IMODE((tmp_path / "x.tar.gz").stat().st_mode) == 0o600


def test_the_same_files_make_the_same_bytes_and_nothing_is_replaced(run, tmp_path, capsys):
    first, second = tmp_path / "a.tar.gz", tmp_path / "b.tar.gz"
    bundled(run, first, "--no-collect")
    bundled(run, second, "--no-collect")
    before = first.read_bytes()
    assert before == second.read_bytes()
    assert cli.main(["bundle", str(run), "-o", str(first), "--no-collect"]) == 1
    assert "is there already and is left as it is" in capsys.readouterr().err
    assert first.read_bytes() == before


def test_what_is_missing_is_told_with_its_reason(run, programs, tmp_path, capsys):
    programs("nvidia-bug-report.sh", "echo ERROR: Please run nvidia-bug-report.sh as root. >&2; exit 1")
    _, contents = bundled(run, tmp_path / "x.tar.gz")
    told = missing(contents)
    assert told["nvidia-bug-report.log"].endswith("wrote nothing: ERROR: Please run nvidia-bug-report.sh as root.")
    assert told["ibdiagnet-errors.txt"] == "the host has no InfiniBand port"
    assert "nvidia-bug-report.log: left out" in capsys.readouterr().out
    _, contents = bundled(run, tmp_path / "y.tar.gz", "--no-collect")
    assert missing(contents)["nvidia-bug-report.log"] == "--no-collect was given"


def test_of_another_host_no_program_is_asked(programs, tmp_path):
    programs("nvidia-bug-report.sh", 'echo wrong > "$2"')
    _, contents = bundled(RECORDED, tmp_path / "x.tar.gz")
    assert not any("bug-report" in name for name in contents)
    assert b"run `gpufleet bundle` there" in contents["h200x4-b/CONTENTS.txt"]


def test_no_link_is_followed(run, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("not for anybody")
    (run / "junit.xml").symlink_to(secret)
    (run / "report.html").unlink()
    (run / "report.html").symlink_to(secret)
    _, contents = bundled(run, tmp_path / "x.tar.gz", "--no-collect")
    assert not any(b"not for anybody" in content for content in contents.values())
    assert missing(contents)["junit.xml"] == "it is a link, which is not followed"
    (tmp_path / "link.tar.gz").symlink_to(secret)
    assert cli.main(["bundle", str(run), "-o", str(tmp_path / "link.tar.gz"), "--no-collect"]) == 1
    assert secret.read_text() == "not for anybody"


def test_only_the_errors_of_the_fabric_are_taken():
    # As ibdiagnet 2.x begins the lines of its stages, warnings and errors.
    said = "-I- Fabric Discover finished successfully\n-W- Pkey table is empty\n-E- Ports counters errors\n"
    port = {"link_layer": "InfiniBand"}
    assert vendor_reports.fabric_errors([port], lambda *command, **limits: said) == "-E- Ports counters errors\n"
    assert vendor_reports.fabric_errors([port], lambda *command, **limits: said[:42]) == "no error\n"
    with pytest.raises(Untold, match="no InfiniBand port"):
        vendor_reports.fabric_errors([{"link_layer": "Ethernet"}], lambda *command, **limits: said)


def test_half_a_report_is_none():
    def broken(*command, seconds):
        Path(f"{command[2]}.gz").write_bytes(gzip.compress(b"a line\n" * 1000)[:-20])
        return 0, "", ""

    with pytest.raises(Untold, match="cannot be read"):
        vendor_reports.bug_report(broken)

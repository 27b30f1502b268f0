"""The files of a run for another node, and no way out of its folder."""

import os

import pytest

from pytest_gpufleet.nodes import suite_process


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "run"
    (folder / "inner").mkdir(parents=True)
    (folder / "evidence.jsonl").write_bytes(b"0123456789")
    (folder / "inner" / "page.html").write_bytes(b"<p>")
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "way").symlink_to(tmp_path)
    os.mkfifo(folder / "fifo")
    return folder


def test_files_with_their_sizes_and_nothing_else(folder):
    assert suite_process.sizes(folder) == {"evidence.jsonl": 10, "inner/page.html": 3}


def test_a_file_that_gets_another_name_meanwhile_is_none(folder, monkeypatch):
    monkeypatch.setattr(os, "walk", lambda top: [(str(folder), [], ["report.html.tmp", "evidence.jsonl"])])
    assert suite_process.sizes(folder) == {"evidence.jsonl": 10}


def test_parts(folder):
    parts = [suite_process.part(folder, "evidence.jsonl", offset, 4) for offset in (0, 4, 8, 12)]
    assert parts == [b"0123", b"4567", b"89", b""]
    assert suite_process.part(folder, "inner/page.html", 0, 100) == b"<p>"


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../secret",
        "inner/../../secret",
        "/etc/passwd",
        "link",
        "way/secret",
        "fifo",
        "inner",
        "none",
        "a\0b",
    ],
)
def test_no_way_out(folder, name):
    with pytest.raises((OSError, ValueError)):
        suite_process.part(folder, name, 0, 100)

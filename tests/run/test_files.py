"""Files in folders that others may have filled: nothing is followed, nothing is waited for."""

import os
from pathlib import Path

import pytest

from pytest_gpufleet import safe_files


@pytest.mark.parametrize(("make", "told"), [
    (lambda path: path.symlink_to("/etc/hostname"), "it is a link, which is not followed"),
    (lambda path: path.symlink_to("nowhere"), "it is a link, which is not followed"),
    (os.mkfifo, "it is not a regular file"),
    (lambda path: path.mkdir(), "it is not a regular file"),
    (lambda path: path.write_bytes(bytes(101)), "it has 101 bytes, and at most 100 are read"),
    (lambda path: None, "No such file or directory"),
], ids=["link", "dangling link", "FIFO", "folder", "too long", "missing"])  # fmt: skip
def test_only_a_regular_file_is_opened(tmp_path, make, told):
    make(tmp_path / "it")
    with pytest.raises(OSError, match=told) as refused:
        safe_files.open_regular(tmp_path / "it", most_bytes=100)
    assert refused.value.filename == str(tmp_path / "it")


def test_a_regular_file_is_read_as_it_is_and_a_device_is_none(tmp_path):
    (tmp_path / "it").write_bytes(b"12\r\n3")
    with safe_files.open_regular(tmp_path / "it", most_bytes=5) as file:
        assert file.read() == b"12\r\n3"
    with pytest.raises(OSError, match="it is not a regular file"):
        safe_files.open_regular(Path("/dev/zero"))


@pytest.fixture
def victim(tmp_path):
    """A file in another folder, which stays as it is."""
    path = tmp_path / "elsewhere" / "bashrc"
    path.parent.mkdir()
    path.write_text("secret")
    path.chmod(0o600)
    yield path
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("secret", 0o600)
    assert os.listdir(path.parent) == ["bashrc"]


LAID_OUT = {
    "link": lambda path, victim: path.symlink_to(victim),
    "dangling link": lambda path, victim: path.symlink_to(victim.with_name("new")),
    "hard link": lambda path, victim: path.hardlink_to(victim),
    "FIFO": lambda path, victim: os.mkfifo(path),
    "link to a device": lambda path, victim: path.symlink_to("/dev/full"),
}


@pytest.mark.parametrize("what", LAID_OUT)
def test_what_stands_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path, victim, what):
    LAID_OUT[what](tmp_path / "report.html", victim)
    # As versions named it that wrote there before they renamed it.
    LAID_OUT[what](tmp_path / f".gpufleet-{os.getpid()}.tmp", victim)
    before = set(os.listdir(tmp_path))
    safe_files.write_text(tmp_path / "report.html", "new")
    assert not (tmp_path / "report.html").is_symlink()
    assert (tmp_path / "report.html").read_text() == "new"
    assert set(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("what", LAID_OUT)
def test_rows_are_appended_to_nothing_that_others_have_laid_out(tmp_path, victim, what):
    LAID_OUT[what](tmp_path / "rows.csv", victim)
    with pytest.raises(OSError, match=r"it is a link, which is not followed|it is a hard link|No such device"):
        safe_files.append_to(tmp_path / "rows.csv")


def test_rows_are_appended_to_a_file_and_written_to_a_stream(tmp_path):
    for row in ("1\n", "2\n"):
        with safe_files.append_to(tmp_path / "rows.csv") as file:
            file.write(row)
    assert (tmp_path / "rows.csv").read_text() == "1\n2\n"
    safe_files.append_to(Path("/dev/stderr")).close()

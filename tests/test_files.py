"""Files in folders that others may have filled: nothing is followed, nothing is waited for."""

import os
from pathlib import Path

import pytest

from pytest_gpufleet import files


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: path.symlink_to("/etc/hostname"), "it is a link, which is not followed"),
        (lambda path: path.symlink_to("nowhere"), "it is a link, which is not followed"),
        (os.mkfifo, "it is not a regular file"),
        (lambda path: path.mkdir(), "it is not a regular file"),
        (lambda path: path.write_bytes(bytes(101)), "it has 101 bytes, and at most 100 are read"),
        (lambda path: None, "No such file or directory"),
    ],
    ids=["link", "dangling link", "FIFO", "folder", "too long", "missing"],
)
def test_only_a_regular_file_is_opened(tmp_path, make, told):
    make(tmp_path / "it")
    with pytest.raises(OSError, match=told) as refused:
        files.open_regular(tmp_path / "it", most_bytes=100)
    assert refused.value.filename == str(tmp_path / "it")


def test_devices_are_not_regular_files():
    with pytest.raises(OSError, match="it is not a regular file"):
        files.open_regular(Path("/dev/zero"))


def test_a_regular_file_is_read_as_it_is(tmp_path):
    (tmp_path / "it").write_bytes(b"12\r\n3")
    with files.open_regular(tmp_path / "it", most_bytes=5) as file:
        assert file.read() == b"12\r\n3"

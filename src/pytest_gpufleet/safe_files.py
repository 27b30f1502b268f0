"""Files opened and written so that nothing else in their place is followed or harmed."""

import errno
import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO, TextIO

# Of /dev/stdout and of what a shell makes of >(...): links by design, in folders that only root can change.
STREAMS = tuple(map(Path, ("/dev", "/dev/fd", "/proc/self/fd")))


def open_regular(path: Path, most_bytes: int | None = None) -> BinaryIO:
    """Open a regular file for reading: no link is followed, and nothing waits for the other end of a FIFO. OSError,
    with the reason in words, if it is anything else or longer than `most_bytes`."""
    descriptor, found = _opened(path, os.O_RDONLY)
    if most_bytes is not None and found.st_size > most_bytes:
        os.close(descriptor)
        raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes, and at most {most_bytes:,} are read", str(path))
    return os.fdopen(descriptor, "rb")


def sha256(path: Path) -> str:
    """SHA-256 of a file in hexadecimal, as `sha256sum` prints it. OSError if it cannot be read."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _opened(path: Path, flags: int) -> tuple[int, os.stat_result]:
    """The descriptor of a regular file, and what the system says of it."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is not followed", str(path)) from None
        raise
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode):
        return descriptor, found
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def write_text(path: Path, text: str) -> None:
    """Write a file, which is there as a whole or as it was before. A link in its place is replaced, and what it leads
    to stays: others may have put it there. OSError if that cannot be done."""
    if path.parent in STREAMS:
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(f".gpufleet-{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o666), "wb") as file:
        try:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def append_to(path: Path) -> TextIO:
    """A file to add to, made if it is not there. OSError for a link or a second name: others may have put it there."""
    if path.parent in STREAMS:
        return path.open("a", newline="", encoding="utf-8")
    descriptor, found = _opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    if found.st_nlink != 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a hard link to something else", str(path))
    return os.fdopen(descriptor, "a", newline="", encoding="utf-8")

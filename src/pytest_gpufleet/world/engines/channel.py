"""Parcels between the controller and one rank, over a socket pair that has no name.

A message is a header, which is a mark and a length, and a body: the parcel itself, or the name of the file that a large
one lies in. The rank's end blocks. The controller's end never does, whatever the rank sends or does not read.
"""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from pathlib import Path

from pytest_gpufleet.world.engines.unblocked import Garbled, UnblockedEnd

PARCEL, FILE = b"gpuf", b"gpuF"
HEADER = struct.Struct("!4sI")
# Above this a parcel travels as a file: a socket holds a small message even when nobody reads it, so that neither side
# has to wait for a peer that hangs.
INLINE_BYTES = 8 * 1024


def message(parcel: bytes) -> bytes:
    return HEADER.pack(PARCEL, len(parcel)) + parcel


def message_of_file(path: Path) -> bytes:
    name = os.fsencode(path)
    return HEADER.pack(FILE, len(name)) + name


def in_file(parcel: bytes, folder: Path) -> Path:
    descriptor, name = tempfile.mkstemp(dir=folder, suffix=".parcel")
    with os.fdopen(descriptor, "wb") as file:
        file.write(parcel)
    return Path(name)


class RankEnd:
    """The rank's end: both ways block. Large parcels go to files in `folder`."""

    def __init__(self, end: socket.socket, folder: Path) -> None:
        self._end = end
        self._folder = folder

    def send(self, parcel: bytes) -> None:
        large = len(parcel) > INLINE_BYTES
        self._end.sendall(message_of_file(in_file(parcel, self._folder)) if large else message(parcel))

    def receive(self) -> bytes:
        """The next parcel of the controller. EOFError if it has closed its end."""
        mark, length = HEADER.unpack(self._exactly(HEADER.size))
        body = bytes(self._exactly(length))
        return body if mark == PARCEL else Path(os.fsdecode(body)).read_bytes()

    def _exactly(self, count: int) -> bytearray:
        received = bytearray(count)
        view = memoryview(received)
        while view:
            if not (got := self._end.recv_into(view)):
                raise EOFError
            view = view[got:]
        return received


class ControllerEnd(UnblockedEnd):
    """The controller's end: nothing here waits for the rank, whose large parcels lie in `folder`."""

    def __init__(self, end: socket.socket, folder: Path) -> None:
        super().__init__(end, HEADER, (PARCEL, FILE), INLINE_BYTES)
        self._folder = folder

    def _message(self, mark: bytes, body: bytes) -> bytes:
        return body if mark == PARCEL else self._taken(Path(os.fsdecode(body)))

    def _taken(self, path: Path) -> bytes:
        """The parcel in a file, which is removed."""
        try:
            if path.parent != self._folder:
                raise Garbled("it sent a parcel from elsewhere")
            parcel = path.read_bytes()
            path.unlink()
        except (OSError, ValueError):  # a name with a null byte is a ValueError
            raise Garbled("it sent a parcel that cannot be read") from None
        return parcel

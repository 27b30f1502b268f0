"""Parcels between the controller and one rank, over a socket pair that has no name.

A message is a header, which is a mark and a length, and a body: the parcel itself, or the name of the file that a large
one lies in. The rank's end blocks. The controller's end never does, whatever the rank sends or does not read.
"""

import os
import socket
import struct
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

READ_BYTES = 1 << 18
READS = 16  # at a time: more than a socket buffers, and a peer that never stops sending keeps nobody here


class Garbled(Exception):
    """What came is no message."""


class UnblockedEnd:
    """What is sent waits here until the peer reads, and what came until it is a whole message.

    `end` stops to block, and belongs to this object. `header`: a mark, which is one of `marks`, and a length, which is
    `most_bytes` at most: what claims to be longer is no message, and no memory is reserved for it.
    """

    def __init__(self, end: socket.socket, header: struct.Struct, marks: Collection[bytes], most_bytes: int) -> None:
        end.setblocking(False)
        self._end = end
        self._header, self._marks, self._most_bytes = header, marks, most_bytes
        self._unsent = bytearray()
        self._received = bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()

    @property
    def has_unsent(self) -> bool:
        """Whether the peer has yet to read something before the rest can be sent: call `flush` when it is writable."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Whatever becomes of the peer, nothing is raised: that it is gone shows in `receive`."""
        self._unsent += message
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                sent = self._end.send(memoryview(self._unsent)[:READ_BYTES])
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:  # the peer is gone, or this end is closed
            self._unsent.clear()

    def receive(self) -> list[bytes]:
        """The messages that are complete by now; what has come of the next one is kept.

        EOFError once the peer has closed its end and all is read. Garbled if what came is no message.
        """
        messages: list[bytes] = []
        for _ in range(READS):
            try:
                chunk = self._end.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError:  # a connection that was reset
                chunk = b""
            if not chunk:
                if messages:
                    break  # its end shows the next time
                raise EOFError
            self._received += chunk
            messages += self._complete()
        return messages

    def _complete(self) -> Iterator[bytes]:
        """The messages that are there."""
        while len(self._received) >= self._header.size:
            mark, length = self._header.unpack_from(self._received)
            if mark not in self._marks or length > self._most_bytes:
                raise Garbled("it sent what is no message")
            end = self._header.size + length
            if len(self._received) < end:
                break
            with memoryview(self._received) as view:
                body = bytes(view[self._header.size : end])
            del self._received[:end]
            yield self._message(mark, body)

    def _message(self, mark: bytes, body: bytes) -> bytes:
        return body


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


def message_or_file(parcel: bytes, folder: Path) -> tuple[bytes, Path | None]:
    """The message of a parcel, and the file in `folder` that a large one lies in."""
    if len(parcel) <= INLINE_BYTES:
        return message(parcel), None
    descriptor, name = tempfile.mkstemp(dir=folder, suffix=".parcel")
    with os.fdopen(descriptor, "wb") as file:
        file.write(parcel)
    return message_of_file(Path(name)), Path(name)


class RankEnd:
    """The rank's end: both ways block. Large parcels go to files in `folder`."""

    def __init__(self, end: socket.socket, folder: Path) -> None:
        self._end = end
        self._folder = folder

    def send(self, parcel: bytes) -> None:
        self._end.sendall(message_or_file(parcel, self._folder)[0])

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
        """The parcel; the file that one lies in is removed."""
        if mark == PARCEL:
            return body
        path = Path(os.fsdecode(body))
        try:
            if path.parent != self._folder:
                raise Garbled("it sent a parcel from elsewhere")
            parcel = path.read_bytes()
            path.unlink()
        except (OSError, ValueError):  # a name with a null byte is a ValueError
            raise Garbled("it sent a parcel that cannot be read") from None
        return parcel

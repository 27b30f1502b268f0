"""Whole messages over a stream socket, of which neither side ever waits for the other.

A frame is a mark, the length of the message in 8 bytes, and the message.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

MARK = b"gpfl"
HEADER = struct.Struct("!4sQ")
MOST_BYTES = 4 << 30  # of a message: what claims to be longer is none, and no memory is reserved for it
READ_BYTES = 1 << 20
READS = 16  # at a time: a peer that never stops sending keeps nobody here


class Garbled(Exception):
    """What came is no frame."""


class Frames:
    """One end of a connection. `end` stops to block, and belongs to this object."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
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
        self._unsent += HEADER.pack(MARK, len(message))
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

        EOFError once the peer has closed its end and all is read. Garbled if what came is no frame.
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
                    break  # its end is told the next time
                raise EOFError
            self._received += chunk
            messages += self._complete()
        return messages

    def _complete(self) -> Iterator[bytes]:
        while len(self._received) >= HEADER.size:
            mark, length = HEADER.unpack_from(self._received)
            if mark != MARK or length > MOST_BYTES:
                raise Garbled("what came is no message of a node")
            end = HEADER.size + length
            if len(self._received) < end:
                break
            with memoryview(self._received) as view:
                message = bytes(view[HEADER.size : end])
            del self._received[:end]
            yield message

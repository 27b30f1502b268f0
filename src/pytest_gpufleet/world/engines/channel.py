"""Messages between the controller and one rank, over a socket pair that has no name.

A message is a header, which is a mark and a length, and a pickle. The rank's end blocks. The controller's end never
does, whatever the rank sends or does not read.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator
from typing import Any

MARK = b"gpuf"
HEADER = struct.Struct("!4sI")
# A message of a rank holds some text at most: values that may be large travel as files (see shipping.py).
MOST_BYTES = 1 << 20
READ_BYTES = 1 << 18
READS = 16  # at a time: more than a socket buffers, and a rank that never stops sending keeps nobody here


class Garbled(Exception):
    """What a rank sent is no message."""


def encode(content: Any) -> bytes:
    body = pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(MARK, len(body)) + body


class RankEnd:
    """The rank's end: both ways block."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, content: Any) -> None:
        self._end.sendall(encode(content))

    def receive(self) -> Any:
        """The next message of the controller. EOFError if it has closed its end."""
        _, length = HEADER.unpack(self._exactly(HEADER.size))
        return pickle.loads(self._exactly(length))

    def _exactly(self, count: int) -> bytearray:
        received = bytearray(count)
        view = memoryview(received)
        while view:
            if not (got := self._end.recv_into(view)):
                raise EOFError
            view = view[got:]
        return received


class ControllerEnd:
    """The controller's end: nothing here waits for the rank."""

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
        """Whether the rank has yet to read something before the rest can be sent: call `flush` when it is writable."""
        return bool(self._unsent)

    def send(self, content: Any) -> None:
        self._unsent += encode(content)
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._end.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the rank is gone, which shows when it is read
            self._unsent.clear()

    def receive(self) -> list[Any]:
        """The messages that are complete by now. What has come of the next one is kept.

        EOFError once the rank has closed its end and all is read. Garbled if what came is no message.
        """
        messages: list[Any] = []
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

    def _complete(self) -> Iterator[Any]:
        while len(self._received) >= HEADER.size:
            mark, length = HEADER.unpack_from(self._received)
            if mark != MARK or length > MOST_BYTES:
                raise Garbled("it sent what is no message")
            end = HEADER.size + length
            if len(self._received) < end:
                break
            body = bytes(self._received[HEADER.size : end])
            del self._received[:end]
            yield _unpickled(body)


def _unpickled(body: bytes) -> Any:
    # A pickle runs code. This one comes from a process that we have started ourselves, as the same user, through a
    # socket pair that nobody else can open. Nothing else in this project's controller is unpickled.
    try:
        return pickle.loads(body)
    except (Exception, SystemExit) as error:
        raise Garbled(f"it sent a message that cannot be unpickled ({type(error).__name__})") from None

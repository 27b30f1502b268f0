"""Parcels between the controller and one rank, over a pair of SOCK_SEQPACKET sockets that have no name.

A message is one packet: a mark and a body, which is the parcel itself, or the name of the file that a large one lies
in. The rank's end blocks. The controller's end never does, whatever the rank sends or does not read.
"""

import os
import socket
import tempfile
from collections import deque
from pathlib import Path

READS = 16  # at a time: more than a socket holds, and a peer that never stops sending keeps nobody here
PARCEL, FILE = b"p", b"f"
# Above this a parcel travels as a file: a socket holds a small message even when nobody reads it, so that neither side
# has to wait for a peer that hangs.
INLINE_BYTES = 32 * 1024


class Garbled(Exception):
    """What came is no message."""


def message_or_file(parcel: bytes, folder: Path) -> tuple[bytes, Path | None]:
    """The message of a parcel, and the file in `folder` that a large one lies in."""
    if len(parcel) <= INLINE_BYTES:
        return PARCEL + parcel, None
    descriptor, name = tempfile.mkstemp(dir=folder, suffix=".parcel")
    with os.fdopen(descriptor, "wb") as file:
        file.write(parcel)
    return FILE + os.fsencode(name), Path(name)


class RankEnd:
    """The rank's end: both ways block. Large parcels go to files in `folder`."""

    def __init__(self, end: socket.socket, folder: Path) -> None:
        self._end = end
        self._folder = folder

    def send(self, parcel: bytes) -> None:
        self._end.sendall(message_or_file(parcel, self._folder)[0])

    def receive(self) -> bytes:
        """The next parcel of the controller. EOFError if it has closed its end."""
        if not (message := self._end.recv(INLINE_BYTES + 1)):
            raise EOFError
        return message[1:] if message.startswith(PARCEL) else Path(os.fsdecode(message[1:])).read_bytes()


class ControllerEnd:
    """The controller's end, `end`, which stops to block: what is sent waits here until the rank reads. The rank's large
    parcels lie in `folder`."""

    def __init__(self, end: socket.socket, folder: Path) -> None:
        end.setblocking(False)
        self._end = end
        self._folder = folder
        self._unsent: deque[bytes] = deque()

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()

    @property
    def has_unsent(self) -> bool:
        """Whether the rank has yet to read something before the rest can be sent: call `flush` when it is writable."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Whatever becomes of the rank, nothing is raised: that it is gone shows in `receive`."""
        self._unsent.append(message)
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                self._end.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:  # the rank is gone, or this end is closed
            self._unsent.clear()

    def receive(self) -> list[bytes]:
        """The parcels that have come. EOFError once the rank has closed its end and all is read. Garbled if what came
        is no message."""
        parcels: list[bytes] = []
        for _ in range(READS):
            try:
                message = self._end.recv(INLINE_BYTES + 2)  # one more than any: a longer one shows by it
            except BlockingIOError:
                break
            except ConnectionResetError:  # said once, before what the rank sent while it still was there
                continue
            if message:
                parcels.append(self._parcel(message))
            elif parcels:
                break  # its end shows the next time
            else:
                raise EOFError
        return parcels

    def _parcel(self, message: bytes) -> bytes:
        """What lies in a file is removed."""
        if message[:1] not in (PARCEL, FILE) or len(message) > 1 + INLINE_BYTES:
            raise Garbled("it sent what is no message")
        if message.startswith(PARCEL):
            return message[1:]
        path = Path(os.fsdecode(message[1:]))
        try:
            if path.parent != self._folder:
                raise Garbled("it sent a parcel from elsewhere")
            parcel = path.read_bytes()
            path.unlink()
        except (OSError, ValueError):  # a name with a null byte is a ValueError
            raise Garbled("it sent a parcel that cannot be read") from None
        return parcel

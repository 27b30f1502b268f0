"""Parcels between the controller and one rank, over a pair of SOCK_SEQPACKET sockets that have no name.

A message is one packet: a mark, and the parcel or, of a large one, the descriptor of the memory that it lies in. The
rank's end blocks. The controller's end never does, whatever the rank sends or does not read.
"""

import os
import socket
import stat
from collections import deque
from pathlib import Path

READS = 16  # at a time: more than a socket holds, and a peer that never stops sending keeps nobody here
PARCEL, MEMORY = b"p", b"m"
# A larger parcel travels as memory: a socket holds a small message even when nobody reads it, so that neither side has
# to wait for a peer that hangs.
INLINE_BYTES = 32 * 1024


class Garbled(Exception):
    """What came is no message."""


class Message:
    """A parcel as it is sent, to one rank or several. The memory of a large one lasts until all have read it."""

    def __init__(self, parcel: bytes) -> None:
        self.text, self.descriptors = PARCEL + parcel, list[int]()
        if len(parcel) > INLINE_BYTES:
            self.text, self.descriptors = MEMORY, [os.memfd_create("gpufleet-parcel")]
            with open(self.descriptors[0], "wb", closefd=False) as file:
                file.write(parcel)

    def __del__(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def send(end: socket.socket, parcel: bytes) -> None:
    """On a rank."""
    message = Message(parcel)
    socket.send_fds(end, [message.text], message.descriptors)


def receive(end: socket.socket) -> bytes:
    """On a rank, the next parcel of the controller. EOFError if it has closed its end."""
    text, descriptors, *_ = socket.recv_fds(end, INLINE_BYTES + 1, 1)
    if not text:
        raise EOFError
    return _parcel(text, descriptors)


def _parcel(text: bytes, descriptors: list[int]) -> bytes:
    try:
        if text.startswith(PARCEL) and len(text) <= 1 + INLINE_BYTES:
            return text[1:]
        if text != MEMORY or not descriptors or not stat.S_ISREG(os.fstat(descriptors[0]).st_mode):
            raise Garbled("it sent what is no message")
        return Path(f"/proc/self/fd/{descriptors[0]}").read_bytes()  # from its beginning, whoever else reads it
    except OSError as error:
        raise Garbled(f"it sent a parcel that cannot be read: {error}") from None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class ControllerEnd:
    """The controller's end, `end`, which stops to block: what is sent waits here until the rank reads."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._unsent: deque[Message] = deque()

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()

    @property
    def has_unsent(self) -> bool:
        """Whether the rank has yet to read something before the rest can be sent: call `flush` when it is writable."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Whatever becomes of the rank, nothing is raised: that it is gone shows in `receive`."""
        self._unsent.append(message)
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                socket.send_fds(self._end, [self._unsent[0].text], self._unsent[0].descriptors)
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
                text, descriptors, *_ = socket.recv_fds(self._end, INLINE_BYTES + 2, 1)  # a longer one shows by a byte
            except BlockingIOError:
                break
            except ConnectionResetError:  # said once, before what the rank sent while it still was there
                continue
            if text:
                parcels.append(_parcel(text, descriptors))
            elif parcels:
                break  # its end shows the next time
            else:
                raise EOFError
        return parcels

"""Parcels between the controller and one rank, over a pair of SOCK_SEQPACKET sockets that have no name.

A message is one packet: a mark, and the parcel or, of a large one, the descriptor of the memory that it lies in. The
rank's end blocks. The controller's end never does, whatever the rank sends or does not read: nothing more is sent to a
rank that has not answered, and what it is sent until then its socket holds."""

import os
import socket
import stat
from contextlib import suppress
from errno import EMFILE
from pathlib import Path

PARCEL, MEMORY = b"p", b"m"
INLINE_BYTES = 32 * 1024  # a larger parcel travels as memory: a socket has to hold a few that nobody reads


class Garbled(Exception):
    """What came is no message."""


class Message:
    """A parcel as it is sent, to one rank or several. The memory of a large one lasts until all have read it."""

    def __init__(self, parcel: bytes) -> None:
        self._text, self._descriptors = PARCEL + parcel, list[int]()
        if len(parcel) > INLINE_BYTES:
            self._text, self._descriptors = MEMORY, [os.memfd_create("gpufleet-parcel")]
            with open(self._descriptors[0], "wb", closefd=False) as file:
                file.write(parcel)

    def __del__(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def send(self, end: socket.socket) -> None:
        socket.send_fds(end, [self._text], self._descriptors)


def receive(end: socket.socket) -> bytes:
    """On a rank, the next parcel of the controller. EOFError if it has closed its end."""
    text, descriptors, flags, _ = socket.recv_fds(end, INLINE_BYTES + 1, 1)
    if not text:
        raise EOFError
    return _parcel(text, descriptors, flags)


def offer(end: socket.socket, message: Message) -> None:
    """In the controller. That a rank is gone shows in `received`; one that reads nothing misses its deadline."""
    with suppress(OSError):
        message.send(end)


def received(end: socket.socket) -> list[bytes]:
    """In the controller, what has come. EOFError once the rank's end is closed and all is read, or Garbled."""
    parcels: list[bytes] = []
    for _ in range(16):  # more than a socket holds, and a peer that never stops sending keeps nobody here
        try:
            text, descriptors, flags, _ = socket.recv_fds(end, INLINE_BYTES + 2, 1)  # a longer one shows by a byte
        except BlockingIOError:
            break
        except ConnectionResetError:  # said once, before what the rank sent while it still was there
            continue
        if text:
            parcels.append(_parcel(text, descriptors, flags))
        elif parcels:
            break  # its end shows the next time
        else:
            raise EOFError
    return parcels


def _parcel(text: bytes, descriptors: list[int], flags: int) -> bytes:
    """OSError if this process has no file descriptor left, for which nobody else is to blame."""
    try:
        if not descriptors and flags & socket.MSG_CTRUNC:
            raise OSError(EMFILE, os.strerror(EMFILE))
        if text.startswith(PARCEL) and len(text) <= 1 + INLINE_BYTES:
            return text[1:]
        if text != MEMORY or not descriptors or not stat.S_ISREG(os.fstat(descriptors[0]).st_mode):
            raise Garbled("it sent what is no message")
        return Path(f"/proc/self/fd/{descriptors[0]}").read_bytes()  # from its beginning, whoever else reads it
    except OSError as error:
        if error.errno == EMFILE:
            raise
        raise Garbled(f"it sent a parcel that cannot be read: {error}") from None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)

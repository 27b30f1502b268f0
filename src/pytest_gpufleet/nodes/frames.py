"""Whole messages over a stream socket, of which neither side ever waits for the other.

A frame is a mark, the length of the message in 8 bytes, and the message.
"""

from __future__ import annotations

import socket
import struct

from pytest_gpufleet.world.engines.unblocked import UnblockedEnd

MARK = b"gpfl"
HEADER = struct.Struct("!4sQ")
MOST_BYTES = 4 << 30  # of a message


class Frames(UnblockedEnd):
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end, HEADER, (MARK,), MOST_BYTES)

    def send(self, message: bytes) -> None:
        self._unsent += HEADER.pack(MARK, len(message))  # by itself: a message may be large, and is copied once
        super().send(message)

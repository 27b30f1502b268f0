"""Messages between the head of a run and the agents of its nodes, over ZeroMQ: each once and in its order, readable by
nobody without the secret of the run.

The head listens on one TCP port (ROUTER), agents dial in (DEALER). CURVE encrypts and authenticates both sides, with
keys that are made of the secret. ZeroMQ connects again by itself and may lose what was on its way then; so messages are
numbered from 0 in either direction, and what was not confirmed is sent once more when a connection is new.
"""

import hashlib
import ipaddress
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq
import zmq.utils.monitor
from zmq.utils import z85

from pytest_gpufleet.model.endings import Refused

# What was on its way when a cable was pulled is sent again within seconds of its return: a connection that is silent
# for 4 s is given up and made anew (libzmq: ZMQ_HEARTBEAT_IVL, ZMQ_CONNECT_TIMEOUT; all in ms).
OPTIONS = {
    zmq.IPV6: 1,
    zmq.LINGER: 0,
    zmq.SNDHWM: 0,  # nothing is dropped: what is not confirmed is kept here anyway
    zmq.RCVHWM: 0,
    zmq.HEARTBEAT_IVL: 1000,
    zmq.HEARTBEAT_TIMEOUT: 4000,
    zmq.CONNECT_TIMEOUT: 2000,
    zmq.RECONNECT_IVL: 200,
    zmq.RECONNECT_IVL_MAX: 1000,
}
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
)  # fmt: skip
HEADER = struct.Struct("!QQ")  # the number of this message, and how many of the other side's have come
AGAIN = (1 << 64) - 1  # instead of a number: the connection is new, send what was not confirmed

SECRET = "GPUFLEET_SECRET"
LEAST_BYTES = KEY_BYTES = 32
HOW_TO = (
    f"nodes on several hosts need a secret that all of them have: `openssl rand -hex 32 > FILE`, then "
    f"--fleet-secret-file FILE on every node, or its content in the variable {SECRET}"
)


def secret(file: Path | None, needed: bool = True) -> bytes:
    """What keys are made of: 32 bytes of what this file has, or the variable, which no process that is started from
    here on has. b"" if it is not needed. Refused if it is not there, or is short enough to be guessed."""
    found, where = os.environ.pop(SECRET, "").encode(), SECRET
    if file is not None:
        where = f"--fleet-secret-file {file}"
        try:
            found = file.read_bytes()
        except OSError as error:
            raise Refused(f"{where} cannot be read: {error.strerror}") from None
    found = found.strip()
    if not (found or file or needed):
        return b""
    if len(found) < LEAST_BYTES:
        short = f"{where} has {len(found)} bytes, and a secret needs at least {LEAST_BYTES}; " if found or file else ""
        raise Refused(f"{short}{HOW_TO}")
    return hashlib.blake2b(found, digest_size=KEY_BYTES).digest()


def keys(secret: bytes, role: str, run: str = "") -> tuple[bytes, bytes]:
    """The public and the secret key of "head" or "node", as ZeroMQ takes them. `run`: what a launcher calls this run;
    nodes of another one with the same secret are turned away."""
    own = hashlib.blake2b(f"{role} {run}".encode(), key=secret, digest_size=KEY_BYTES).digest()
    key = z85.encode(own)
    return zmq.curve_public(key), key


class Line:
    """Both directions between the head and one agent. `put` sends a frame, now or when there is a connection."""

    def __init__(self, put: Callable[[bytes], object]) -> None:
        self._put = put
        self._unconfirmed: deque[bytes] = deque()
        self._first = 0  # the number of the first of these
        self._heard = 0  # so many of the other side's have come

    def send(self, message: bytes) -> None:
        self._unconfirmed.append(message)
        self._frame(self._first + len(self._unconfirmed) - 1, message)

    def connected_again(self) -> None:
        """Send what may have been lost, and have the other side do the same."""
        self._frame(AGAIN)
        self._send_again()

    def take(self, frame: bytes) -> bytes | None:
        """The message of a frame that has come; None if it came before, or comes too early and will come again."""
        if len(frame) < HEADER.size:
            return None
        number, confirmed = HEADER.unpack_from(frame)
        while self._first < confirmed and self._unconfirmed:
            self._unconfirmed.popleft()
            self._first += 1
        if number == AGAIN:
            self._send_again()
        if number != self._heard:
            return None
        self._heard += 1
        return frame[HEADER.size :]

    def _send_again(self) -> None:
        for number, message in enumerate(self._unconfirmed, self._first):
            self._frame(number, message)

    def _frame(self, number: int, message: bytes = b"") -> None:
        self._put(HEADER.pack(number, self._heard) + message)


def plain(address: str) -> str:
    """Without what makes an IPv4 address one of IPv6."""
    mapped = getattr(ipaddress.ip_address(address), "ipv4_mapped", None)
    return str(mapped or address)


def peers(port: int) -> Iterator[str]:
    """The other ends of TCP connections that this host has closed at this port, for a minute: of those with another
    secret libzmq says only that a handshake has failed (proc(5): /proc/net/tcp)."""
    for table in filter(Path.exists, (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))):  # IPv6 may be off
        for line in table.read_text().splitlines()[1:]:
            _, own, other, state, *_ = line.split()
            if int(own.rpartition(":")[2], 16) == port and state == "06":  # TCP_TIME_WAIT
                words = bytes.fromhex(other.partition(":")[0])
                packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                yield plain(str(ipaddress.ip_address(packed)))


class Dialled:
    """An agent's end: a connection to the head, which is made again whenever it breaks."""

    def __init__(self, secret: bytes, run: str, head: str) -> None:
        """`head`: "HOST:PORT"."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in OPTIONS.items():
            self._socket.set(option, value)
        self._socket.routing_id = os.urandom(16)
        self._socket.curve_serverkey = keys(secret, "head", run)[0]
        self._socket.curve_publickey, self._socket.curve_secretkey = keys(secret, "node", run)
        self._monitor = self._socket.get_monitor_socket()
        self.line = Line(self._socket.send)
        self.was_connected = self.was_refused = False
        self._socket.connect(f"tcp://{head}")

    def filenos(self) -> tuple[int, int]:
        """Readable when something may have happened since the last look (libzmq: ZMQ_FD)."""
        return self._socket.fileno(), self._monitor.fileno()

    @property
    def has_news(self) -> bool:
        """Whether there is something to take in at once: filenos() show only what is new."""
        return bool(self._socket.poll(0) or self._monitor.poll(0))

    def receive(self) -> list[bytes]:
        """The messages that have come by now."""
        while self._monitor.poll(0):
            event = zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
            self.was_connected = self.was_connected or event == zmq.EVENT_CONNECTED
            self.was_refused = self.was_refused or event in REFUSED
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.line.connected_again()
        messages = []
        while self._socket.poll(0):
            if (message := self.line.take(self._socket.recv())) is not None:
                messages.append(message)
        return messages

    def close(self, linger: float = 0.0) -> None:
        self._context.destroy(linger=int(linger * 1000))

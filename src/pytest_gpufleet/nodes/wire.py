"""Messages between the head of a run and the agents of its nodes, over ZeroMQ: each once and in its order, readable by
nobody without the secret of the run.

The head listens on one TCP port (ROUTER), agents dial in (DEALER). CURVE encrypts and authenticates both sides, with
keys that are made of the secret. ZeroMQ connects again by itself and may lose what was on its way then; so messages are
numbered from 0 in either direction, and what was not confirmed is sent once more when a connection is new."""

import hashlib
import ipaddress
import os
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.utils.monitor
from zmq.utils import z85

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.nodes.launchers import OwnAgents
from pytest_gpufleet.nodes.messages import BEAT, BEAT_SECONDS, OVER, DialIn, End
from pytest_gpufleet.verdict.fleet.host_runs import expected_as, natural

# What was on its way when a cable was pulled is sent again within seconds of its return: a connection that is silent
# for 4 s is given up and made anew (libzmq: ZMQ_HEARTBEAT_IVL, ZMQ_CONNECT_TIMEOUT; all in ms).
OPTIONS = {
    zmq.IPV6: 1, zmq.LINGER: 0, zmq.HEARTBEAT_IVL: 1000, zmq.HEARTBEAT_TIMEOUT: 4000, zmq.CONNECT_TIMEOUT: 2000,
    zmq.RECONNECT_IVL: 200, zmq.RECONNECT_IVL_MAX: 1000,
    zmq.SNDHWM: 0, zmq.RCVHWM: 0,  # nothing is dropped: what is not confirmed is kept here anyway
}  # fmt: skip
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
)  # fmt: skip
HEADER = struct.Struct("!QQ")  # the number of this message, and how many of the other side's have come
AGAIN = (1 << 64) - 1  # instead of a number: the connection is new, send what was not confirmed

SECRET = "GPUFLEET_SECRET"
LEAST_BYTES = KEY_BYTES = 32


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
        raise Refused(
            f"{short}nodes on several hosts need a secret that all of them have: `openssl rand -hex 32 > FILE`, "
            f"then --fleet-secret-file FILE on every node, or its content in the variable {SECRET}"
        )
    return hashlib.blake2b(found, digest_size=KEY_BYTES).digest()


def keys(secret: bytes, role: str, run: str = "") -> tuple[bytes, bytes]:
    """The public and the secret key of "head" or "node" for ZeroMQ: others for each `run`, as a launcher calls it."""
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


class Dialled:
    """An agent's end: a connection to the head ("HOST:PORT"), which is made again whenever it breaks."""

    def __init__(self, secret: bytes, run: str, head: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in OPTIONS.items():
            self._socket.set(option, value)
        self._socket.routing_id = os.urandom(16)
        self._socket.curve_serverkey = keys(secret, "head", run)[0]
        self._socket.curve_publickey, self._socket.curve_secretkey = keys(secret, "node", run)
        self._monitor = self._socket.get_monitor_socket()
        self.line = Line(self._socket.send)
        self.connected_at: float | None = None  # first, on time.monotonic()
        self.was_refused = False
        self._socket.connect(f"tcp://{head}")

    def filenos(self) -> tuple[int, int]:
        """Readable when something may have happened since the last look (libzmq: ZMQ_FD)."""
        return self._socket.fileno(), self._monitor.fileno()

    @property
    def has_news(self) -> bool:
        """Whether there is something to take in at once: filenos() show only what is new."""
        return bool(self._socket.poll(0) or self._monitor.poll(0))

    def receive(self) -> list[bytes]:
        while self._monitor.poll(0):
            event = zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_CONNECTED:
                self.connected_at = self.connected_at or time.monotonic()
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


def _plain(address: str) -> str:
    """Without what makes an IPv4 address one of IPv6."""
    return str(getattr(ipaddress.ip_address(address), "ipv4_mapped", None) or address)


def _peers(port: int) -> Iterator[str]:
    """The other ends of TCP connections that this host has closed at this port, for a minute: of those with another
    secret libzmq says only that a handshake has failed (proc(5): /proc/net/tcp)."""
    for table in filter(Path.exists, (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))):  # IPv6 may be off
        for line in table.read_text().splitlines()[1:]:
            _, own, other, state, *_ = line.split()
            if int(own.rpartition(":")[2], 16) == port and state == "06":  # TCP_TIME_WAIT
                words = bytes.fromhex(other.partition(":")[0])
                packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                yield _plain(str(ipaddress.ip_address(packed)))


# A message of a node (FromAgent, packed), or how its agent ended, as it goes on where "node 3 is lost" ends.
Event = tuple[int, bytes | str]


@dataclass
class _Agent:
    """One that was started: who it is; `line` and `address` if it has dialled in; `node` once it has a number."""

    who: DialIn
    line: Line | None = None
    address: str = ""
    node: int = -1


@dataclass
class Transport:
    """Carries messages; presence and deadlines are the controller's. Any thread may send, one receives."""

    starter: OwnAgents
    wanted: int | None = None  # so many nodes are waited for, for `seconds`; None: as many as `starter` starts
    seconds: float = 120.0
    expected: Sequence[str] = ()  # names of hosts, in the order in which nodes without an index are numbered
    address: str = "127.0.0.1"  # "*" for all of this host
    port: int = 0  # 0 for any
    run: str = ""  # what a launcher calls this run
    only_expected: bool = False  # others end at once, and well
    missing: tuple[str, ...] = ()  # who was waited for in vain, as far as anybody knows their names
    strangers: tuple[str, ...] = ()  # addresses of those with another secret
    dialled: dict[int, DialIn] = field(default_factory=dict)  # the first message of each node
    _agents: dict[bytes, _Agent] = field(default_factory=dict)  # that have dialled in, as ZeroMQ knows them
    _nodes: list[_Agent] = field(default_factory=list)  # by their number, once all are there
    _early: list[tuple[_Agent, bytes]] = field(default_factory=list)  # what came before that
    _unsent: deque[tuple[int, bytes]] = field(default_factory=deque)
    _bell: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    _context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    _poller: zmq.Poller = field(default_factory=zmq.Poller)

    def start(self) -> Mapping[int, str]:
        """Have agents started, and wait for them. The names of the nodes by number. Refused if the port is not free."""
        self._listen()
        started = self.starter.start(self.port)
        wanted, until = self.wanted or len(started), time.monotonic() + self.seconds
        while time.monotonic() < until:
            indexes = {agent.who.index for agent in self._agents.values()}
            if len(self._agents) + len(self.starter.ended().keys() & {*self.starter.own} - indexes) >= wanted:
                break
            self._poller.poll(int(1000 * BEAT_SECONDS))
            self._early += self._take_in()
            for agent in self._agents.values():
                if agent.line:
                    agent.line.send(BEAT)
        names = self._number(started)
        if len(self._agents) < wanted:
            there = self._agents.values()
            known = {expected_as(agent.who.name, self.expected) for agent in there}
            tasks = {None if agent.who.index is None else f"task {agent.who.index}" for agent in there}
            of_launcher = [] if self.expected or None in tasks else [f"task {index}" for index in range(wanted)]
            self.missing = tuple(name for name in (*self.expected, *of_launcher) if name not in known | tasks)
            self.strangers = tuple(sorted({*_peers(self.port)} - {agent.address for agent in there}))
        return names

    def _listen(self) -> None:
        self._nodes_key = z85.decode(keys(self.starter.secret, "node", self.run)[0])
        self._gate = self._context.socket(zmq.REP)
        self._gate.bind("inproc://zeromq.zap.01")  # where libzmq asks who may come in (RFC 27)
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in OPTIONS.items():
            self._socket.set(option, value)
        self._socket.router_handover = 1  # an agent that connects again is the same one
        self._socket.curve_server = 1
        self._socket.curve_publickey, self._socket.curve_secretkey = keys(self.starter.secret, "head", self.run)
        try:
            self._socket.bind(f"tcp://{self.address}:{self.port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise Refused(
                f"port {self.port} of this host is not free ({error.strerror}): --fleet-head HOST:PORT names another"
            ) from None
        self.port = int(self._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        for each in (self._gate, self._socket, self._bell):
            self._poller.register(each, zmq.POLLIN)

    def _number(self, started: Mapping[int, str]) -> dict[int, str]:
        """By index, as they are expected, or by name; their names, with what tells hosts of one name apart."""
        there = {agent.who.index for agent in self._agents.values()}
        agents = [*self._agents.values()]
        agents += [_Agent(DialIn(name, index)) for index, name in started.items() if index not in there]
        place = {name: number for number, name in enumerate(self.expected)}

        def key(agent: _Agent) -> tuple[object, ...]:
            who = agent.who
            known = place.get(expected_as(who.name, self.expected) or "", len(place))
            return (who.index is None, who.index or 0, known, natural(who.name))

        self._nodes = sorted(agents, key=key)
        self.dialled = {node: agent.who for node, agent in enumerate(self._nodes) if agent.line}
        hosts = Counter(agent.who.name for agent in agents)
        places = Counter((agent.who.name, agent.address) for agent in agents)
        names = {}
        for node, agent in enumerate(self._nodes):
            agent.node, name = node, agent.who.name
            apart = agent.address if places[name, agent.address] == 1 else node + 1
            names[node] = name if hosts[name] == 1 else f"{name} ({apart})"
        return names

    def _take_in(self) -> list[tuple[_Agent, bytes]]:
        """The messages that have come, with who sent them; those that dial in are noted."""
        while self._gate.poll(0):
            version, request, _, _, _, mechanism, *credentials = self._gate.recv_multipart()
            may = mechanism == b"CURVE" and credentials == [self._nodes_key]
            answer = (b"200", b"OK") if may else (b"400", b"it is no node of this run")
            self._gate.send_multipart((version, request, *answer, b"", b""))
        found = []
        with suppress(zmq.Again):
            while True:
                name = self._socket.recv(zmq.NOBLOCK)
                if (known := self._agents.get(name)) is None:
                    self._dialled_in(name, self._socket.recv(copy=False))
                elif known.line and (message := known.line.take(self._socket.recv())) is not None:
                    found.append((known, message))
        return found

    def _dialled_in(self, name: bytes, frame: zmq.Frame) -> None:
        # To one that is not connected it is dropped, and comes again.
        line = Line(lambda put: self._socket.send_multipart((name, put)))
        with suppress(ValueError):  # else it is no agent
            who = codec.unpacked(line.take(frame.bytes) or b"", DialIn)
            doubled = who.index is not None and any(agent.who.index == who.index for agent in self._agents.values())
            why = "the run has begun without it" if self._nodes else ""
            why = f"another process has come as number {who.index}" if doubled else why
            if self.only_expected and expected_as(who.name, self.expected) is None:
                why = OVER
            if why:
                line.send(codec.packed(End(why)))
            else:
                self._agents[name] = _Agent(who, line, _plain(str(frame.get("Peer-Address"))))
                line.send(BEAT)

    def send(self, node: int, message: bytes) -> None:
        """Never blocks and never raises: that a node is gone shows in `receive`, or in its silence."""
        self._unsent.append((node, message))
        with suppress(BlockingIOError):  # it is awake by then
            os.eventfd_write(self._bell, 1)

    def receive(self, timeout: float) -> list[Event]:
        """What has come from any node, as soon as anything has; [] after `timeout` seconds."""
        if not self._early and not self._unsent:
            self._poller.poll(int(1000 * max(0.0, timeout)))
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while self._unsent:
            node, message = self._unsent.popleft()
            if line := self._nodes[node].line:
                line.send(message)
        ended = self.starter.ended()  # asked first: what it sent before it ended comes before its end
        events: list[Event] = [(agent.node, message) for agent, message in (*self._early, *self._take_in())]
        self._early = []
        return events + [(node, ended[node]) for node in self.starter.own if node in ended]  # index and number are one

    def close(self, timeout: float) -> dict[int, str]:
        """Those of its own agents that could not be ended, and why."""
        left = self.starter.close(timeout)
        self._context.destroy(linger=0)
        return {node: why for node, why in left.items() if node in self.starter.own}

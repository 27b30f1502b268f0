"""Whether nodes reach each other by TCP on the interfaces that NCCL and Gloo use: the agents try it, without ranks.

A firewall, a cable, a route, an MTU or two nodes with one address make a process group hang for minutes, and the hang
does not tell where. A connection tells within seconds, by address and port. Like NCCL and Gloo, both ends take ports
that the system chooses (net.ipv4.ip_local_port_range), and the one that connects is bound to no interface.
"""

import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.nodes.cluster import Cluster, Trouble
from pytest_gpufleet.nodes.interfaces import Interface
from pytest_gpufleet.nodes.messages import Connect, Door, Listen

# In either direction: some packets of any MTU, so that those too large for a switch are missed.
MESSAGE_BYTES = 64 * 1024
WAIT_SECONDS = 5.0  # a packet that gets lost at the begin of a connection is sent again after 1 and after 3 s
LISTEN_SECONDS = 120.0  # then nothing listens any more
AT_ONCE = 64  # connections that an agent makes at the same time
ANSWER_SECONDS = 10.0  # for an agent whose node is busy

# ---------------------------------------------------------------- on a node


def listen(interfaces: Sequence[Interface], token: bytes) -> tuple[Door, ...]:
    """Answer connections, by `token`, on a port of each of these interfaces."""
    doors = []
    for interface in interfaces:
        family = socket.AF_INET6 if ":" in interface.address else socket.AF_INET
        listener = socket.create_server((interface.address, 0), family=family, backlog=1024)
        doors.append(Door(interface.name, interface.address, listener.getsockname()[1], token))
        threading.Thread(target=_answer, args=(listener, token), name="gpufleet door", daemon=True).start()
    return tuple(doors)


def _answer(listener: socket.socket, token: bytes) -> None:
    until = time.monotonic() + LISTEN_SECONDS
    with listener, ThreadPoolExecutor(AT_ONCE) as pool:
        while (left := until - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                pool.submit(_greet, listener.accept()[0], token)
            except OSError:  # the time is over
                return


def _greet(guest: socket.socket, token: bytes) -> None:
    with guest:
        guest.settimeout(WAIT_SECONDS)
        _receive(guest)
        guest.sendall(token.ljust(MESSAGE_BYTES))


def _receive(connection: socket.socket) -> bytes:
    got = bytearray()
    while len(got) < MESSAGE_BYTES and (part := connection.recv(MESSAGE_BYTES)):
        got += part
    return bytes(got)


def connect(nodes: Mapping[int, Sequence[Door]]) -> dict[int, str]:
    """What keeps this node from reaching these, by their numbers; nothing of those that it reaches."""
    doors = [(node, door) for node, each in nodes.items() for door in each]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        tried = [*pool.map(_tried, (door for _, door in doors))]
    failed = grouped((node, text) for (node, _), text in zip(doors, tried, strict=True) if text)
    return {node: "; ".join(texts) for node, texts in failed.items()}


def _tried(door: Door) -> str:
    family = socket.AF_INET6 if ":" in door.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(WAIT_SECONDS)
        doing = "no connection"
        try:
            connection.connect((door.address, door.port))
            doing = "a connection, but no data"
            connection.sendall(bytes(MESSAGE_BYTES))
            answer = _receive(connection)
            if answer == door.token.ljust(MESSAGE_BYTES):
                return ""
            why = "another node has this address" if answer else "it was closed"
        except OSError as error:
            why = error.strerror or str(error)
        own = connection.getsockname()[0]
    return f"from {own} to port {door.port} of {door.address} ({door.interface}) {doing}: {why}"


# ---------------------------------------------------------------- where pytest runs


def reached(cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], str]:
    """What keeps the nodes of each of these pairs from reaching each other, "" if nothing does. Each of the two
    connects to the other, all at the same time, and once more where that failed. Of a node that is lost meanwhile
    nothing is said: its loss is."""
    questions = {node: Listen(secrets.token_bytes(16)) for pair in pairs for node in pair}
    doors = cluster.ask_each(questions, ANSWER_SECONDS)
    found = _connected(cluster, doors, pairs)
    return found | _connected(cluster, doors, [pair for pair in pairs if found[pair]])


def _connected(
    cluster: Cluster, doors: Mapping[int, Any], pairs: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], str]:
    ways = [way for a, b in pairs for way in ((a, b), (b, a))]
    known = {node: each for node, each in doors.items() if not isinstance(each, Trouble)}
    targets = grouped((a, b) for a, b in ways if b in known)
    questions = {a: Connect({b: tuple(known[b]) for b in others}) for a, others in targets.items()}
    most = max((len(others) for others in targets.values()), default=0)
    answers = cluster.ask_each(questions, ANSWER_SECONDS + 3 * WAIT_SECONDS * (1 + most // AT_ONCE))

    def trouble(a: int, b: int) -> str:
        if not (cluster.takes_part(a) and cluster.takes_part(b)):
            return ""
        why = answers[a] if b in known else doors[b]
        text = str(why) if isinstance(why, Trouble) else why.get(b, "")
        return text and f"{cluster.names[a]} to {cluster.names[b]}: {text}"

    return {(a, b): "; ".join(filter(None, (trouble(a, b), trouble(b, a)))) for a, b in pairs}

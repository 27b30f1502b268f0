"""By which address and network interface a node is reached by the others, and whether it is: the agents try that by
TCP on the interfaces that NCCL and Gloo use, without ranks.

A firewall, a cable, a route, an MTU or two nodes with one address make a process group hang for minutes, and the hang
does not tell where. A connection tells within seconds, by address and port. Like NCCL and Gloo, both ends take ports
that the system chooses (net.ipv4.ip_local_port_range), and the one that connects is bound to no interface."""

import array
import fcntl
import ipaddress
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from pytest_gpufleet.machine import rdma
from pytest_gpufleet.machine.tools import Unreadable
from pytest_gpufleet.model.place import grouped
from pytest_gpufleet.nodes.cluster import Cluster
from pytest_gpufleet.nodes.messages import Connect, Door, Listen, Serve, Write

IndexPair = tuple[int, int]

IFCONF, IFREQ = struct.Struct("iP"), struct.Struct("16s4x4s16x")  # of an interface its name, and a sockaddr_in
# In either direction: some packets of any MTU, so that those too large for a switch are missed.
MESSAGE_BYTES = 64 * 1024
WAIT_SECONDS = 5.0  # a packet that gets lost at the begin of a connection is sent again after 1 and after 3 s
LISTEN_SECONDS = 120.0  # then nothing listens any more
AT_ONCE = 64  # connections that an agent makes at the same time
PERFTESTS = 16  # that an agent starts at the same time, of which each takes 2 s and some CPU time
ANSWER_SECONDS = 10.0  # for an agent whose node is busy


class Interface(NamedTuple):
    """`address` of this node, on the interface `name`; "" if no interface has it, as behind some kinds of NAT."""

    address: str
    name: str


def towards(host: str) -> Interface:
    """The address from which this node talks to `host`, and its interface. OSError if there is no way to it."""
    address = _own_address(host)
    return Interface(address, next((name for name, each in _addresses() if each == address), ""))


def _own_address(host: str) -> str:
    family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as route:  # nothing is sent: only the route is asked for
        route.connect(place)
        return str(route.getsockname()[0]).partition("%")[0]


def _addresses() -> Iterator[tuple[str, str]]:
    found = array.array("B", bytes(1024 * IFREQ.size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, 0x8912, IFCONF.pack(len(found), found.buffer_info()[0]))  # netdevice(7)
    for name, address in IFREQ.iter_unpack(found[: IFCONF.unpack(answer)[0]]):
        yield name.partition(b"\0")[0].decode(), socket.inet_ntoa(address)
    with suppress(FileNotFoundError):  # where IPv6 is off
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, *_, name = line.split()
            yield name, str(ipaddress.ip_address(bytes.fromhex(address)))


def _listener(address: str) -> socket.socket:
    """At a port that nobody has."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=1024)


def free_rendezvous(address: str) -> str:
    """An init_method of torch.distributed: this address, and a port that nobody listens on at this moment."""
    with _listener(address) as probe:
        port = probe.getsockname()[1]
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def for_ranks(interface: str, local_index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """On which interface a rank talks to other nodes: that of its node, unless somebody has chosen others. NCCL takes a
    name for the begin of names, but for "=". Gloo knows one: of several the ranks of a node have one each in turn."""
    if not interface:
        return {}
    names = (environment.get("GLOO_SOCKET_IFNAME") or interface).split(",")
    return {
        "NCCL_SOCKET_IFNAME": environment.get("NCCL_SOCKET_IFNAME") or f"={interface}",
        "GLOO_SOCKET_IFNAME": names[local_index % len(names)],
    }


def of_traffic(reached: Interface, environment: Mapping[str, str]) -> tuple[Interface, ...]:
    """Those on which ranks of this node talk to others: the one by which it is reached, or what the variables of
    `for_ranks` choose: those of Gloo, and the first of NCCL, on which its ranks meet. OSError if one is not there."""
    gloo, nccl = environment.get("GLOO_SOCKET_IFNAME", ""), environment.get("NCCL_SOCKET_IFNAME", "")
    usual = reached.address
    by_family = sorted(_addresses(), key=lambda each: (each[1] != usual, (":" in each[1]) != (":" in usual)))
    own = dict(reversed([each for each in by_family if not each[1].startswith("fe80:")]))  # the best address of each
    chosen = gloo.split(",") if gloo else [reached.name]
    if nccl:
        names = [name for _, name in socket.if_nameindex() if name in own]
        chosen.append(next((name for name in names if _is_chosen(name, nccl)), nccl))
    if missing := [name for name in chosen if name not in own and name != reached.name]:
        why = f"as NCCL_SOCKET_IFNAME={nccl} and GLOO_SOCKET_IFNAME={gloo} choose"
        raise OSError(f"there is no interface {missing[0]} with an address, {why}")
    return tuple(Interface(own.get(name, usual), name) for name in dict.fromkeys(chosen))


def _is_chosen(name: str, pattern: str) -> bool:
    """By NCCL: begins of names, with "=" whole names, with "^" all others."""
    words = pattern.lstrip("^=").split(",")
    return (name in words if "=" in pattern[:2] else any(map(name.startswith, words))) != pattern.startswith("^")


# ---------------------------------------------------------------- on a node


def listen(interfaces: Sequence[Interface], token: bytes) -> tuple[Door, ...]:
    """Answer connections, by `token`, on a port of each of these interfaces."""

    def greet(guest: socket.socket) -> None:
        with guest:
            guest.settimeout(WAIT_SECONDS)
            _receive(guest)
            guest.sendall(token.ljust(MESSAGE_BYTES))

    def answer(listener: socket.socket) -> None:
        until = time.monotonic() + LISTEN_SECONDS
        with listener, suppress(OSError), ThreadPoolExecutor(AT_ONCE) as pool:  # the time is over
            while (left := until - time.monotonic()) > 0:
                listener.settimeout(left)
                pool.submit(greet, listener.accept()[0])

    doors = []
    for interface in interfaces:
        listener = _listener(interface.address)
        doors.append(Door(interface.name, interface.address, listener.getsockname()[1], token))
        threading.Thread(target=answer, args=(listener,), name="gpufleet door", daemon=True).start()
    return tuple(doors)


def _receive(connection: socket.socket) -> bytes:
    got = bytearray()
    while len(got) < MESSAGE_BYTES and (part := connection.recv(MESSAGE_BYTES)):
        got += part
    return bytes(got)


def connect(nodes: Mapping[int, Sequence[Door]]) -> dict[int, str]:
    """What keeps this node from reaching these, by their numbers; nothing of those that it reaches."""
    doors = [(node, door) for node, each in nodes.items() for door in each]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        tried = zip(doors, pool.map(_tried, (door for _, door in doors)), strict=True)
        failed = grouped((node, text) for (node, _), text in tried if text)
    return {node: "; ".join(texts) for node, texts in failed.items()}


def _tried(door: Door) -> str:
    own, doing = "here", "no connection"
    try:
        own = _own_address(door.address)
        with socket.create_connection((door.address, door.port), WAIT_SECONDS) as connection:
            doing = "a connection, but no data"
            connection.sendall(bytes(MESSAGE_BYTES))
            answer = _receive(connection)
        if answer == door.token.ljust(MESSAGE_BYTES):
            return ""
        why = "another node has this address" if answer else "it was closed"
    except OSError as error:
        why = error.strerror or str(error)
    return f"from {own} to port {door.port} of {door.address} ({door.interface}) {doing}: {why}"


def serve(question: Serve, address: str) -> tuple[str, tuple[int | str, ...]]:
    """The answer to it. Ports are held until all are found, so that no two servers have one."""
    with ExitStack() as held:
        services = [held.enter_context(_listener(address)).getsockname()[1] for _ in question.ports]

    def served(port: str, service: int) -> int:
        rdma.serve(question.test, port, address, service)
        return service

    return address, _or_why(served, question.ports, services)


def write(question: Write, address: str) -> tuple[float | str, ...]:
    return _or_why(lambda port, *to: rdma.write(question.test, port, address, *to), *zip(*question.to, strict=True))


def _or_why(work: Callable[..., Any], *arguments: Iterable[Any]) -> tuple[Any, ...]:
    def tried(*given: Any) -> Any:
        try:
            return work(*given)
        except Unreadable as why:
            return str(why)

    with ThreadPoolExecutor(PERFTESTS) as pool:
        return tuple(pool.map(tried, *arguments))


# ---------------------------------------------------------------- where pytest runs


def reached(cluster: Cluster, pairs: Sequence[IndexPair]) -> dict[IndexPair, str]:
    """What keeps the nodes of each pair apart, "" if nothing, or if one is lost. What fails is tried twice."""
    questions = {node: Listen(secrets.token_bytes(16)) for pair in pairs for node in pair}
    doors, closed = cluster.ask_each(questions, ANSWER_SECONDS)

    def trouble(tried: Mapping[int, dict[int, str]], silent: Mapping[int, str], a: int, b: int) -> str:
        text = closed.get(b) or silent.get(a) or tried[a].get(b, "")
        there = text and cluster.takes_part(a) and cluster.takes_part(b)
        return f"{cluster.names[a]} to {cluster.names[b]}: {text}" if there else ""

    found = dict.fromkeys(pairs, "not tried yet")
    for _ in range(2):
        again = [pair for pair in pairs if found[pair]]
        targets = grouped((a, b) for pair in again for a, b in (pair, pair[::-1]) if b in doors)
        connects = {a: Connect({b: doors[b] for b in others}) for a, others in targets.items()}
        most = max(map(len, targets.values()), default=0)
        asked = cluster.ask_each(connects, ANSWER_SECONDS + 3 * WAIT_SECONDS * (1 + most // AT_ONCE))
        found |= {(a, b): "; ".join(filter(None, (trouble(*asked, a, b), trouble(*asked, b, a)))) for a, b in again}
    return found


def written(
    cluster: Cluster, test: rdma.Perftest, ways: Sequence[IndexPair], ports: Sequence[str]
) -> dict[IndexPair, list[rdma.Written]]:
    """What the first node of each way writes to the second by RDMA, on each port, all at once; none of lost nodes."""
    servers = grouped((way[1], (way, port)) for way in ways for port in ports)
    most = max(map(len, servers.values()), default=0)
    seconds = ANSWER_SECONDS + 2 * rdma.SECONDS * (1 + most // PERFTESTS)
    questions = {b: Serve(test, tuple(port for _, port in each)) for b, each in servers.items()}
    served, silent = cluster.ask_each(questions, seconds)
    found: dict[tuple[IndexPair, str], rdma.Written] = {}
    doors: dict[int, list[tuple[IndexPair, tuple[str, str, int]]]] = {}
    for b, each in servers.items():
        address, services = served.get(b) or ("", [silent[b]] * len(each))
        for (way, port), service in zip(each, services, strict=True):
            found[way, port] = rdma.Written(why=f"{port}: {service}", alone=b)
            if isinstance(service, int):
                doors.setdefault(way[0], []).append((way, (port, address, service)))
    wrote, silent = cluster.ask_each(
        {a: Write(test, tuple(to for _, to in each)) for a, each in doors.items()}, seconds
    )
    for a, tried in doors.items():
        for (way, (port, *_)), figure in zip(tried, wrote.get(a) or [silent[a]] * len(tried), strict=True):
            why = f"{port}: {figure}" if isinstance(figure, str) else ""
            found[way, port] = rdma.Written(0.0 if why else figure, why, a if rdma.is_own(why) else None)
    return {way: [found[way, port] for port in ports] for way in ways if all(map(cluster.takes_part, way))}

"""By which address and network interface a node is reached by the others."""

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ANY_PORT = 9  # nothing is sent there: only the route to it is asked for
SIOCGIFCONF, MOST_INTERFACES = 0x8912, 1024  # netdevice(7)
IFCONF, IFREQ = struct.Struct("iP"), struct.Struct("16s4x4s16x")  # of an interface its name, and a sockaddr_in
IF_INET6 = Path("/proc/net/if_inet6")  # not there where IPv6 is off


@dataclass(frozen=True)
class Interface:
    """`address` of this node, on the interface `name`; "" if no interface has it, as behind some kinds of NAT."""

    address: str
    name: str


def towards(host: str) -> Interface:
    """The address from which this node talks to `host`, and its interface. OSError if there is no way to it."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as route:
        route.connect(place)
        address = route.getsockname()[0].partition("%")[0]
    return Interface(address, next((name for name, each in _addresses() if each == address), ""))


def free_rendezvous(address: str) -> str:
    """An init_method of torch.distributed: this address, and a port that nobody listens on at this moment."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        port = probe.getsockname()[1]
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def for_ranks(interface: str, local_index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """On which interface a rank talks to those of other nodes: the one of its node, unless somebody has chosen others.

    NCCL takes a name for the begin of names, but for "=". Gloo knows one interface: where there are several to choose
    from, the ranks of a node have them one after the other, as the GPUs of a node have a rail each.
    """
    if not interface:
        return {}
    names = (environment.get("GLOO_SOCKET_IFNAME") or interface).split(",")
    return {
        "NCCL_SOCKET_IFNAME": environment.get("NCCL_SOCKET_IFNAME") or f"={interface}",
        "GLOO_SOCKET_IFNAME": names[local_index % len(names)],
    }


def of_traffic(reached: Interface, environment: Mapping[str, str]) -> tuple[Interface, ...]:
    """Those on which ranks of this node talk to others (`for_ranks`): the one by which it is reached, or
    what NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose: those of Gloo, and the first of NCCL, on which its ranks
    meet. OSError if there is none of a name that was chosen."""
    gloo, nccl = environment.get("GLOO_SOCKET_IFNAME", ""), environment.get("NCCL_SOCKET_IFNAME", "")
    usual = reached.address
    by_family = sorted(_addresses(), key=lambda each: (each[1] != usual, (":" in each[1]) != (":" in usual)))
    own = dict(reversed([each for each in by_family if not each[1].startswith("fe80:")]))  # the best address of each
    names = [name for _, name in socket.if_nameindex() if name in own]
    chosen = gloo.split(",") if gloo else [reached.name]
    if nccl:
        chosen.append(next((name for name in names if _is_chosen(name, nccl)), nccl))
    if missing := [name for name in chosen if name not in own and name != reached.name]:
        why = f"as NCCL_SOCKET_IFNAME={nccl} and GLOO_SOCKET_IFNAME={gloo} choose"
        raise OSError(f"there is no interface {missing[0]} with an address, {why}")
    return tuple(Interface(own.get(name, usual), name) for name in dict.fromkeys(chosen))


def _is_chosen(name: str, pattern: str) -> bool:
    """By NCCL: begins of names, with "=" whole names, with "^" all others."""
    words = pattern.lstrip("^=").split(",")
    found = name in words if "=" in pattern[:2] else any(map(name.startswith, words))
    return found != pattern.startswith("^")


def _addresses() -> Iterator[tuple[str, str]]:
    """Every interface with every one of its addresses."""
    found = array.array("B", bytes(MOST_INTERFACES * IFREQ.size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, SIOCGIFCONF, IFCONF.pack(len(found), found.buffer_info()[0]))
    for name, address in IFREQ.iter_unpack(found[: IFCONF.unpack(answer)[0]]):
        yield name.partition(b"\0")[0].decode(), socket.inet_ntoa(address)
    for line in IF_INET6.read_text().splitlines() if IF_INET6.exists() else ():
        address, *_, name = line.split()
        yield name, str(ipaddress.ip_address(bytes.fromhex(address)))

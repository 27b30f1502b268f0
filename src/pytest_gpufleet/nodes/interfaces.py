"""By which address and network interface a node is reached by the others."""

import ctypes
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

ANY_PORT = 9  # nothing is sent there: only the route to it is asked for
# Where the bytes of an address stand in sockaddr_in and sockaddr_in6 (linux/in.h, linux/in6.h), and how many there are.
BYTES_OF_ADDRESS = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}


@dataclass(frozen=True)
class Interface:
    """`address` of this node, on the interface `name`; "" if no interface has it, as behind some kinds of NAT."""

    address: str
    name: str


class _IfAddrs(ctypes.Structure):
    """The begin of a struct ifaddrs (getifaddrs(3)); what follows is not needed."""


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


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


def _addresses() -> Iterator[tuple[str, str]]:
    """Every interface with every one of its addresses."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        entry = first
        while entry:
            interface = entry.contents
            if interface.address:
                family = ctypes.cast(interface.address, ctypes.POINTER(ctypes.c_ushort)).contents.value
                if family in BYTES_OF_ADDRESS:
                    offset, length = BYTES_OF_ADDRESS[socket.AddressFamily(family)]
                    packed = ctypes.string_at(interface.address + offset, length)
                    yield os.fsdecode(interface.name), socket.inet_ntop(family, packed)
            entry = interface.next
    finally:
        libc.freeifaddrs(first)

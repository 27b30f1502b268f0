"""What strangers on the machine can reach."""

import os
import socket
from contextlib import suppress
from pathlib import Path

from .faults import all_reduce

LISTEN = "0A"
LOOPBACK = {"0100007F", "0" * 24 + "01000000"}


def inodes(pid):
    links = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            links.add(os.readlink(descriptor))
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def listening(pids):
    """Address and port of each of their sockets that listen."""
    own = set().union(*map(inodes, pids))
    lines = [line for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    found = [fields for fields in map(str.split, lines) if fields[3] == LISTEN and fields[9] in own]
    return [(address, int(port, 16)) for address, port in (fields[1].split(":") for fields in found)]


def test_nothing_listens_beyond_loopback_and_a_stranger_gets_nothing(two_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert two_ranks.run(all_reduce) == [3, 3]
    found = listening([os.getpid(), *two_ranks.run(lambda rank: os.getpid())])
    assert {address for address, _ in found} <= LOOPBACK, found
    for _, port in found:
        for greeting in (b"", b"cos\nsystem\n(S'touch owned'\ntR.", b"\0" * 4096):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
                stranger.sendall(greeting)
                stranger.shutdown(socket.SHUT_WR)
                stranger.settimeout(0.2)
                with suppress(TimeoutError, ConnectionError):
                    assert stranger.recv(1) == b""
    assert not Path("owned").exists()
    assert two_ranks.run(all_reduce) == [3, 3]

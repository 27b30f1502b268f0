"""What strangers on the machine can reach."""

LISTENERS = """
import os, socket
from pathlib import Path

import torch
import torch.distributed as dist

LISTEN = "0A"

def inodes(pid):
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(descriptor))
        except OSError:
            pass
    return {link[8:-1] for link in links if link.startswith("socket:[")}

def listening(pids):
    own = set().union(*map(inodes, pids))
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in own:
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found

def total(rank):
    x = torch.ones(1) * (rank.index + 1)
    dist.all_reduce(x, group=rank.group)
    return int(x)

def test_strangers(nccl_group):
    nccl_group.run(total)
    pids = [os.getpid(), *nccl_group.run(lambda rank: os.getpid())]
    found = listening(pids)
    assert {address for address, _ in found} <= {"0100007F", "0" * 24 + "01000000"}, found
    for _, port in found:
        for greeting in (b"", b"cos\\nsystem\\n(S'touch owned'\\ntR.", b"\\0" * 4096):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
                stranger.sendall(greeting)
                stranger.shutdown(socket.SHUT_WR)
                stranger.settimeout(0.2)
                try:
                    assert stranger.recv(1) == b""
                except (TimeoutError, ConnectionError):
                    pass
    assert not os.path.exists("owned")
    assert nccl_group.run(total) == [3, 3]
    print("ports tried:", len(found))
"""


def test_nothing_listens_beyond_loopback_and_a_stranger_gets_nothing(fleet):
    run = fleet(LISTENERS)
    assert set(run.outcomes.values()) == {"passed"}, run.text

"""What strangers on the machine can reach, and what ranks find in their environment."""

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


def test_ranks_have_the_controllers_environment_and_what_is_documented(fleet):
    module = """
    import os
    import torch
    def test_environment(world, monkeypatch):
        torch_warns_of = torch.torch_version.TorchVersion(torch.__version__) >= (2, 8)  # the other name
        recorder = "TORCH_FR_BUFFER_SIZE" if torch_warns_of else "TORCH_NCCL_TRACE_BUFFER_SIZE"
        ours = {"CUDA_DEVICE_ORDER", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
                recorder, "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
        before = dict(os.environ)
        for rank, there in enumerate(world.run(lambda rank: dict(os.environ))):
            extra = {name for name in there if there[name] != before.get(name)}
            assert extra <= ours and set(before) <= set(there)
            assert there["RANK"] == str(rank)
            assert recorder in there
    """
    assert fleet(module, SOME_VARIABLE="kept").outcomes == {"test_environment": "passed"}

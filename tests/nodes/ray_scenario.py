"""A small cluster of Ray on this machine, whose nodes come to harm one by one. Prints what a controller sees of it.

A process of its own: Ray leaves traces in whatever process it is imported.
"""

import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.nodes import ray_transport
from pytest_gpufleet.nodes.agent_process import AgentSettings
from pytest_gpufleet.nodes.cluster import Cluster
from pytest_gpufleet.nodes.messages import Rendezvous
from pytest_gpufleet.nodes.ray_transport import RayTransport
from pytest_gpufleet.world.engines import processes

LONG = 120.0  # seconds; nothing takes so long, even on a busy machine
STORE_BYTES = 80_000_000
NODES = 3


def main(folder: str) -> None:
    from ray.cluster_utils import Cluster as Machines

    node = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": STORE_BYTES}
    head = {**node, "include_dashboard": False, "temp_dir": folder}
    machines = Machines(initialize_head=True, head_node_args=head)
    try:
        for _ in range(NODES - 1):
            machines.add_node(**node)
        wrong = refused_with_another_token(machines.address)
        told = {"wrong token": wrong, **harm(machines.address, folder)}
        Path(folder, "told.json").write_text(json.dumps(told))
    finally:
        machines.shutdown()


def refused_with_another_token(address: str) -> str:
    own, os.environ["RAY_AUTH_TOKEN"] = os.environ["RAY_AUTH_TOKEN"], "of another cluster"
    try:
        ray_transport.find(address)
    except Refused as refused:
        return str(refused)
    finally:
        os.environ["RAY_AUTH_TOKEN"] = own
    return ""


def harm(address: str, folder: str) -> dict:
    settings = AgentSettings(folder, rehearse=1, keep_in=folder)
    transport = RayTransport(settings, NODES, address)
    cluster = Cluster(transport, lost_after=3.0)
    agents: list[int] = []

    def next_loss() -> list:
        return [[node, lost.why] for node, lost in cluster.rank_news(LONG)]

    try:
        cluster.start(LONG)
        agents = [hello.pid for _, hello in sorted(cluster.hellos.items())]
        told = {
            "started": list(cluster.alive), "names": list(cluster.names.values()), "secured": transport.secured,
            "transport": {hello.transport for hello in cluster.hellos.values()} == {transport.name},
            "answers": answering(cluster, range(NODES)),
        }  # fmt: skip
        actor = parent(agents[1])
        os.kill(actor, signal.SIGKILL)
        told["actor killed"] = next_loss()
        os.kill(agents[2], signal.SIGKILL)
        told["agent killed"] = next_loss()
        os.kill(agents[0], signal.SIGSTOP)
        told["agent frozen"] = next_loss()
        os.kill(agents[0], signal.SIGCONT)
        told["answers when it is back"] = answering(cluster, [0])
        told["takes part when it is back"] = list(cluster.alive)
        os.kill(agents[0], signal.SIGSTOP)
    finally:
        unknown = cluster.close(20.0)
    return {**told, "unknown": sorted(unknown), "left": [pid for pid in agents if processes.look(pid)]}


def answering(cluster: Cluster, nodes: Iterable[int]) -> list[int]:
    told = cluster.ask_each(dict.fromkeys(nodes, Rendezvous()), LONG)
    return [node for node, answer in told.items() if isinstance(answer, str)]


def parent(pid: int) -> int:
    process = processes.look(pid)
    assert process
    return process.parent


if __name__ == "__main__":
    main(sys.argv[1])

"""Agents on the nodes of a Ray cluster, which survive it. A process of its own talks to Ray and holds all GPUs."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.nodes import launchers
from pytest_gpufleet.nodes.launchers import AgentSettings, OwnAgents
from pytest_gpufleet.verdict.fleet.host_runs import expected_as, natural

BOOT = "import sys; sys.path[:] = sys.argv[2:]; import pytest_gpufleet.nodes.ray_launcher as it; it.launch(sys.argv[1])"
DETACH = "import os, sys; os.fork() and os._exit(0); os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"
ANSWER_SECONDS = 150.0  # for Ray to answer, and for what is waited for on purpose
JOIN_SECONDS = 30.0  # for nodes to join Ray, and for GPUs that it gets back from a job that has just ended
TOKEN = "it asks for a token that this process does not have: RAY_AUTH_TOKEN or ~/.ray/auth_token, that of the head"
OPEN = "it lets in anyone who reaches its ports: start it with RAY_AUTH_MODE=token, or accept that by --fleet-insecure"
Answer = tuple[dict[int, str], str]  # the nodes with an agent, by their number, or why there are none


class Asked(msgspec.Struct, frozen=True):
    """`port`: of the head of the run. `wanted`: so many nodes are waited for; `expected`: if any, only these hosts."""

    settings: AgentSettings
    address: str
    wanted: int | None = None
    expected: tuple[str, ...] = ()
    insecure: bool = False
    port: int = 0


class RayAgents(OwnAgents):
    """Of all this, the process that talks to Ray is seen here, and no agent."""

    def __init__(self, secret: bytes, asked: Asked) -> None:
        super().__init__("ray", "insecure", secret, ())
        self._asked = asked

    def start(self, port: int) -> Mapping[int, str]:
        """Ray says of itself what the environment of this process says. So it is tried: as somebody without a token."""
        asked = msgspec.structs.replace(self._asked, port=port)
        names, trouble = self._answer(asked, "disabled")
        if trouble == TOKEN:
            self.secured, (names, trouble) = "token", self._answer(asked, "token")
        if trouble:
            raise Refused(
                "no launcher (srun, mpirun, Kubernetes, --fleet-head) has started this as one of several nodes, "
                f"and the cluster of Ray ({asked.address}) cannot be used: {trouble}"
            )
        return names

    def _answer(self, asked: Asked, mode: str) -> Answer:
        self.close(0.0)
        command = [sys.executable, "-c", BOOT, msgspec.json.encode(asked).decode(), *sys.path]
        # No copy of the environment of `uv run` is built on every node.
        environment = {**os.environ, "RAY_AUTH_MODE": mode, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
        process = self._processes[0] = launchers.with_secret(
            command, self.secret, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        output = process.stdout
        if output is None or not select.select([output], [], [], ANSWER_SECONDS)[0]:
            return {}, f"nothing came from it within {ANSWER_SECONDS:g} s"
        line = output.readline()
        return msgspec.json.decode(line, type=Answer) if line else ({}, TOKEN)  # it crashes without one


def launch(text: str) -> None:
    """The life of that process: it ends when its standard input does."""
    output, held = os.dup(1), list[Any]()
    os.dup2(2, 1)  # Ray prints
    secret, asked = os.read(0, 32), msgspec.json.decode(text, type=Asked)
    import ray.exceptions

    try:
        answer = _launched(ray, asked, secret, held)
    except ray.exceptions.AuthenticationError:
        answer = {}, TOKEN
    except Exception as error:
        answer = {}, " ".join(str(error).split())[-300:]
    os.write(output, msgspec.json.encode(answer) + b"\n")
    os.read(0, 1)
    os._exit(0)


def _launched(ray: Any, asked: Asked, secret: bytes, held: list[Any]) -> Answer:
    """`held`: actors, which keep the GPUs."""
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import GcsClient
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    address = canonicalize_bootstrap_address(asked.address) or ""
    GcsClient(address=address)  # is turned away at once, ray.init after 20 s
    if os.environ["RAY_AUTH_MODE"] == "disabled" and not asked.insecure:
        return {}, OPEN
    ray.init(address=address, log_to_driver=False, configure_logging=False)
    own = ray.get_runtime_context().get_node_id()
    here = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own)
    begun = {}
    for index, node in enumerate(_nodes(ray, asked, own)):
        where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        gpus = node["Resources"].get("GPU", 0)
        held.append(ray.remote(Holder).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=where).remote())
        changes = {"index": index, "name": node["NodeManagerHostname"], "head": f"{here}:{asked.port}"}
        begun[held[-1].begin.remote(msgspec.structs.replace(asked.settings, **changes), secret)] = changes["name"]
    if not begun:
        return {}, "it has no node with GPUs"
    _, late = ray.wait([*begun], num_returns=len(begun), timeout=JOIN_SECONDS)
    late_ones = ", ".join(begun[each] for each in late)
    return dict(enumerate(begun.values())), late_ones and f"in use by others, or without an answer: {late_ones}"


def _nodes(ray: Any, asked: Asked, own: str) -> list[Mapping[str, Any]]:
    """This machine's first, then by name. In a rehearsal those without GPUs too."""
    until, found = time.monotonic() + JOIN_SECONDS, list[Any]()
    while time.monotonic() < until and (len(found) != asked.wanted if asked.wanted else not found):
        time.sleep(0.5)
        alive = [node for node in ray.nodes() if node["Alive"]]
        found = [node for node in alive if asked.settings.rehearse or node["Resources"].get("GPU")]
        if asked.expected:
            found = [node for node in found if expected_as(node["NodeManagerHostname"], asked.expected)]
    return sorted(found, key=lambda node: (node["NodeID"] != own, natural(node["NodeManagerHostname"]), node["NodeID"]))


class Holder:
    """An actor. Has the GPUs of its node, as Ray counts them."""

    def begin(self, settings: AgentSettings, secret: bytes) -> None:
        """Twice removed: Ray ends the children of its workers. With the environment in which Ray was started on this
        node: it gives its workers OMP_NUM_THREADS=1, which slows all that a rank computes on its CPU."""
        pid, environment = os.getppid(), dict(os.environ)
        with suppress(OSError):
            while Path(f"/proc/{pid}/comm").read_text().strip() != "raylet":
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            environment = dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)
        own = {name: value for name, value in environment.items() if not name.startswith("RAY_")}
        arguments = [sys.executable, "-c", DETACH, *launchers.command(settings)]
        subprocess.run(arguments, input=secret, env=own, start_new_session=True, check=True)

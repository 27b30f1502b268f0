"""Messages over Ray, which starts an actor on every node (ray_actor) and carries calls to it, but judges nothing."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any

import msgspec

from pytest_gpufleet.model.event_values import Secured
from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.nodes import ray_access
from pytest_gpufleet.nodes.agent_process import AgentSettings
from pytest_gpufleet.nodes.ray_actor import Relay
from pytest_gpufleet.nodes.ray_line import Line, in_short
from pytest_gpufleet.nodes.transport import Arrived, Gone
from pytest_gpufleet.verdict.fleet.host_runs import natural

# For nodes that are started together with this run. And for those that were killed and started again: Ray has them
# twice until it sees, after 15 s (in 2.60), that the first is dead.
JOIN_SECONDS = 30.0
JOIN_TURN_SECONDS = 0.5
START_SECONDS = 120.0  # for Ray to answer, beside what is waited for on purpose
HEAD = "node:__internal_head__"  # a resource of the node on which the cluster was started
CALLS = 4  # at a time in an actor: one that waits, and those that bring something


class RayTransport:
    """An agent on every alive node of a Ray cluster that has GPUs, all of which are taken; in a rehearsal on every
    node. `wanted`: so many are waited for. `insecure`: a cluster that lets in everybody is accepted."""

    def __init__(
        self, settings: AgentSettings, wanted: int | None = None, address: str | None = None, insecure: bool = False
    ) -> None:
        self.name = "ray"
        self.secured: Secured = "insecure"
        self._settings = settings
        self._wanted = wanted
        self._address = address
        self._insecure = insecure
        self._lines: dict[int, Line] = {}
        self._guard = threading.Lock()  # of all lines
        self._done: queue.SimpleQueue[tuple[Line, Any, bool]] = queue.SimpleQueue()
        self._ray: Any = None

    def start(self) -> Mapping[int, str]:
        access = ray_access.find(self._address)
        started: Future[Mapping[int, str]] = Future()

        def start() -> None:
            try:
                started.set_result(self._started(access))
            except BaseException as error:
                started.set_exception(error)

        # In a thread: Ray waits for a head that does not answer, and elsewhere it takes SIGTERM for itself.
        threading.Thread(target=start, name="gpufleet ray start", daemon=True).start()
        try:
            return started.result(START_SECONDS)
        except FutureTimeout:
            raise Refused(f"the cluster of Ray at {access.address} has not answered in {START_SECONDS:g} s") from None

    def _started(self, access: ray_access.Access) -> Mapping[int, str]:
        ray = self._ray = _connected(access)
        self.name = f"ray {ray.__version__}"
        own = ray.get_runtime_context().get_node_id()
        nodes = self._nodes(own)
        if not nodes:
            raise Refused(f"the cluster of Ray at {access.address} has no node with GPUs")
        self.secured = ray_access.secured(access, [node["NodeManagerAddress"] for node in nodes], self._insecure)
        names, taken = names_of(nodes), self._in_use(nodes)
        if in_use := [name for node, name in zip(nodes, names, strict=True) if node["NodeID"] in taken]:
            raise Refused(f"the GPUs of {', '.join(in_use)} are in use by another job of this cluster of Ray")
        towards = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own)
        for number, (node, name) in enumerate(zip(nodes, names, strict=True)):
            told = {"name": name if name != node["NodeManagerHostname"] else "", "transport": "ray"}
            actor = _actor(ray, node, msgspec.structs.replace(self._settings, towards=towards, **told))
            line = self._lines[number] = Line(number, actor, self._call_ended, ray.exceptions.ActorUnavailableError)
            line.go_on()
        return dict(enumerate(names))

    def _call_ended(self, line: Line, call: Any, taking: bool) -> None:
        self._done.put((line, call, taking))

    def _nodes(self, own: str) -> list[Mapping[str, Any]]:
        """Those to start an agent on, in the order of their numbers: this machine's first, then by name."""
        until = time.monotonic() + JOIN_SECONDS
        while True:
            there = [node for node in self._ray.nodes() if node["Alive"]]
            usable = [node for node in there if self._settings.rehearse or node["Resources"].get("GPU")]
            as_wanted = len(usable) == self._wanted if self._wanted else bool(usable)
            if as_wanted or time.monotonic() > until:
                break
            time.sleep(JOIN_TURN_SECONDS)
        # A node whose driver is dead has no GPUs for Ray: its agent can say why. A head often has none.
        others = [node for node in there if node not in usable and HEAD not in node["Resources"]]
        usable += others[: max(0, (self._wanted or 0) - len(usable))]
        by_name = sorted(
            usable, key=lambda node: natural(f"{node['NodeManagerHostname']} {node['NodeManagerAddress']}")
        )
        return sorted(by_name, key=lambda node: node["NodeID"] != own)

    def _in_use(self, nodes: Sequence[Mapping[str, Any]]) -> set[str]:
        """Of these nodes, by their ids, those with GPUs that Ray has given to others, and gets back from no job that
        has just ended."""
        from ray._private.state import available_resources_per_node

        until = time.monotonic() + JOIN_SECONDS
        while True:
            free = available_resources_per_node()
            found = {
                node["NodeID"]
                for node in nodes
                if free.get(node["NodeID"], {}).get("GPU", 0) < node["Resources"].get("GPU", 0)
            }
            if not found or time.monotonic() > until:
                return found
            time.sleep(JOIN_TURN_SECONDS)

    # ------------------------------------------------------------ calls

    def send(self, node: int, message: bytes, later: bool = False) -> None:
        with self._guard:
            if line := self._lines.get(node):
                line.send(message, later)

    def receive(self, timeout: float) -> list[Arrived | Gone]:
        until = time.monotonic() + timeout
        events: list[Arrived | Gone] = []
        while not events and (left := until - time.monotonic()) > 0:
            with self._guard:
                for line in self._lines.values():
                    if line.again_at <= time.monotonic():
                        line.go_on()
                soonest = min((line.again_at for line in self._lines.values()), default=until)
            with suppress(queue.Empty):
                done = self._done.get(timeout=max(0.0, min(left, soonest - time.monotonic())))
                while True:
                    line, call, taking = done
                    with self._guard:
                        events += line.ended(call, taking)
                    done = self._done.get_nowait()
        return events

    # ------------------------------------------------------------ its end

    def close(self, timeout: float) -> dict[int, str]:
        ray, self._ray = self._ray, None
        if ray is None:
            return {}
        left = {node for node, line in self._lines.items() if not line.agent_has_ended}

        def end() -> None:
            asked = {self._lines[node].actor.end.remote(timeout / 4): node for node in left}
            answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout / 2) if asked else ([], [])
            for reference in answered:
                with suppress(Exception):  # its actor is gone, and nobody knows about its agent
                    if not ray.get(reference, timeout=0):
                        left.discard(asked[reference])
            for line in self._lines.values():
                ray.kill(line.actor)
            ray.shutdown()

        ending = threading.Thread(target=end, name="gpufleet ray end", daemon=True)  # it waits for a head that is gone
        ending.start()
        ending.join(timeout)
        return dict.fromkeys(left, "nobody says that its agent has ended")


def names_of(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Host names; where several nodes have one, with what tells them apart."""
    hosts = Counter(node["NodeManagerHostname"] for node in nodes)
    places = Counter((node["NodeManagerHostname"], node["NodeManagerAddress"]) for node in nodes)
    seen: Counter[str] = Counter()
    names = []
    for node in nodes:
        host, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
        seen[host] += 1
        other = address if places[host, address] == 1 else str(seen[host])
        names.append(host if hosts[host] == 1 else f"{host} ({other})")
    return names


def _connected(access: ray_access.Access) -> Any:
    """Ray, as a driver of this cluster. Refused if it does not let one in that is of another version."""
    os.environ.update(access.environment)
    import ray

    logging.getLogger("ray").setLevel(logging.CRITICAL)  # warnings are of no use for whoever waits for a verdict
    try:
        ray.init(address=access.address, log_to_driver=False, configure_logging=False)
    except Exception as error:
        raise Refused(f"the cluster of Ray at {access.address} cannot be joined: {in_short(error)}") from None
    ray._private.worker._worker_logs_enabled = False  # what raylets report is printed all the same, page by page
    return ray


def _actor(ray: Any, node: Mapping[str, Any], settings: AgentSettings) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = {
        "num_cpus": 0,
        "num_gpus": node["Resources"].get("GPU", 0),
        "max_concurrency": CALLS,
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
    }
    return ray.remote(Relay).options(**options).remote(settings)

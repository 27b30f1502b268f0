"""Messages over Ray, which starts an actor on every node (ray_actor) and carries calls to it, but judges nothing."""

import ipaddress
import logging
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from pytest_gpufleet.machine.nvml import in_thread
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.events import Secured
from pytest_gpufleet.nodes.agent_process import AgentSettings
from pytest_gpufleet.nodes.ray_actor import Line, Relay, in_short
from pytest_gpufleet.nodes.transport import Arrived, Gone
from pytest_gpufleet.verdict.fleet.host_runs import natural

# How a run gets into a cluster of Ray, and whether that lets in everybody: whoever reaches its ports runs code there.
#
# What Ray says of itself by its environment is about this process. So it is tried: a process without a token knocks.

MODE = "RAY_AUTH_MODE"
MISSING = "--nodes needs Ray on every node, which is not installed here: pip install 'pytest-gpufleet[ray]'"
LEAST = "2.52"  # as in pyproject.toml
# A driver whose head is gone ends itself after 60 s, without a report; a run ends by its own deadlines. And no copy of
# the environment of `uv run` is built on every node: what is installed there is held against what is installed here.
DRIVER = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(7 * 24 * 3600), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
KNOCK_SECONDS = 30.0  # for a process that imports Ray and asks
BOOT = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from pytest_gpufleet.nodes import ray_transport; ray_transport.knock(sys.argv[1])"
)
CONNECT_SECONDS = 5.0
UP = 1  # IFF_UP, linux/if.h


class Knock(msgspec.Struct, frozen=True):
    """`address` of the cluster, "" if there is none. `why` this process was not let in; "" if it was."""

    address: str = ""
    refused: bool = False
    why: str = ""


@dataclass(frozen=True)
class Access:
    """`asks`: nobody is let in without a token."""

    address: str
    asks: bool

    @property
    def environment(self) -> dict[str, str]:
        """What this process needs in its environment before it imports Ray, which reads it then."""
        return {**DRIVER, MODE: "token" if self.asks else "disabled"}


def find(address: str | None) -> Access:
    """The cluster at this address (None: as Ray finds it), which lets this process in. Refused if there is none."""
    try:
        here = version("ray")  # not whether it can be imported: so can any folder of this name
    except PackageNotFoundError:
        raise Refused(MISSING) from None
    if _numbers(here) < _numbers(LEAST):
        raise Refused(f"--nodes needs Ray {LEAST} or later, which knows of tokens; here is {here}")
    wanted = address or os.environ.get("RAY_ADDRESS") or "auto"
    if "://" in wanted:
        raise Refused(f"{wanted} is an address for Ray's client: run on a node of the cluster, and give HOST:PORT")
    knocks = [in_thread(_knocked, wanted, mode) for mode in ("disabled", "token")]
    stranger, ours = (each.result() for each in knocks)
    if not stranger.refused and stranger.why:
        raise Refused(f"no cluster of Ray answers ({stranger.address or wanted}): {stranger.why}")
    if stranger.refused and ours.why:
        raise Refused(
            f"the cluster of Ray at {stranger.address} asks for a token, and this process has none or another one: "
            "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token has to be that of the head"
        )
    return Access(stranger.address, stranger.refused)


def secured(access: Access, addresses: Iterable[str], insecure: bool) -> Secured:
    """What keeps strangers out of a cluster with nodes of these addresses. Refused if nothing does, and that was not
    accepted (`insecure`)."""
    if access.asks:
        return "token"
    if all(map(_is_loopback, addresses)) and not _other_interfaces():
        return "loopback"
    if insecure:
        return "insecure"
    raise Refused(
        f"the cluster of Ray at {access.address} lets in whoever reaches its ports, to run what they like on every "
        "node: start it with RAY_AUTH_MODE=token on all nodes, or accept that by --fleet-insecure"
    )


def _is_loopback(address: str) -> bool:
    """Not the name of a host, which `ray start --node-ip-address` takes as it is (seen in 2.60)."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _numbers(version: str) -> tuple[int, ...]:
    """ "2.60.0rc1" is (2, 60): as far as a version says what a release knows."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _other_interfaces() -> list[str]:
    """Those that are up, beside loopback: Ray listens on all of them, whatever address it was given (seen in 2.60)."""
    up = [path.parent.name for path in Path("/sys/class/net").glob("*/flags") if int(path.read_text(), 16) & UP]
    return sorted(set(up) - {"lo"})


def _knocked(address: str, mode: str) -> Knock:
    command = [sys.executable, "-c", BOOT, address, *sys.path]
    environment = {**os.environ, MODE: mode}
    try:
        asked = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=KNOCK_SECONDS,
        )  # fmt: skip
        return msgspec.json.decode(asked.stdout, type=Knock)
    except subprocess.TimeoutExpired:
        return Knock(why=f"nothing within {KNOCK_SECONDS:g} s")
    except ValueError:  # it crashes where it needs a token and finds none
        return Knock(why=f"the process that asked ended with {asked.returncode}")


def knock(address: str) -> None:
    """The life of a process that is ended by whoever waits for its answer."""
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import GcsClient
    from ray.exceptions import AuthenticationError

    found = ""
    try:
        found = canonicalize_bootstrap_address(address) or ""
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()  # Ray tries for a minute
        GcsClient(address=found)
        outcome = Knock(found)
    except AuthenticationError as error:
        outcome = Knock(found, refused=True, why=str(error))
    except Exception as error:
        outcome = Knock(found, why=" ".join(str(error).split()))
    sys.stdout.buffer.write(msgspec.json.encode(outcome))
    sys.stdout.flush()
    os._exit(0)


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
        access = find(self._address)
        # In a thread: Ray waits for a head that does not answer, and elsewhere it takes SIGTERM for itself.
        started = in_thread(self._started, access)
        try:
            return started.result(START_SECONDS)
        except FutureTimeout:
            raise Refused(f"the cluster of Ray at {access.address} has not answered in {START_SECONDS:g} s") from None

    def _started(self, access: Access) -> Mapping[int, str]:
        ray = self._ray = _connected(access)
        self.name = f"ray {ray.__version__}"
        own = ray.get_runtime_context().get_node_id()
        nodes = self._nodes(own)
        if not nodes:
            raise Refused(f"the cluster of Ray at {access.address} has no node with GPUs")
        self.secured = secured(access, [node["NodeManagerAddress"] for node in nodes], self._insecure)
        names, taken = names_of(nodes), self._in_use(nodes)
        if in_use := [name for node, name in zip(nodes, names, strict=True) if node["NodeID"] in taken]:
            raise Refused(f"the GPUs of {', '.join(in_use)} are in use by another job of this cluster of Ray")
        towards = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own)
        for number, (node, name) in enumerate(zip(nodes, names, strict=True)):
            changes = {"name": name if name != node["NodeManagerHostname"] else "", "transport": "ray"}
            actor = _actor(ray, node, msgspec.structs.replace(self._settings, towards=towards, **changes))
            line = self._lines[number] = Line(number, actor, self._done.put, ray.exceptions.ActorUnavailableError)
            line.go_on()
        return dict(enumerate(names))

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


def _connected(access: Access) -> Any:
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

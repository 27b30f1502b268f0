"""Messages over Ray, which starts an actor on every node (ray_actor) and carries calls to it, but judges nothing."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import re
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

import msgspec

from pytest_gpufleet.model.events import Secured
from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.nodes import ray_access
from pytest_gpufleet.nodes.agent_process import AgentSettings
from pytest_gpufleet.nodes.ray_actor import Relay, Taken, a_call_full
from pytest_gpufleet.nodes.transport import Arrived, Gone

JOIN_SECONDS = 30.0  # for nodes that are started together with this run
JOIN_TURN_SECONDS = 0.5
TAKE_SECONDS = 1.0  # that a call waits on its node for a message: it brings the Beat with it when it is made
AGAIN_SECONDS = 0.2  # before a call is repeated that Ray has lost
CALLS = 4  # at a time in an actor: one that waits, and those that bring something
NEVER = float("inf")
MOST_WORDS = 200  # characters of what Ray says


@dataclass
class _Line:
    """To one node. `unconfirmed`: messages that its actor has not confirmed, of which the first has the number `first`,
    and the next to be carried by a call the number `next`. `taken`: so many have come from there; `taking`: a call
    waits there for more. `again_at`: when calls are repeated that were lost. `over`: nothing comes any more; `ended`:
    since the agent has ended."""

    node: int
    name: str
    actor: Any
    unconfirmed: deque[bytes] = field(default_factory=deque)
    first: int = 0
    next: int = 0
    taken: int = 0
    taking: bool = False
    again_at: float = NEVER
    over: bool = False
    ended: bool = False

    def batch(self) -> tuple[int, list[bytes]]:
        """What the next call carries."""
        first, waiting = self.next, list(itertools.islice(self.unconfirmed, self.next - self.first, None))
        messages = a_call_full(waiting)
        self.next += len(messages)
        return first, messages

    def confirm(self, heard: int) -> None:
        while self.first < heard:
            self.unconfirmed.popleft()
            self.first += 1
        self.next = max(self.next, self.first)


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
        self._lines: dict[int, _Line] = {}
        self._guard = threading.Lock()  # of all lines
        self._done: queue.SimpleQueue[tuple[_Line, Any, bool]] = queue.SimpleQueue()
        self._ray: Any = None

    def start(self) -> Mapping[int, str]:
        access = ray_access.find(self._address)
        ray = self._ray = _connected(access)
        self.name = f"ray {ray.__version__}"
        own = ray.get_runtime_context().get_node_id()
        found = self._nodes(own)
        if not found:
            raise Refused(f"the cluster of Ray at {access.address} has no node with GPUs")
        self.secured = ray_access.secured(access, [node["NodeManagerAddress"] for node in found], self._insecure)
        towards = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own)
        for number, (node, name) in enumerate(zip(found, _names(found), strict=True)):
            told = {"name": name if name != node["NodeManagerHostname"] else "", "transport": self.name}
            settings = msgspec.structs.replace(self._settings, towards=towards, **told)
            line = self._lines[number] = _Line(number, name, _actor(ray, node, settings))
            self._take(line)
        return {line.node: line.name for line in self._lines.values()}

    def _nodes(self, own: str) -> list[Mapping[str, Any]]:
        """Those to start an agent on, in the order of their numbers: this machine's first, then by name."""
        until = time.monotonic() + JOIN_SECONDS
        while True:
            there = [node for node in self._ray.nodes() if node["Alive"]]
            usable = [node for node in there if self._settings.rehearse or node["Resources"].get("GPU")]
            if len(usable) >= (self._wanted or 1) or time.monotonic() > until:
                break
            time.sleep(JOIN_TURN_SECONDS)
        return sorted(usable, key=lambda node: (node["NodeID"] != own, natural(node["NodeManagerHostname"])))

    # ------------------------------------------------------------ calls

    def send(self, node: int, message: bytes, later: bool = False) -> None:
        with self._guard:
            line = self._lines.get(node)
            if line is None or line.over:
                return
            line.unconfirmed.append(message)
            if not later and line.again_at == NEVER:
                self._give(line)

    def _give(self, line: _Line) -> None:
        while line.next < line.first + len(line.unconfirmed):
            self._call(line, line.actor.give.remote(*line.batch()))

    def _take(self, line: _Line) -> None:
        line.taking = True
        self._call(line, line.actor.take.remote(line.taken, TAKE_SECONDS, *line.batch()), taking=True)

    def _again(self, line: _Line) -> None:
        line.again_at = NEVER
        if not line.taking:
            self._take(line)
        self._give(line)

    def _call(self, line: _Line, reference: Any, taking: bool = False) -> None:
        reference.future().add_done_callback(lambda future: self._done.put((line, future, taking)))

    def receive(self, timeout: float) -> list[Arrived | Gone]:
        until = time.monotonic() + timeout
        events: list[Arrived | Gone] = []
        while not events and (left := until - time.monotonic()) > 0:
            with self._guard:
                for line in self._lines.values():
                    if line.again_at <= time.monotonic():
                        self._again(line)
                soonest = min((line.again_at for line in self._lines.values()), default=NEVER)
            with suppress(queue.Empty):
                done = self._done.get(timeout=max(0.0, min(left, soonest - time.monotonic())))
                while True:
                    events += self._ended(*done)
                    done = self._done.get_nowait()
        return events

    def _ended(self, line: _Line, future: Any, taking: bool) -> list[Arrived | Gone]:
        from ray.exceptions import ActorUnavailableError

        error = future.exception()
        with self._guard:
            line.taking = line.taking and not taking
            if line.over:
                return []
            if isinstance(error, ActorUnavailableError):  # the call may have been run or not
                line.next = line.first
                line.again_at = time.monotonic() + AGAIN_SECONDS
                return []
            if error is not None:
                line.over = True
                return [Gone(line.node, f"Ray says of its agent: {_told(error)}")]
            if not taking:
                line.confirm(future.result())
                return []
            return self._taken(line, future.result())

    def _taken(self, line: _Line, answer: Taken) -> list[Arrived | Gone]:
        line.confirm(answer.heard)
        new = answer.messages[max(0, line.taken - answer.first) :]
        line.taken = max(line.taken, answer.first + len(answer.messages))
        events: list[Arrived | Gone] = [Arrived(line.node, message) for message in new]
        if answer.why:
            line.over = line.ended = True
            return [*events, Gone(line.node, answer.why)]
        if line.again_at == NEVER:
            self._again(line)
        return events

    # ------------------------------------------------------------ its end

    def close(self, timeout: float) -> dict[int, str]:
        ray, self._ray = self._ray, None
        if ray is None:
            return {}
        left = {line.node: line.name for line in self._lines.values() if not line.ended}

        def end() -> None:
            asked = {line.actor.end.remote(timeout / 2): line.node for line in self._lines.values() if not line.ended}
            answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout) if asked else ([], [])
            for reference in answered:
                with suppress(Exception):  # its actor is gone, and nobody knows about its agent
                    if not ray.get(reference, timeout=0):
                        left.pop(asked[reference], None)
            for line in self._lines.values():
                ray.kill(line.actor)
            ray.shutdown()

        ending = threading.Thread(target=end, name="gpufleet ray end", daemon=True)  # it waits for a head that is gone
        ending.start()
        ending.join(timeout)
        return dict.fromkeys(left, "nobody says that its agent has ended")


def natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    """By which names are sorted so that gf2 stands before gf10."""
    return tuple((part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name))


def _names(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
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
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    import ray

    told = logging.getLogger("ray")  # its warnings are of no use for whoever waits for a verdict
    told.addHandler(logging.NullHandler())
    told.propagate = False
    try:
        ray.init(address=access.address, log_to_driver=False, configure_logging=False)
        ray._private.worker._worker_logs_enabled = False  # what raylets report is printed all the same, page by page
    except Exception as error:
        raise Refused(f"the cluster of Ray at {access.address} cannot be joined: {_told(error)}") from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray's own would end the run without a report
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


def _told(error: BaseException) -> str:
    """In a few words: Ray writes many lines, and says in the last one what it was, and what it may have been."""
    lines = [line.strip() for line in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines() if line.strip()]
    return shorten(lines[-1], MOST_WORDS, placeholder=" ...") if lines else type(error).__name__

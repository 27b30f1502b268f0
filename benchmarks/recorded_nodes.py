"""Nodes that are not here: one process that dials in as so many agents. benchmarks/nodes.py
starts it, and says what it stands for.

Each has the evidence of a machine of 8x NVIDIA H200 as benchmarks/false_rejects.py makes them, of either revision
of the board, one of TEMPLATES with a name and GPUs of its own, in the form and the size of tests/recorded/h200x2-g.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import false_rejects
import zmq

from pytest_gpufleet.machine.health import Health
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.events import Check, HostFound, Judged, TopologyFound, recorded
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.place import GpuTopology
from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.nodes import messages as say, wire
from pytest_gpufleet.run.folder import EVIDENCE, JUNIT, REPORT, SUMMARY

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "tests" / "recorded" / "h200x2-g" / "evidence.jsonl"
PAGE = ROOT / "docs" / "results" / "2026-11-23-2x-h200" / "report.html"
SECONDS = 20.0  # for a node's own run; a real machine takes three minutes and more
TEMPLATES, SAMPLES, NAME = 24, 5, "@node@"
TIMES = false_rejects.GPUS // 2  # as many GPUs as the recorded machine has


def template(seed: int) -> tuple[bytes, list[Check]]:
    """The evidence of a healthy machine called NAME, of this version, and the checks of it."""
    by_chance = random.Random(seed)
    run = false_rejects.machine(by_chance, NAME, {figure.label: 0.0 for figure in false_rejects.figures("")}, 1.0)
    findings = [_sampled(each, by_chance) for each in run.record.findings if each.state != "missed"]
    lines, checks = [], []
    for text in RECORDED.read_text(encoding="utf-8").splitlines():
        event = json.loads(text)
        match event["event"]:
            case "run":
                nodes = codec.plain(run.record.run.nodes)
                event |= {"plugin": shipped().version, "host": NAME, "gpus_present": 8, "nodes": nodes}
            case "suite":
                event |= {"manifest": codec.plain(shipped())}
            case "topology":
                event = json.loads(recorded(TopologyFound(nodes=[run.record.topology]))[1])
            case "machine":
                event["nodes"][0]["host"]["name"] = NAME
            case "finding":
                continue
            case "fingerprint":
                first = event["fingerprints"][0]
                event["fingerprints"] = [{**first, "place": f"gpu{index}"} for index in range(false_rejects.GPUS)]
            case "telemetry":
                event["sample"]["gpus"] *= TIMES
            case "check_finished":
                event.pop("telemetry", None)  # which runs of today do not write
                if event["check"]["outcome"] == "failed":
                    event["check"] |= {"outcome": "passed", "message": "", "failed_by": ""}
                checks.append(codec.typed(event["check"], Check))
            case "verdict":
                lines += [recorded(Judged(finding=each))[1] for each in findings]
                event |= {"verdict": "ACCEPTED", "reasons": [], "exit_status": 0}
        lines.append(json.dumps(event))
    return "".join(f"{each}\n" for each in lines).encode(), checks


def _sampled(finding: Finding, by_chance: random.Random) -> Finding:
    values = finding.measurement.values.items()
    samples = {at: tuple(value * by_chance.gauss(1, 0.001) for _ in range(SAMPLES)) for at, value in values}
    return replace(finding, measurement=replace(finding.measurement, samples=samples))


class Node:
    """As an agent is towards its controller. `files`: what its own run leaves."""

    def __init__(self, number: int, socket: Any, evidence: bytes, checks: Sequence[Check]) -> None:
        self.socket, self._checks = socket, checks
        self._name = f"gf{number:04}"
        self._evidence = evidence.replace(NAME.encode(), self._name.encode())
        self._size = len(self._evidence)
        self._line = wire.Line(socket.send)
        self._began: float | None = None
        self._told = 0
        self.over = False
        self._send(say.DialIn(self._name, number, *DIALS))
        topology, machine = (
            codec.typed(json.loads(_line_of(self._evidence, kind))["nodes"][0], form)
            for kind, form in ((b'"topology"', GpuTopology), (b'"machine"', HostFound))
        )
        there = tuple(gpu.pci_bus_id for gpu in topology.gpus)
        self._send(say.Hello(f"SN-{self._name}", number, "eth0", topology, there, machine))

    def _send(self, message: say.Message) -> None:
        self._line.send(codec.packed(message))

    def turn(self, now: float) -> None:
        """Once a second: it is there, and which checks have ended since."""
        running = self._began is not None and not self.over
        due = min(len(self._checks), int(len(self._checks) * (now - (self._began or now)) / SECONDS))
        ended: list[say.CheckEnded | say.SuiteEnded] = []
        ended += [say.CheckEnded(each.id, each.outcome, each.seconds) for each in self._checks[self._told : due]]
        self._told = max(due, self._told)
        if running and due == len(self._checks):
            self.over = True
            sizes = {EVIDENCE: self._size, **{name: len(content) for name, content in LEFT.items()}}
            ended.append(say.SuiteEnded(0, "", f"{self._name}-20261122T000000Z", sizes, "ACCEPTED"))
        self._send(say.Pulse(time.time(), "test_3_memory.py::test_memory_bandwidth", tuple(ended)))

    def take_in(self, frame: bytes) -> bool:
        """Whether it was asked to end."""
        packed = self._line.take(frame)
        message = codec.unpacked(packed, say.ToAgent) if packed is not None else None
        if isinstance(message, say.Ask):
            self._send(say.Reply(message.number, codec.packed(self._answer(message.question))))
        return isinstance(message, say.End)

    def _answer(self, question: say.Asked) -> Any:
        match question:
            case say.RunSuite():
                self._began = time.monotonic()
                return 1
            case say.ReadFile(name, offset, most):
                content = self._evidence if name == EVIDENCE else LEFT[name]
                return content[offset : offset + most]
            case say.CheckHealth():
                return Health()
            case say.KillRanks():
                return {}
            case say.ReadHost(names):
                return dict.fromkeys(names)
        return ""


def _line_of(evidence: bytes, kind: bytes) -> bytes:
    return next(each for each in evidence.splitlines() if b'"event": ' + kind in each)


LEFT: Mapping[str, bytes] = {SUMMARY: b"{}", JUNIT: b"<testsuites/>", REPORT: PAGE.read_bytes()}
DIALS: Sequence[str] = ()  # what is installed there


def nodes(count: int, port: int, secret: bytes) -> Iterator[Node]:
    context = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, 2 * count + 64)
    made = [template(seed) for seed in range(TEMPLATES)]
    for number in range(count):
        socket = context.socket(zmq.DEALER)
        for option, value in wire.OPTIONS.items():
            socket.set(option, value)
        socket.routing_id = os.urandom(16)
        socket.curve_serverkey = wire.keys(secret, "head")[0]
        socket.curve_publickey, socket.curve_secretkey = wire.keys(secret, "node")
        socket.connect(f"tcp://127.0.0.1:{port}")
        yield Node(number, socket, *made[number % TEMPLATES])


def main(count: str, port: str, *dials: str) -> None:
    global DIALS
    DIALS = dials
    secret = os.read(0, wire.KEY_BYTES)
    poller, by_socket = zmq.Poller(), {}
    for node in nodes(int(count), int(port), secret):
        poller.register(node.socket, zmq.POLLIN)
        by_socket[node.socket] = node
    left, due = set(by_socket), time.monotonic()
    while left:
        for socket, _ in poller.poll(max(0, int(1000 * (due - time.monotonic())))):
            while socket.poll(0):
                if by_socket[socket].take_in(socket.recv()):
                    left.discard(socket)
        if time.monotonic() >= due:
            due = time.monotonic() + 1.0
            for socket in left:
                by_socket[socket].turn(due - 1.0)
    time.sleep(1.0)


if __name__ == "__main__":
    main(*sys.argv[1:])

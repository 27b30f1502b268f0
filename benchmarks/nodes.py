"""What a run on many nodes costs its controller: time and memory by the number of nodes, and a line through them.

    python benchmarks/nodes.py                  4, 8, 16 and 32 nodes, and what follows for 500
    python benchmarks/nodes.py 64

Every node is an agent, a process of this machine. Behind it is a recorded machine of 4x NVIDIA H200 with a name and
GPUs of its own, whose own run sends what that machine sent on 2026-11-21, as evidence of today, within 20 s. No rank is
started. The controller is `pytest --nodes N --gpus 4`, from the start of the agents to the report. Its own CPU time
counts, of all threads: the agents have the same processors.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from statistics import linear_regression
from typing import Any

import msgspec
import pytest

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.nodes import agent_process, cluster, transport
from pytest_gpufleet.nodes.agent_process import AgentSettings, OwnAgents
from pytest_gpufleet.plugin import report_files
from pytest_gpufleet.plugin.keys import RUN
from pytest_gpufleet.run import cluster_run, node_runs
from pytest_gpufleet.run.settings import Options

HERE = Path(__file__).parent
ROOT = HERE.parent
RECORDED = ROOT / "tests" / "recorded" / "h200x4-a" / "evidence.jsonl"
REPORT = ROOT / "docs" / "results" / "2026-11-23-2x-h200" / "report.html"
IDLE_SECONDS = 10.0
TO = 500
OWN, HEALTH = "the nodes' own runs", "health around a check"
# What is measured while the controller runs: the function that does it, by what it is called here.
WATCHED: dict[str, tuple[Any, str]] = {
    "start": (cluster.Cluster, "start"),
    "start the nodes' own runs": (cluster_run.ClusterRun, "start_alone"),
    OWN: (cluster_run.ClusterRun, "wait_alone"),
    "take in messages of nodes": (node_runs.NodeRuns, "listen"),
    "read their evidence": (node_runs.NodeRuns, "read"),
    HEALTH: (cluster_run.ClusterRun, "check_health"),
    "page of the report": (report_files, "write_report"),
}
# Tests between nodes, beside those that the suite has for what its nodes sent.
BETWEEN = """
import pytest
import nodes

pytestmark = pytest.mark.needs(nodes=2)

def test_lock(pytestconfig):
    nodes.lock(pytestconfig)

@pytest.mark.parametrize("number", range(20))
def test_health(number):
    pass

def test_idle():
    nodes.idle()
"""


class Figures:
    """CPU seconds, seconds and number of calls, by what was called. What a function calls that is watched too counts
    for both."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = defaultdict(float)
        self.wall: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.memory: dict[str, float] = {}

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.cpu[what] += time.process_time() - cpu
        self.wall[what] += time.perf_counter() - wall
        self.calls[what] += 1
        self.memory[what] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def watch(self, what: str, owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.of(what):
                return function(*args, **kwargs)

        setattr(owner, name, watched)


FIGURES = Figures()


def lock(config: pytest.Config) -> None:
    """As the first rank of all nodes does it: from here on their health is asked for around each check."""
    config.stash[RUN].lock()


def idle() -> None:
    with FIGURES.of("idle"):
        time.sleep(IDLE_SECONDS)


# ---------------------------------------------------------------- the nodes that are not here


def command(settings: AgentSettings) -> list[str]:
    """As agent_process.command, with a recorded machine."""
    return [sys.executable, str(HERE / "recorded_agent.py"), msgspec.json.encode(settings).decode()]


def transport_for(options: Options) -> transport.Transport:
    settings = cluster_run.settings_for(options)
    assert isinstance(options.nodes, int)
    agent_process.command = command
    nodes = [msgspec.structs.replace(settings, name=f"gf{number:04}", index=number) for number in range(options.nodes)]
    return transport.Transport(OwnAgents("local", "loopback", os.urandom(32), nodes), seconds=options.join)


def sent_by_a_node() -> tuple[list[str], list[str]]:
    """The evidence of a node's own run, as lines for any name, and the ids of its checks. Of the recorded machine, as
    one of this version, with what failed there as passed."""
    lines, checks = [], []
    for text in RECORDED.read_text(encoding="utf-8").replace("node-a", "@node@").splitlines():
        event = json.loads(re.sub(r"GPU-\d{4}", "GPU-@node@", text))
        match event["event"]:
            case "run":
                event |= {"plugin": shipped().version}
            case "suite":
                event |= {"manifest": codec.plain(shipped())}
            case "finding" if event["finding"]["state"] == "missed":
                continue
            case "check_finished":
                check = event["check"]
                checks.append(check["id"])
                if check["outcome"] == "failed":
                    event["check"] = {**check, "outcome": "passed", "message": "", "failed_by": ""}
            case "verdict":
                event |= {"verdict": "ACCEPTED", "reasons": [], "exit_status": 0}
        lines.append(json.dumps(event) + "\n")
    return lines, checks


def build(folder: Path) -> None:
    """Where the controller and all nodes run: checks by the names that the recorded machine knows, those between nodes,
    and what stands for pytest on a node."""
    lines, checks = sent_by_a_node()
    (folder / "recorded.jsonl").write_text("".join(lines), encoding="utf-8")
    shutil.copy(HERE / "recorded_suite.py", folder / "pytest.py")
    left = folder / "left"
    left.mkdir()
    shutil.copy(REPORT, left / "report.html")
    (left / "summary.json").write_text("{}")
    (left / "junit.xml").write_text("<testsuites/>")
    suite = folder / "acceptance"
    suite.mkdir()
    cases: dict[tuple[str, str], list[str]] = defaultdict(list)
    for check in checks:
        file, _, name = Path(check).name.partition("::")
        function, _, case = name.partition("[")
        cases[file, function].append(case.removesuffix("]"))
    for (file, function), ids in cases.items():
        with (suite / file).open("a") as source:
            if ids == [""]:
                source.write(f"def {function}():\n    pass\n\n")
            else:
                source.write("import pytest\n")
                source.write(f"@pytest.mark.parametrize('case', {ids!r}, ids={ids!r})\n")
                source.write(f"def {function}(case):\n    pass\n\n")
    for name in ("test_nodes_1_alike.py", "test_nodes_2_ports.py"):
        shutil.copy(ROOT / "acceptance" / name, suite)
    (suite / "test_nodes_9_controller.py").write_text(BETWEEN)
    (suite / "pytest.ini").write_text("[pytest]\n")


# ---------------------------------------------------------------- the controller


def controller(nodes: int, folder: Path, result: Path) -> None:
    """A whole run in this process, and its figures as JSON."""
    cluster_run.transport_for = transport_for
    sys.modules["nodes"] = sys.modules[__name__]
    for what, (owner, name) in WATCHED.items():
        FIGURES.watch(what, owner, name)
    os.chdir(folder)
    arguments = ["acceptance", f"--nodes={nodes}", "--gpus=4", "--fleet-dir=reports", "-q", "-p", "no:cacheprovider"]
    before = _resident()
    with FIGURES.of("all"):
        status = pytest.main(arguments)
    (report,) = Path("reports").glob("*/report.html")
    measured = {
        "status": int(status),
        "cpu": FIGURES.cpu,
        "wall": FIGURES.wall,
        "calls": FIGURES.calls,
        "memory": FIGURES.memory,
        "before": before,
        "page": report.stat().st_size / 1e6,
    }
    result.write_text(json.dumps(measured))


def _resident() -> float:
    """MiB"""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / (1 << 20)


def measured(nodes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as parent:
        folder, result = Path(parent, "run"), Path(parent, "result")
        folder.mkdir()
        build(folder)
        command = [sys.executable, __file__, str(nodes), "--controller", str(folder), str(result)]
        with Path(parent, "output").open("w+") as output:
            subprocess.run(command, stdout=output, stderr=output, check=False)
            if not result.exists():
                sys.exit(Path(parent, "output").read_text())
        return json.loads(result.read_text())


# What is printed of each number of nodes, and of TO by a line through them: a label, and how it is found.
ROWS: dict[str, Callable[[dict[str, Any]], float]] = {
    "start of the agents until all have said Hello, s": lambda measured: measured["wall"]["start"],
    "CPU of it, ms": lambda measured: 1e3 * measured["cpu"]["start"],
    "pulses and beats, CPU ms/s": lambda measured: 1e3 * measured["cpu"]["idle"] / IDLE_SECONDS,
    "the nodes' own runs, CPU s": lambda measured: measured["cpu"][OWN],
    "all messages of the nodes' own runs, CPU s": lambda measured: measured["cpu"]["take in messages of nodes"],
    "their evidence, CPU s": lambda measured: measured["cpu"]["read their evidence"],
    "health around a check, CPU ms": lambda measured: 1e3 * measured["cpu"][HEALTH] / measured["calls"][HEALTH],
    "the same by the clock, ms": lambda measured: 1e3 * measured["wall"][HEALTH] / measured["calls"][HEALTH],
    "page of the report, CPU s": lambda measured: measured["cpu"]["page of the report"],
    "all of the run, CPU s": lambda measured: measured["cpu"]["all"],
    "memory when all nodes have sent all, MiB": lambda measured: measured["memory"][HEALTH],
    "memory at most, MiB": lambda measured: measured["memory"]["all"],
    "report, MB": lambda measured: measured["page"],
}


def table(found: dict[int, dict[str, Any]]) -> Iterator[str]:
    last = f"{TO} by the line" if len(found) > 1 else ""
    yield f"| nodes | {' | '.join(map(str, found))} | {last} |"
    yield f"| --- |{' ---: |' * (len(found) + 1)}"
    for label, row in ROWS.items():
        values = [row(measured) for measured in found.values()]
        line = f"{_on_the_line(found, values):,.3g}" if last else ""
        yield f"| {label} | {' | '.join(f'{value:,.3g}' for value in values)} | {line} |"


def _on_the_line(nodes: Collection[int], values: Sequence[float]) -> float:
    slope, at_0 = linear_regression([*nodes], values)
    return slope * TO + at_0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nodes", nargs="*", type=int, default=[4, 8, 16, 32])
    parser.add_argument("--controller", nargs=2, type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.controller:
        controller(asked.nodes[0], *asked.controller)
        return
    print(*table({nodes: measured(nodes) for nodes in asked.nodes}), sep="\n")


if __name__ == "__main__":
    main()

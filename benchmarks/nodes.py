"""What a run on many nodes costs its controller: time, memory and the page.

    python benchmarks/nodes.py                  64, 500 and 1,000 nodes
    python benchmarks/nodes.py 64

The nodes are made up (recorded_nodes.py): another process dials in for all of them over the real wire, and sends what
runs of 20 s on machines of 8x NVIDIA H200 would. No rank is started. The controller is `pytest --nodes N --gpus 8`,
from the first node to the report. Its own CPU time counts, of all threads: the nodes have the same processors.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from pytest_gpufleet.nodes import cluster, launchers
from pytest_gpufleet.nodes.launchers import with_secret
from pytest_gpufleet.nodes.messages import DialIn
from pytest_gpufleet.nodes.wire import Transport
from pytest_gpufleet.plugin import report_files
from pytest_gpufleet.plugin.compat import RUN
from pytest_gpufleet.run import cluster_run, node_runs
from pytest_gpufleet.run.settings import Options

HERE = Path(__file__).parent
ROOT = HERE.parent
IDLE_SECONDS = 10.0
OWN, HEALTH = "the nodes' own runs", "health around a check"
# What is measured while the controller runs: the function that does it, by what it is called here.
WATCHED: dict[str, tuple[Any, str]] = {
    "start": (cluster.Cluster, "start"),
    "start the nodes' own runs": (cluster_run.ClusterRun, "start_alone"),
    OWN: (cluster_run.ClusterRun, "wait_alone"),
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
        self.memory[what] = _resident("VmHWM")

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


class MadeUpNodes:
    """In the place of OwnAgents. One process that stands for all of them, and none of whose nodes ends by itself."""

    name, secured, own = "made up", "loopback", ()

    def __init__(self, count: int, likeness: DialIn) -> None:
        self.secret, self._count, self._likeness = os.urandom(32), count, likeness

    def start(self, port: int) -> dict[int, str]:
        likeness = self._likeness
        expected = [likeness.version, likeness.package, likeness.suite, likeness.python]
        command = [sys.executable, str(HERE / "recorded_nodes.py"), str(self._count), str(port), *expected]
        self._process = with_secret(command, self.secret)
        return {number: f"gf{number:04}" for number in range(self._count)}

    def ended(self) -> dict[int, str]:
        return {}

    def close(self, timeout: float) -> dict[int, str]:
        self._process.wait(timeout)
        return {}


def transport_for(options: Options) -> Transport:
    assert isinstance(options.nodes, int)
    likeness = launchers.own_install(cluster_run.settings_for(options))
    return Transport(MadeUpNodes(options.nodes, likeness), seconds=600.0)


def build(folder: Path) -> None:
    """Where the controller runs: checks by the names that the recorded machine knows, and those between nodes."""
    import recorded_nodes  # here: it imports torch, which the controller does not have

    checks = [each.id for each in recorded_nodes.template(0)[1]]
    (folder / "checks").write_text(str(len(checks)))
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
    arguments = ["acceptance", f"--nodes={nodes}", "--gpus=8", "--fleet-dir=reports", "-q", "-p", "no:cacheprovider"]
    with FIGURES.of("all"):
        status = pytest.main(arguments)
    (report,) = Path("reports").glob("*/report.html")
    measured = {
        "status": int(status),
        "cpu": FIGURES.cpu,
        "wall": FIGURES.wall,
        "calls": FIGURES.calls,
        "memory": FIGURES.memory,
        "page": report.stat().st_size / 1e6,
        "checks": int(Path("checks").read_text()),
    }
    result.write_text(json.dumps(measured))


def _resident(which: str) -> float:
    """MiB, by the kernel: getrusage has what was before exec, too."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{which}:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]


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


# What is printed of each number of nodes: a label, and how it is found.
ROWS: dict[str, Callable[[dict[str, Any]], float]] = {
    "CPU until all have said Hello, s": lambda measured: measured["cpu"]["start"],
    "pulses and beats, CPU ms/s": lambda measured: 1e3 * measured["cpu"]["idle"] / IDLE_SECONDS,
    "a check of one machine, CPU ms": lambda measured: 1e3 * measured["cpu"][OWN] / measured["checks"],
    "of it their evidence, CPU ms": lambda measured: 1e3 * measured["cpu"]["read their evidence"] / measured["checks"],
    "health between nodes, a check, CPU ms": lambda measured: 1e3 * measured["cpu"][HEALTH] / measured["calls"][HEALTH],
    "the same by the clock, ms": lambda measured: 1e3 * measured["wall"][HEALTH] / measured["calls"][HEALTH],
    "page of the report, CPU s": lambda measured: measured["cpu"]["page of the report"],
    "all of the run, CPU s": lambda measured: measured["cpu"]["all"],
    "memory when all nodes have sent all, MiB": lambda measured: measured["memory"][OWN],
    "memory at most, MiB": lambda measured: measured["memory"]["all"],
    "report, MB": lambda measured: measured["page"],
}  # fmt: skip


def table(found: dict[int, dict[str, Any]]) -> Iterator[str]:
    yield f"| nodes | {' | '.join(map(str, found))} |"
    yield f"| --- |{' ---: |' * len(found)}"
    for label, row in ROWS.items():
        yield f"| {label} | {' | '.join(f'{row(measured):,.3g}' for measured in found.values())} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nodes", nargs="*", type=int, default=[64, 500, 1000])
    parser.add_argument("--controller", nargs=2, type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.controller:
        controller(asked.nodes[0], *asked.controller)
        return
    print(*table({nodes: measured(nodes) for nodes in asked.nodes}), sep="\n")


if __name__ == "__main__":
    main()

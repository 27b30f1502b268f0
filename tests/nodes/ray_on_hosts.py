"""A cluster of Ray on hosts that are not there, and runs on it that stop where something is done to a node."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import INNER, KEPT, REPORTS, FleetRun
from tests.nodes.hosts import Host, until

PATIENCE_SECONDS = 180.0  # far more than anything takes that is waited for here
GOODBYE_SECONDS = 10.0
PORT = 6379
TOKEN = "c0ffee" * 8
# No dashboard, no telling home, the least memory for objects, and nobody is killed for what memory others take.
RAY = {
    "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1",
}  # fmt: skip
MEMORY = str(80 << 20)
# What Ray itself runs on a node, by what stands in the command line. All else there is of a run.
OF_RAY = (
    "/ray/core/src/", "/ray/_private/", "/ray/autoscaler/", "/ray/dashboard/", "ray.scripts", "ray.util.client.server",
    "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::IDLE",
)  # fmt: skip
RELAY = "ray::Relay"
AGENT, RAYLET = "agent.main(", "/ray/core/src/ray/raylet/raylet"
SUITE = "test_inner.py"
COUNT = """
import ray, sys, time

ray.init(address=sys.argv[1], log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) != int(sys.argv[2]):
    time.sleep(0.1)
"""


@dataclass
class RayCluster:
    """`hosts`: the first is its head. `folder`: what Ray prints there, and the runs."""

    hosts: Sequence[Host]
    folder: Path
    # By the names of the hosts: Ray there, and its own variables.
    started: dict[str, tuple[subprocess.Popen[bytes], Mapping[str, str]]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{self.hosts[0].addresses[0]}:{PORT}"

    def start(self, hosts: Sequence[Host], extra: Mapping[str, Mapping[str, str]] | None = None) -> None:
        """Start Ray on these hosts, anew where it runs. `extra`: variables of single hosts, by their names."""
        for host in hosts:
            self.stop(host)
            self._begin(host, (extra or {}).get(host.name, {}))
            if host is self.hosts[0]:
                until("the head is there", lambda: self._has_joined(self.hosts[0]), PATIENCE_SECONDS)
        self._count()

    def _begin(self, host: Host, extra: Mapping[str, str]) -> None:
        where = ["--address", self.address]
        if host is self.hosts[0]:
            where = ["--head", "--port", str(PORT), "--include-dashboard", "false", "--disable-usage-stats"]
        own = ["--node-ip-address", host.addresses[0], "--num-cpus", "4", "--object-store-memory", MEMORY]
        process = host.start(
            sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *where, *own,
            environment={**KEPT, **RAY, **extra}, output=self.folder / f"ray-{host.name}.txt", folder=self.folder,
        )  # fmt: skip
        self.started[host.name] = process, extra

    def stop(self, host: Host) -> None:
        """End all that runs there. A raylet that is asked to says good-bye to the cluster."""
        host.signal(signal.SIGTERM, RAYLET)
        with suppress(AssertionError):
            until(f"the raylet of {host.name} has ended", lambda: not has_raylet(host), GOODBYE_SECONDS)
        host.signal(signal.SIGKILL)
        until(f"nothing runs on {host.name}", lambda: not host.processes(), PATIENCE_SECONDS)
        for session in host.folder.glob("session_2*"):
            shutil.rmtree(session)

    def _has_joined(self, host: Host) -> bool:
        """If not, it is begun again where Ray has given up: it waits 30 s for its raylet, however busy the machine."""
        process, extra = self.started[host.name]
        if process.poll() is not None:
            self.stop(host)
            self._begin(host, extra)
        return any(host.folder.glob("session_2*/sockets/raylet"))

    def _count(self) -> None:
        """Wait until Ray knows of as many nodes as there are: it may need 15 s to see that an earlier one is dead. Who
        counts ends with a head that is begun again."""
        counting = self._counting()

        def all_are_there() -> bool:
            nonlocal counting
            joined = all(self._has_joined(host) for host in self.hosts)
            if counting.poll():
                counting = self._counting()
            return joined and counting.poll() == 0

        until("Ray runs on all hosts", all_are_there, PATIENCE_SECONDS)

    def _counting(self) -> subprocess.Popen[bytes]:
        with (self.folder / "count.txt").open("ab") as output:
            return subprocess.Popen(
                self.hosts[0].inside(sys.executable, "-c", COUNT, self.address, len(self.hosts), folder=self.folder),
                env={**KEPT, **RAY}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    def rehearse(
        self, *checks: str, held: Iterable[str] = (), environment: Mapping[str, str] | None = None
    ) -> Rehearsal:
        """Start a run of these checks of tests/inner/stations.py, or of the suite, with two ranks a node, when Ray runs
        on all hosts (again). `held`: the stations where nobody may go on."""
        if without := [host for host in self.hosts if not has_raylet(host)]:
            self.start(without)
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        (folder / "pytest.ini").write_text("[pytest]\n")
        shutil.copy(INNER / "stations.py", folder / SUITE)
        for made in ("at", "held"):
            (folder / made).mkdir()
        for station in held:
            (folder / "held" / station).touch()
        process = self.hosts[0].start(
            sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rehearse=2", f"--nodes={len(self.hosts)}",
            f"--fleet-address={self.address}", f"--fleet-dir={REPORTS}",
            *(check if "/" in check else f"{SUITE}::test_{check}" for check in checks),
            environment={**KEPT, **RAY, **(environment or {})},
            output=folder / "out",
            folder=folder,
        )  # fmt: skip
        return Rehearsal(self, folder, process)

    def end_run(self) -> None:
        """Whatever a test that failed has left."""
        for host in self.hosts:
            host.signal(signal.SIGCONT)
            for pid, line in host.processes().items():
                if is_of_a_run(line):
                    os.kill(pid, signal.SIGKILL)


@dataclass
class Rehearsal:
    cluster: RayCluster
    folder: Path
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.time)

    def at(self, station: str, *hosts: Host, ranks: int = 1) -> None:
        """Wait until so many processes of each of these hosts stand there."""

        def are_there() -> bool:
            there = [path.name for path in (self.folder / "at").iterdir()]
            ended = self.process.poll()
            assert ended is None, f"it has ended with {ended}:\n{self.text}"
            return all(sum(name.startswith(f"{station} {host.name} ") for name in there) >= ranks for host in hosts)

        until(f"{', '.join(host.name for host in hosts)} at {station}", are_there, PATIENCE_SECONDS)

    def go(self, station: str) -> None:
        (self.folder / "held" / station).unlink()

    @property
    def text(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def who(self) -> list[str]:
        """The hosts of the ranks that took part in the last check."""
        return (self.folder / "who").read_text().split()

    def end(self) -> FleetRun:
        try:
            status = self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.text}") from None
        return FleetRun(status, self.text, self.folder)


def has_raylet(host: Host) -> bool:
    return any(RAYLET in line for line in host.processes().values())


def is_of_a_run(line: str) -> bool:
    """Whether it is the command line of anything beside Ray, but for the actor."""
    return not any(words in line for words in (*OF_RAY, RELAY))


def of_a_run(host: Host) -> list[str]:
    return [*filter(is_of_a_run, host.processes().values())]

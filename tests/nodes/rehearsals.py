"""Runs on hosts that are not there, which stop where something is done to a node: by srun, or by Ray."""

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import INNER, KEPT, REPORTS, FleetRun
from tests.nodes.hosts import Host, until

PATIENCE_SECONDS = 180.0  # far more than anything takes that is waited for here
GOODBYE_SECONDS = 10.0
SECRET = "c0ffee" * 8
PORT = 29411  # as launchers.PORT
AGENT = "agent.main("
SUITE = "test_inner.py"


@dataclass
class Rehearsal:
    """`shared`: the folder that all hosts see. `folder`: where the run was started, of each host its own. `tasks`: what
    was started, that of the head first."""

    hosts: Sequence[Host]
    shared: Path
    folder: Path
    tasks: list[subprocess.Popen[bytes]]

    def at(self, station, *hosts, ranks=1):
        """Wait until so many processes of each of these hosts stand there."""

        def are_there():
            there = [path.name for path in (self.shared / "at").iterdir()]
            ended = self.tasks[0].poll()
            assert ended is None, f"it has ended with {ended}:\n{self.text}"
            return all(sum(name.startswith(f"{station} {host.name} ") for name in there) >= ranks for host in hosts)

        until(f"{', '.join(host.name for host in hosts)} at {station}", are_there, PATIENCE_SECONDS)

    def go(self, station):
        (self.shared / "held" / station).unlink()

    @property
    def text(self):
        return self.says(self.hosts[0])

    def says(self, host):
        return (self.shared / f"out-{host.name}").read_text()

    @property
    def who(self):
        """The hosts of the ranks that took part in the last check."""
        return (self.shared / "who").read_text().split()

    def end(self):
        try:
            status = self.tasks[0].wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.text}") from None
        return FleetRun(status, self.text, self.folder)


def _lay_out(folder, held):
    shared = Path(tempfile.mkdtemp(dir=folder))
    for made in ("at", "held", "run"):
        (shared / made).mkdir()
    for station in held:
        (shared / "held" / station).touch()
    (shared / "run" / "pytest.ini").write_text("[pytest]\n")
    shutil.copy(INNER / "stations.py", shared / "run" / SUITE)
    return shared, shared / "run"


def _arguments(checks, nodes):
    chosen = [check if "/" in check else f"{SUITE}::test_{check}" for check in checks]
    return ["-p", "no:cacheprovider", "--rehearse=2", f"--nodes={nodes}", f"--fleet-dir={REPORTS}", *chosen]


@dataclass
class Srun:
    """Starts the same command on every host with the variables that `srun --ntasks-per-node=1 --kill-on-bad-exit=0`
    sets (man srun), each in a folder of its own. What a task's launcher on its host is, is a shell."""

    hosts: Sequence[Host]
    folder: Path
    name = "srun"

    def rehearse(self, *checks, held=(), of_host=None, absent=(), options=()):
        shared, folder = _lay_out(self.folder, held)
        tasks = []
        for number, host in enumerate(self.hosts):
            if host in absent:
                continue
            if number:
                host.put_over(folder, shutil.copytree(folder, shared / f"run-{host.name}"))
            variables = {
                "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(number), "SLURM_LOCALID": "0",
                "SLURM_STEP_NODELIST": f"gf[0-{len(self.hosts) - 1}]", "SLURM_STEP_NUM_TASKS": str(len(self.hosts)),
                "SLURM_STEP_TASKS_PER_NODE": f"1(x{len(self.hosts)})", "SLURMD_NODENAME": host.name,
                "GPUFLEET_SECRET": SECRET, "STATIONS": str(shared),
            }  # fmt: skip
            command = [sys.executable, "-m", "pytest", *_arguments(checks, len(self.hosts)), *options]
            task = host.start(
                "sh", "-c", '"$@"; exit $?', "sh", *command,
                environment={**KEPT, "TMPDIR": str(host.temporary), **variables, **(of_host or {}).get(host.name, {})},
                output=shared / f"out-{host.name}", folder=folder,
            )  # fmt: skip
            tasks.append(task)
        return Rehearsal(self.hosts, shared, folder, tasks)

    def end_run(self):
        """Whatever a test that failed has left."""
        for host in self.hosts:
            host.signal(signal.SIGKILL)

    def left(self, host):
        return [*host.processes().values()]


# ---------------------------------------------------------------- Ray
RAY_PORT = 6379
# No dashboard, no telling home, the least memory for objects, and nobody is killed for what memory others take.
RAY = {
    "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": SECRET, "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1",
}  # fmt: skip
# What Ray itself runs on a node, by what stands in the command line. All else there is of a run.
OF_RAY = (
    "/ray/core/src/", "/ray/_private/", "/ray/autoscaler/", "/ray/dashboard/", "ray.scripts", "ray.util.client.server",
    "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::IDLE", "ray::Holder",
)  # fmt: skip
RAYLET = "/ray/core/src/ray/raylet/raylet"


@dataclass
class RayCluster:
    """`hosts`: the first is its head. `folder`: what Ray prints there, and the runs."""

    hosts: Sequence[Host]
    folder: Path
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)  # by the names of the hosts
    name = "ray"

    @property
    def address(self):
        return f"{self.hosts[0].addresses[0]}:{RAY_PORT}"

    def start(self):
        self._begin(self.hosts[0])
        until("the head is there", lambda: self._has_joined(self.hosts[0]), PATIENCE_SECONDS)
        until("Ray runs on all hosts", lambda: all([*map(self._has_joined, self.hosts)]), PATIENCE_SECONDS)

    def _begin(self, host):
        where = ["--address", self.address]
        if host is self.hosts[0]:
            where = ["--head", "--port", str(RAY_PORT), "--temp-dir=/tmp/ray"]
            where += ["--include-dashboard", "false", "--disable-usage-stats"]
        own = ["--node-ip-address", host.addresses[0], "--num-cpus", "4", "--object-store-memory", str(80 << 20)]
        self.started[host.name] = host.start(
            sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *where, *own,
            environment={**KEPT, **RAY, "TMPDIR": str(host.temporary)}, folder=self.folder,
            output=self.folder / f"ray-{host.name}.txt",
        )  # fmt: skip

    def stop(self, host):
        """End all that runs there. A raylet that is asked to says good-bye to the cluster."""
        host.signal(signal.SIGTERM, RAYLET)
        with suppress(AssertionError):
            until(f"the raylet of {host.name} has ended", lambda: not has_raylet(host), GOODBYE_SECONDS)
        host.signal(signal.SIGKILL)
        until(f"nothing runs on {host.name}", lambda: not host.processes(), PATIENCE_SECONDS)
        for session in host.folder.glob("session_2*"):
            shutil.rmtree(session)

    def _has_joined(self, host):
        """If not, it is begun again where Ray has given up: it waits 30 s for its raylet, however busy the machine."""
        if host.name not in self.started or self.started[host.name].poll() is not None:
            self.stop(host)
            self._begin(host)
        return any(host.folder.glob("session_2*/sockets/raylet"))

    def rehearse(self, *checks, held=(), environment=None, options=()):
        """Start a run of these checks of tests/inner/stations.py with two ranks a node, in a folder that all share."""
        shared, folder = _lay_out(self.folder, held)
        process = self.hosts[0].start(
            sys.executable, "-m", "pytest", *_arguments(checks, len(self.hosts)), f"--fleet-address={self.address}",
            *options, environment={**KEPT, **RAY, "STATIONS": str(shared), **(environment or {})},
            output=shared / f"out-{self.hosts[0].name}", folder=folder,
        )  # fmt: skip
        return Rehearsal(self.hosts, shared, folder, [process])

    def end_run(self):
        """And Ray: it gives a host up that was cut off or frozen, and only some time later."""
        for host in self.hosts:
            host.signal(signal.SIGCONT)
            self.stop(host)

    def left(self, host):
        return [*filter(is_of_a_run, host.processes().values())]


def has_raylet(host):
    return any(RAYLET in line for line in host.processes().values())


def is_of_a_run(line):
    """Whether it is the command line of anything beside Ray."""
    return not any(words in line for words in OF_RAY)

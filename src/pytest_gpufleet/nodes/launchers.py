"""How agents are started: by whom, as which of the nodes, as what process; and whether all nodes have the same."""

import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from pytest_gpufleet import __version__
from pytest_gpufleet.machine.host import own_name
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.events import Secured
from pytest_gpufleet.model.hosts_file import expanded
from pytest_gpufleet.model.place import grouped
from pytest_gpufleet.model.suite import code, sum_of
from pytest_gpufleet.nodes.messages import DialIn
from pytest_gpufleet.world.engines import processes

PORT = 29411  # of the head, unless --fleet-head says another one
Environment = Mapping[str, str]


def _first_pod(environment: Environment, full_name: Callable[[], str] = socket.getfqdn) -> str:
    """Pods of an Indexed Job with a Service are called JOB-INDEX.SERVICE, unless they use the network of their host."""
    pod, _, domain = full_name().partition(".")
    job, _, index = pod.rpartition("-")
    return f"{job}-0.{domain}" if index == environment["JOB_COMPLETION_INDEX"] and domain else ""


@dataclass(frozen=True)
class Launcher:
    """Names of variables, but for its own, and for the host of the first process, as it is found."""

    name: str
    mark: str  # which of them only this launcher sets
    index: str  # of this process, 0 at the head
    count: str = ""  # of all, where the launcher says it
    here: str = ""  # how many there are on this node
    own_name: str = ""  # what it calls this node
    hosts: str = ""  # all of them, as Slurm writes names
    run: tuple[str, ...] = ()  # what it calls this run
    head: Callable[[Environment], str] = lambda environment: ""


# The first whose mark is there counts: launchers start launchers, torchrun within srun, mpirun within a job of Slurm.
# Slurm: man srun, OUTPUT ENVIRONMENT VARIABLES; not SLURM_NTASKS and SLURM_NODELIST, which a batch script has too, and
# not SLURM_LAUNCH_NODE_IPADDR, which is where srun was called. Open MPI: docs.open-mpi.org, "Environment variables that
# Open MPI sets". MPICH and Intel MPI: Hydra. Kubernetes: Indexed Job. torchrun: docs.pytorch.org, elastic/run.html.
LAUNCHERS = (
    Launcher("torchrun", "GROUP_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE",
             run=("TORCHELASTIC_RUN_ID",), head=lambda environment: environment.get("MASTER_ADDR", "")),
    Launcher("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
             "OMPI_COMM_WORLD_LOCAL_SIZE"),
    Launcher("mpirun", "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    Launcher("srun", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE",
             "SLURMD_NODENAME", "SLURM_STEP_NODELIST", ("SLURM_JOB_ID", "SLURM_STEP_ID"),
             lambda environment: next(expanded(environment["SLURM_STEP_NODELIST"], "SLURM_STEP_NODELIST"), "")),
    Launcher("PMIx", "PMIX_RANK", "PMIX_RANK", run=("PMIX_NAMESPACE",)),
    Launcher("Kubernetes", "JOB_COMPLETION_INDEX", "JOB_COMPLETION_INDEX", own_name="NODE_NAME", head=_first_pod),
    Launcher("pssh", "PSSH_NODENUM", "PSSH_NODENUM", "PSSH_NUMNODES", own_name="PSSH_HOST"),
    Launcher("torchrun", "MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
             head=lambda environment: environment["MASTER_ADDR"]),
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """This process among those of all nodes."""

    launcher: str
    index: int | None  # None where nobody says, as `count`
    count: int | None
    head: str
    port: int
    own_name: str = ""
    hosts: tuple[str, ...] = ()  # the names of all nodes, where they are known
    run: str = ""


def find(environment: Environment, head: str | None = None, index: int | None = None) -> Task | None:
    """None of a process alone. `head`, `index`: by options, which count more. Refused if nobody knows the head."""
    launcher = next((each for each in LAUNCHERS if each.mark in environment), Launcher("--fleet-head", "", ""))
    own_index = index if index is not None else _number(environment.get(launcher.index))
    count = _number(environment.get(launcher.count))
    if head is None and (own_index is None or count == 1):
        return None
    host, port = _place(head or launcher.head(environment))
    if not host:
        raise Refused(
            f"{launcher.name} does not say on which host task 0 is: --fleet-head HOST:PORT, the same on every node"
        )
    if own_index is None and _is_here(host):
        own_index = 0
    hosts = tuple(expanded(environment.get(launcher.hosts, ""), launcher.hosts))
    run = ".".join(environment[name] for name in launcher.run if name in environment)
    return Task(launcher.name, own_index, count, host, port, environment.get(launcher.own_name, ""), hosts, run)


def starts_several(environment: Environment) -> str:
    """The launcher that has started several processes on this node, of which each would make the same run; else ""."""
    for launcher in LAUNCHERS:
        here = re.sub(r"\(x\d+\)", "", environment.get(launcher.here, ""))  # "8(x16)" or "8(x2),4": man srun
        if any((_number(each) or 0) > 1 for each in here.split(",")):
            return launcher.name
    return "srun" if _number(environment.get("SLURM_LOCALID")) else ""


def own_address(host: str, others: Sequence[str]) -> str:
    """One by which the head reaches others: its name is often loopback on itself (127.0.1.1 in /etc/hosts)."""
    for name in (host, *others[:2]):
        for *_, place in _addresses(name):
            if not place[0].startswith("127.") and place[0] != "::1":
                return str(place[0])
    return "192.0.2.1"  # of nobody (RFC 5737): by the default route


def _place(text: str) -> tuple[str, int]:
    """Host and port of "HOST", "HOST:PORT", "[IPV6]:PORT" and an IPv6 address."""
    if text.count(":") > 1 and not text.startswith("["):
        return text, PORT
    match = re.fullmatch(r"\[?(.*?)\]?(?::([0-9]{1,5}))?", text)
    assert match is not None
    return match[1], int(match[2] or PORT)


def _is_here(host: str) -> bool:
    for family, kind, protocol, _, place in _addresses(host):
        with socket.socket(family, kind, protocol) as probe, suppress(OSError):
            probe.bind((place[0], 0, *place[2:]))
            return True
    return False


def _addresses(host: str) -> list[tuple[int, int, int, str, tuple[str, ...]]]:
    try:
        return socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)  # type: ignore[return-value]
    except OSError:
        return []


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() else None


# ---------------------------------------------------------------- agents as processes
# It has the sys.path of the process that starts it: the package may be importable by that alone.
BOOT = "import sys; sys.path[:] = sys.argv[2:]; from pytest_gpufleet.nodes import agent; agent.main(sys.argv[1])"


class AgentSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an agent knows before anything else; the secret comes by its standard input."""

    run_folder: str  # where the run was started; the agent and its ranks work there
    rehearse: int | None = None  # so many CPU ranks; else GPUs of the node, and all for None
    gpus: int | None = None
    keep_in: str = ""  # where it makes the folder of its node, "" for that of temporary files
    head: str = ""  # "HOST:PORT" where it dials in
    run: str = ""  # what its launcher calls this run
    towards: str = ""  # by which the node's own address and interface are found, "" for the host of `head`
    index: int | None = None  # its number as the launcher counts, None if nobody has given it one
    suite: tuple[str, ...] = ()  # files and folders that decide what is checked, for their hash
    likely: tuple[str, ...] = ()  # modules that ranks will need, imported while the node waits for others
    name: str = ""  # instead of the host's own
    join_seconds: float = 120.0  # so long it tries to reach the head
    alone_seconds: float = 30.0  # without a Beat for so long, it ends
    lifeline: bool = False  # it ends when its standard input does


def command(settings: AgentSettings) -> list[str]:
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    return [sys.executable, *flags, "-c", BOOT, msgspec.json.encode(settings).decode(), *sys.path]


def with_secret(command: Sequence[str], secret: bytes, **how: Any) -> subprocess.Popen[bytes]:
    """A process that gets the secret by its standard input, which ends when this process does. OSError as of Popen."""
    # Signals of the terminal are for the controller.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, **how)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already
        process.stdin.write(secret)
        process.stdin.flush()
    return process


def become(settings: AgentSettings, secret: bytes) -> NoReturn:
    """This process is the agent from here on, with its number, its standard error and its launcher."""
    reading, writing = os.pipe()
    os.write(writing, secret)
    os.close(writing)
    os.dup2(reading, 0)
    sys.stdout.flush()
    os.execv(sys.executable, command(settings))


class OwnAgents:
    """Agents as processes of this machine, which end with this one. `own`: whose end is seen here; `name`: "srun"."""

    def __init__(self, name: str, secured: Secured, secret: bytes, settings: Sequence[AgentSettings]) -> None:
        self.name, self.secured, self.secret = name, secured, secret
        self._settings = {each.index or 0: each for each in settings}
        self.own = tuple(self._settings)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, port: int) -> Mapping[int, str]:
        """The names of those that were started, which dial in at this port. Refused if there is nothing to start on."""
        for index, settings in self._settings.items():
            reached = msgspec.structs.replace(settings, head=f"127.0.0.1:{port}", lifeline=True)
            self._processes[index] = with_secret(command(reached), self.secret)
        return {index: settings.name for index, settings in self._settings.items()}

    def ended(self) -> dict[int, str]:
        """How each ended of which nothing is left, as it goes on where "node 3 is lost" ends."""
        ends = ((index, process.poll()) for index, process in self._processes.items())
        return {index: f"its agent died {processes.exit_summary(end)}" for index, end in ends if end is not None}

    def close(self, timeout: float) -> dict[int, str]:
        """End all of them, by force at the end of that time. Those that cannot be ended, and why."""
        until = time.monotonic() + timeout
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic() - 2.0))  # to kill it
        alive = [process.pid for process in self._processes.values() if process.poll() is None]
        started = set(alive).union(*map(processes.descendants, alive))
        processes.end(lambda: {*filter(processes.look, started)}, max(0.1, until - time.monotonic()))
        left = {index: process.pid for index, process in self._processes.items() if process.poll() is None}
        return {index: f"process {pid} {processes.trouble(pid)}".rstrip() for index, pid in left.items()}


# ---------------------------------------------------------------- whether all nodes have what carries a run
# Else they measure something else under the same name. What is measured (torch, CUDA, NCCL, driver) a check compares.

# What has to be the same, and how it is described where it is not.
PARTS = {
    "python": "Python {}", "version": "pytest-gpufleet {}", "package": "other files of pytest-gpufleet",
    "suite": "other checks, conftest, ini file or limits",
}  # fmt: skip
EMPTY = "empty"
NO_CHECKS = "no checks where this run has them: the folder is empty there, or not mounted"
NO_FOLDER = "the folder in which this run was started is not there, or closed"


def suite(folder: Path, sources: Iterable[str]) -> str:
    """Of the files, and of the Python files below the folders, that `sources` name as pytest takes them, seen from
    `folder`, and of the conftest files above. "" where that folder is not, EMPTY where there is nothing of them."""
    if not os.access(folder, os.X_OK):
        return ""
    found = {folder / source.partition("::")[0] for source in sources}
    files = [path for place in found for path in ([*_python_files(place)] or [place])]
    if found and not any(map(Path.is_file, files)):
        return EMPTY
    above = {up for place in found for up in place.parents if up.is_relative_to(folder) or up == place.parent}
    return sum_of(folder, [*files, *(path for parent in above for path in parent.glob("conftest.py"))])


def _python_files(folder: Path) -> Iterator[Path]:
    """Not those of hidden folders, into which pytest does not look either: an environment may be in one."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in names if name.endswith(".py"))


def own_install(settings: AgentSettings) -> DialIn:
    """Of this process: a node, or the controller, which the nodes are held against."""
    checks, python = suite(Path(settings.run_folder), settings.suite), platform.python_version()
    return DialIn(settings.name or own_name(), settings.index, __version__, code(), checks, python)


def refuse_others(own: DialIn, nodes: Mapping[str, DialIn]) -> None:
    """Refused if any of these nodes, by their names, has another installation than this process."""
    if alike := grouped((differing, name) for name, node in nodes.items() if (differing := _differences(own, node))):
        found = "; ".join(f"{', '.join(names)}: {differing}" for differing, names in alike.items())
        raise Refused(
            f"not all nodes have what this one has (pytest-gpufleet {own.version}, Python {own.python}): {found}. "
            "Install the same on all of them"
        )


def _differences(own: DialIn, other: DialIn) -> str:
    parts = {part: text for part, text in PARTS.items() if getattr(own, part) != getattr(other, part)}
    if "version" in parts:
        parts.pop("package", None)  # which goes without saying
    if "suite" in parts:
        parts["suite"] = {"": NO_FOLDER, EMPTY: NO_CHECKS}.get(other.suite, parts["suite"])
    return ", ".join(text.format(getattr(other, part)) for part, text in parts.items())

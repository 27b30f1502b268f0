"""Who started this process on one of many nodes, by the variables that each launcher sets: as which of them, of how
many, and where the first one is, which is the head of the run."""

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.hosts_file import expanded

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
    """The task that this process is; None if no launcher has started it as one of several. `head` and `index`: what
    --fleet-head and --fleet-index say, which count more. Refused if nobody says where the head is."""
    found = next((each for each in LAUNCHERS if each.mark in environment), None)
    variables = environment if found else {}
    launcher = found or Launcher("--fleet-head", "", "")
    own_index = index if index is not None else _number(variables.get(launcher.index))
    count = _number(variables.get(launcher.count))
    if head is None and (own_index is None or count == 1):
        return None
    host, port = _place(head or (found.head(environment) if found else ""))
    if not host:
        raise Refused(
            f"{launcher.name} does not say on which host task 0 is: --fleet-head HOST:PORT, the same on every node"
        )
    if own_index is None and _is_here(host):
        own_index = 0
    hosts = tuple(expanded(variables.get(launcher.hosts, ""), launcher.hosts))
    run = ".".join(variables[name] for name in launcher.run if name in variables)
    return Task(launcher.name, own_index, count, host, port, variables.get(launcher.own_name, ""), hosts, run)


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

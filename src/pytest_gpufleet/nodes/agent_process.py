"""How the agent of a node is started, as a process or in the place of this one, and whether all nodes have the same."""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from pytest_gpufleet import __version__
from pytest_gpufleet.machine.host import own_name
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.events import Secured
from pytest_gpufleet.model.place import grouped
from pytest_gpufleet.model.suite import code, sum_of
from pytest_gpufleet.nodes.messages import DialIn
from pytest_gpufleet.world.engines import processes

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
    towards: str = "127.0.0.1"  # by which the node's own address and interface are found; loopback: all on one machine
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
    """Starts agents as processes of this machine, which end with this one: all, or that of this host where a launcher
    starts the others. `own`: those whose end is seen here, by the numbers in `settings`; `name`: "local", "srun"."""

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
        found = {index: process.poll() for index, process in self._processes.items()}
        return {
            index: f"its agent died {processes.exit_summary(end)}" for index, end in found.items() if end is not None
        }

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
#
# Else they do not understand each other, or measure something else under the same name. What is measured (torch, CUDA,
# NCCL, driver) is compared by a check.

# What has to be the same, and how it is described where it is not.
PARTS = {
    "python": "Python {}", "version": "pytest-gpufleet {}", "package": "other files of pytest-gpufleet",
    "suite": "other checks, conftest, ini file or limits",
}  # fmt: skip
EMPTY = "empty"
NO_CHECKS = "no checks where this run has them: the folder is empty there, or not mounted"
NO_FOLDER = "the folder in which this run was started is not there, or closed"


def suite(folder: Path, sources: Iterable[str]) -> str:
    """Of the files, and of all Python files below the folders, that `sources` name as pytest takes them, seen from
    `folder`, and of the conftest files that pytest reads on the way to them. What is not there on a node makes it
    another one. "" where that folder is not, EMPTY where there is nothing of them."""
    if not os.access(folder, os.X_OK):
        return ""
    found = {folder / source.partition("::")[0] for source in sources}
    if found and not any(place.is_file() or any(_python_files(place)) for place in found):
        return EMPTY
    files = [path for place in found for path in ([*_python_files(place)] or [place])]
    above = {parent for place in found for parent in place.parents if parent.is_relative_to(folder)}
    beside = {place.parent for place in found}
    return sum_of(folder, [*files, *(path for parent in above | beside for path in parent.glob("conftest.py"))])


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

"""How the agent of a node is started: a process of its own, with one end of a socket pair."""

import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from pytest_gpufleet.world.engines.channel import UnblockedEnd

# Whole messages over a stream socket, of which neither side ever waits for the other.
#
# A frame is a mark, the length of the message in 8 bytes, and the message.

MARK = b"gpfl"
HEADER = struct.Struct("!4sQ")
MOST_BYTES = 4 << 30  # of a message


class Frames(UnblockedEnd):
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end, HEADER, (MARK,), MOST_BYTES)

    def send(self, message: bytes) -> None:
        self._unsent += HEADER.pack(MARK, len(message))  # by itself: a message may be large, and is copied once
        super().send(message)


# The sys.path of whoever starts it first: the package may be importable by that alone.
BOOT = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from pytest_gpufleet.nodes import agent; agent.main(int(sys.argv[1]), sys.argv[2])"
)


class AgentSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an agent is told before anything else.

    `rehearse`: so many CPU ranks; else `gpus` of the node's GPUs, None for all. `run_folder`: where the run was
    started; the agent and its ranks work there. `keep_in`: where it makes the folder of its node, "" for that of
    temporary files. `towards`: the controller's address, by which the node's own address and interface are found;
    loopback if all nodes are on one machine. `transport`: "local" or "ray". `suite`: files and folders that decide what
    is checked, for their hash. `likely`: modules that ranks will need, imported while the node waits for others.
    `name`: instead of the host's own. `alone_seconds`: without a Beat for so long, it ends.
    """

    run_folder: str
    rehearse: int | None = None
    gpus: int | None = None
    keep_in: str = ""
    towards: str = "127.0.0.1"
    transport: str = "local"
    suite: tuple[str, ...] = ()
    likely: tuple[str, ...] = ()
    name: str = ""
    alone_seconds: float = 30.0


@dataclass(frozen=True)
class AgentProcess:
    """`connection` carries messages.ToAgent there and messages.FromAgent back, packed."""

    process: subprocess.Popen[bytes]
    connection: Frames


def start(settings: AgentSettings, environment: Mapping[str, str] | None = None) -> AgentProcess:
    """Does not wait for it to say Hello. `environment`: this process's own if None. OSError if it does not start."""
    ours, theirs = socket.socketpair()
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    with theirs:
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", BOOT, str(theirs.fileno()), msgspec.json.encode(settings), *sys.path],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=environment,
            start_new_session=True,  # signals of the terminal are for the controller
        )
    return AgentProcess(process, Frames(ours))

"""What the controller of a run and the agent of a node send each other, whatever carries it.

The controller asks and commands, the agent answers and reports what happens on its node. What ranks are sent and send
back are bytes here, which neither side opens on the way.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from pytest_gpufleet.machine.health import Health
from pytest_gpufleet.machine.rdma import Perftest
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.events import HostFound, Outcome, VerdictWord
from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.world.engines.protocol import Answer, Death, Trace


class Message(msgspec.Struct, frozen=True, tag_field="is", omit_defaults=True):
    """Everything that is sent in either direction."""


# ---------------------------------------------------------------- from the controller


class Beat(Message, frozen=True, tag="beat"):
    """The controller is there; once in BEAT_SECONDS."""


BEAT, BEAT_SECONDS = codec.packed(Beat()), 1.0


class Listening:
    """`seconds` that this process has listened. It reads no clock.

    A process that is frozen (SIGSTOP, a debugger, a host that swaps) hears nobody, and what was sent meanwhile still
    lies in its buffers. So of the time between two looks no more counts than `longest`, which it waits between them.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._looked: float | None = None
        self.seconds = 0.0

    def look(self, now: float) -> None:
        """This process reads, at `now`, all that has come."""
        if self._looked is not None:
            self.seconds += min(max(0.0, now - self._looked), self._longest)
        self._looked = now


class StartRanks(Message, frozen=True, tag="start ranks"):
    """`specs`: the RankSpecs of this node, pickled: they hold a function. `init_method` comes with a later call."""

    specs: bytes


class Submit(Message, frozen=True, tag="submit"):
    """A parcel for some ranks of this node, once for all of them."""

    ranks: tuple[int, ...]
    parcel: bytes


OVER = "the run is over"


class End(Message, frozen=True, tag="end"):
    """Kill the ranks, free the GPUs, and end. `why`: for the agent's log, and if it is not OVER for its user."""

    why: str = ""


# ---------------------------------------------------------------- questions, each with the type of its answer


class Question(msgspec.Struct, frozen=True, tag_field="asks", omit_defaults=True):
    """What an agent is asked, or is to do and to report when it is done. `answer`: the type of what it answers."""

    answer: ClassVar[Any]


class Examine(Question, frozen=True, tag="examine"):
    """What these ranks are doing: see Engine.examine."""

    answer = dict[int, Trace]
    ranks: tuple[int, ...]


class KillRanks(Question, frozen=True, tag="kill ranks"):
    """See Engine.kill."""

    answer = dict[int, str]
    timeout: float


class Rendezvous(Question, frozen=True, tag="rendezvous"):
    """An address of this node, with a port that is free, at which the ranks of all nodes can meet: "tcp://..."."""

    answer = str


class Door(msgspec.Struct, frozen=True):
    """Where a node answers who connects, by `token`, which no other node has."""

    interface: str
    address: str
    port: int
    token: bytes


class Listen(Question, frozen=True, tag="listen"):
    """Have a Door on each interface that NCCL or Gloo uses on this node, for a while."""

    answer = tuple[Door, ...]
    token: bytes


class Connect(Question, frozen=True, tag="connect"):
    """What keeps this node from reaching others, by their numbers: see network.connect."""

    answer = dict[int, str]
    nodes: Mapping[int, tuple[Door, ...]]


class Serve(Question, frozen=True, tag="serve"):
    """Have a server of perftest for one client on each of these RDMA ports ("mlx5_0/1"), also several on one: the
    address and the TCP ports at which they listen, or why one does not."""

    answer = tuple[str, tuple[int | str, ...]]
    test: Perftest
    ports: tuple[str, ...]


class Write(Question, frozen=True, tag="write"):
    """What each of these RDMA ports reaches that writes to this address and TCP port, or why it cannot."""

    answer = tuple[float | str, ...]
    test: Perftest
    to: tuple[tuple[str, str, int], ...]


class ReadHost(Question, frozen=True, tag="host"):
    """These facts of the host at this moment: see Node.host."""

    answer = dict[str, Any]
    names: tuple[str, ...]


class Lock(Question, frozen=True, tag="lock"):
    """Make the GPUs of this node the run's own; "" or who holds one."""

    answer = str


class CheckHealth(Question, frozen=True, tag="health"):
    """What got worse since the last time: see health.Guard."""

    answer = Health
    failed: bool = False


class RunSuite(Question, frozen=True, tag="run suite"):
    """Start a run of this node alone, as `python -m pytest` with these arguments in this folder, from which paths among
    them count. Its reports go where the agent keeps them: --fleet-dir is added. Answered when its process is there;
    each check that ends comes with a Pulse, its end as SuiteEnded. `variables`: that are to be set for it."""

    answer = int  # the number of its process
    arguments: tuple[str, ...]
    folder: str
    variables: Mapping[str, str] = {}


class ReadFile(Question, frozen=True, tag="read file"):
    """A part of a file below the folder of the node's own run; fewer bytes at its end, none behind it. An agent that is
    ended removes that folder if all its files were read to their ends."""

    answer = bytes
    name: str
    offset: int
    most: int


Asked = (
    Examine | KillRanks | Rendezvous | Listen | Connect | Serve | Write | ReadHost | Lock | CheckHealth | RunSuite
    | ReadFile
)  # fmt: skip


class Ask(Message, frozen=True, tag="ask"):
    """A question, answered by the Reply of this number."""

    number: int
    question: Asked


# ---------------------------------------------------------------- from the agent


class DialIn(Message, frozen=True, tag="dial in"):
    """The first message of an agent, which every version can read: who it is (see AgentSettings) and what is installed
    there. `package` and `suite`: SHA-256 over the files."""

    name: str
    index: int | None = None
    version: str = ""
    package: str = ""
    suite: str = ""
    python: str = ""


class Hello(Message, frozen=True, tag="hello"):
    """What an agent has found on its node. `interface`: by which this node reaches the controller, "" if none has its
    address. `topology`: of the GPUs that the run is to use. `present`: the PCI bus ids of all."""

    serial: str | None
    pid: int
    interface: str
    topology: GpuTopology
    present: tuple[str, ...]
    machine: HostFound


class CheckEnded(msgspec.Struct, frozen=True):
    """A check of the node's own run."""

    check: str
    outcome: Outcome
    seconds: float


class Pulse(Message, frozen=True, tag="pulse"):
    """The node is there; once a second. `check`: what its own run is at. `ended`: which of its checks have ended since
    the last one."""

    clock: float = 0.0
    check: str = ""
    ended: tuple[CheckEnded, ...] = ()


class SuiteEnded(Message, frozen=True, tag="suite ended"):
    """`output`: the end of what its process printed. `files`: what its folder holds, with sizes in bytes. `verdict` and
    `reasons`: as its evidence has them, None if it died before."""

    exit_status: int
    output: str
    run: str  # the name of its folder; "" if there is none
    files: Mapping[str, int]
    verdict: VerdictWord | None = None
    reasons: tuple[str, ...] = ()
    trouble: str = ""  # what it died of, where that is seen from outside


class Reply(Message, frozen=True, tag="reply"):
    """To the Ask of this number: `answer` is packed (codec). `trouble`: why there is none."""

    number: int
    answer: bytes = b""
    trouble: str = ""


class Ending(Message, frozen=True, tag="ending"):
    """The last message of an agent that ends by itself."""

    why: str


ToAgent = Beat | StartRanks | Submit | Ask | End
FromAgent = Hello | Pulse | Answer | Death | SuiteEnded | Reply | Ending

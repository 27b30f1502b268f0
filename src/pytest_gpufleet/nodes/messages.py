"""What the controller of a run and the agent of a node send each other. What goes to ranks and back is bytes here."""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from pytest_gpufleet.machine.health import Health
from pytest_gpufleet.machine.rdma import Perftest
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.events import HostFound, Outcome, VerdictWord
from pytest_gpufleet.model.place import GpuTopology
from pytest_gpufleet.world.call import Answer, Death, Trace


class Message(msgspec.Struct, frozen=True, tag_field="is", omit_defaults=True):
    """Everything that is sent in either direction."""


# ---------------------------------------------------------------- from the controller


class Beat(Message, frozen=True, tag="beat"):
    """The controller is there; once in BEAT_SECONDS."""


BEAT, BEAT_SECONDS = codec.packed(Beat()), 1.0


class Listening:
    """`seconds` that this process has listened. While it is frozen it hears nobody: no more counts than `longest`."""

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
    specs: bytes  # the RankSpecs of this node, pickled: they hold a function. `init_method` comes with a later call


class Submit(Message, frozen=True, tag="submit"):
    ranks: tuple[int, ...]
    parcel: bytes


OVER = "the run is over"


class End(Message, frozen=True, tag="end"):
    """To an agent: end, `why` for its log, and unless OVER for its user. From one that ends by itself: its last."""

    why: str = ""


# ---------------------------------------------------------------- questions, each with the type of its answer


class Question(msgspec.Struct, frozen=True, tag_field="asks", omit_defaults=True):
    """What an agent is asked, or is to do and to report when it is done. `answer`: the type of what it answers."""

    answer: ClassVar[Any]


class Examine(Question, frozen=True, tag="examine"):
    answer = dict[int, Trace]  # as Engine.examine
    ranks: tuple[int, ...]


class KillRanks(Question, frozen=True, tag="kill ranks"):
    answer = dict[int, str]  # as Engine.kill
    timeout: float


class Rendezvous(Question, frozen=True, tag="rendezvous"):
    answer = str  # "tcp://ADDRESS:PORT": a port of this node that is free, at which the ranks of all nodes can meet


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
    answer = dict[int, str]  # what keeps this node from reaching others, by their numbers
    nodes: Mapping[int, tuple[Door, ...]]


class Serve(Question, frozen=True, tag="serve"):
    """Have a server of perftest on each of these RDMA ports, for one client: address and TCP ports, or why not."""

    answer = tuple[str, tuple[int | str, ...]]
    test: Perftest
    ports: tuple[str, ...]


class Write(Question, frozen=True, tag="write"):
    answer = tuple[float | str, ...]  # what each RDMA port reaches that writes to an address and TCP port, or why not
    test: Perftest
    to: tuple[tuple[str, str, int], ...]


class ReadHost(Question, frozen=True, tag="host"):
    answer = dict[str, Any]  # these facts of the host at this moment
    names: tuple[str, ...]


class Lock(Question, frozen=True, tag="lock"):
    answer = str  # "" if the GPUs of this node are this run's own from now on, else who holds one


class CheckHealth(Question, frozen=True, tag="health"):
    answer = Health  # what got worse since the last time
    failed: bool = False


class RunSuite(Question, frozen=True, tag="run suite"):
    """Start a run of this node alone; --fleet-dir is added. Checks that end, and then the run, come with a Pulse."""

    answer = int  # the number of its process, when that is there
    arguments: tuple[str, ...]
    folder: str  # from which paths among them count
    variables: Mapping[str, str] = {}  # that are to be set for it


class ReadFile(Question, frozen=True, tag="read file"):
    """A part of a file in the folder of the node's own run, which is removed in the end if all was read."""

    answer = bytes  # fewer at its end, none behind it
    name: str
    offset: int
    most: int


Asked = (
    Examine | KillRanks | Rendezvous | Listen | Connect | Serve | Write | ReadHost | Lock | CheckHealth | RunSuite
    | ReadFile
)  # fmt: skip


class Ask(Message, frozen=True, tag="ask"):
    number: int  # of the Reply to it
    question: Asked


# ---------------------------------------------------------------- from the agent


class DialIn(Message, frozen=True, tag="dial in"):
    """The first message, which every version can read: who it is, what is installed there (SHA-256 over files)."""

    name: str
    index: int | None = None
    version: str = ""
    package: str = ""
    suite: str = ""
    python: str = ""


class Hello(Message, frozen=True, tag="hello"):
    """What an agent has found on its node."""

    serial: str | None
    pid: int
    interface: str  # by which this node reaches the controller, "" if none has its address
    topology: GpuTopology  # of the GPUs that the run is to use
    present: tuple[str, ...]  # the PCI bus ids of all
    machine: HostFound


class CheckEnded(msgspec.Struct, frozen=True, tag="check"):
    check: str
    outcome: Outcome
    seconds: float


class SuiteEnded(msgspec.Struct, frozen=True, tag="suite", omit_defaults=True):
    exit_status: int
    output: str  # the end of what its process printed
    run: str  # the name of its folder; "" if there is none
    files: Mapping[str, int]  # what its folder holds, with sizes in bytes
    verdict: VerdictWord | None = None  # as its evidence has it; None if it died before
    reasons: tuple[str, ...] = ()
    trouble: str = ""  # what it died of, where that is seen from outside


class Pulse(Message, frozen=True, tag="pulse"):
    """The node is there; once a second."""

    clock: float = 0.0
    check: str = ""  # what its own run is at
    ended: tuple[CheckEnded | SuiteEnded, ...] = ()  # since the last one: checks of its own run, or the run


class Reply(Message, frozen=True, tag="reply"):
    number: int  # of the Ask
    answer: bytes = b""  # packed (codec)
    trouble: str = ""  # why there is none


ToAgent = Beat | StartRanks | Submit | Ask | End
FromAgent = Hello | Pulse | Answer | Death | Reply | End

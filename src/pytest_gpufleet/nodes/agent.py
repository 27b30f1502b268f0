"""The agent of a node: a process that owns its ranks, its GPUs and its own run, and does what the controller tells it.

It never waits: what may take its time is done aside, so that it goes on to say that the node is there, and notices
that its controller is not.
"""

import os
import queue
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from pytest_gpufleet.machine.host import own_name
from pytest_gpufleet.model import codec
from pytest_gpufleet.nodes import interfaces, messages as say, own_node, ranks_here, same_install, suite_process, wire
from pytest_gpufleet.nodes.agent_process import AgentSettings
from pytest_gpufleet.nodes.own_node import OwnNode
from pytest_gpufleet.nodes.ranks_here import RanksHere
from pytest_gpufleet.nodes.suite_process import SuiteProcess
from pytest_gpufleet.world.engines import processes, rank_files
from pytest_gpufleet.world.engines.local import LocalEngine


class Aside:
    """Work by the name of its thread: in its order there, beside all other threads. What is to follow it is done by
    whoever calls `take_in`, for which a selector wakes when there is something."""

    def __init__(self) -> None:
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._unfinished: Counter[str] = Counter()
        self._finished: queue.SimpleQueue[tuple[str, Future[Any], Callable[[Any], None]]] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._bell

    def idle(self, thread: str) -> bool:
        return not self._unfinished[thread]

    def do(self, thread: str, work: Callable[[], Any], then: Callable[[Any], None] = lambda result: None) -> None:
        self._threads.setdefault(thread, ThreadPoolExecutor(1, thread_name_prefix=f"gpufleet {thread}"))
        self._unfinished[thread] += 1

        def tell(future: Future[Any]) -> None:
            self._finished.put((thread, future, then))
            os.eventfd_write(self._bell, 1)

        self._threads[thread].submit(work).add_done_callback(tell)

    def take_in(self) -> None:
        """Raises what work has raised."""
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return
        while not self._finished.empty():
            thread, future, then = self._finished.get()
            self._unfinished[thread] -= 1
            then(future.result())


PULSE_SECONDS = 1.0
LONGEST_TURN_SECONDS = 2 * PULSE_SECONDS
SUITE_SECONDS = 0.2  # between two looks at what its own run has written
KILL_SECONDS = 5.0  # for all that was started here to be gone
FAREWELL_SECONDS = 1.0  # for its last message to be taken
REFUSED_SECONDS = 45.0  # of connections that are closed at once: the head may be at its begin, or at its end
PREFIX, LOG = "gpufleet-node-", "agent.log"
KEPT_SECONDS = 24 * 3600.0  # the folder of an agent that was killed: it says why, and what its node had done by then
# One thread each: the driver may keep for ever who asks for the state of a GPU, and ranks must be killed all the same.
NODE, RANKS = "node", "ranks"


def main(settings: str) -> NoReturn:
    """The whole life of the process. It ends with 0 however it ends: of a run on many nodes the head alone has a
    verdict, and launchers take the highest status for that of all."""
    del sys.argv[1:]
    given = msgspec.json.decode(settings, type=AgentSettings)
    terminal = os.dup(2)
    connection, why = None, ""
    try:
        connection = wire.Dialled(os.read(0, wire.KEY_BYTES), given.run, given.head)
        base = given.keep_in or tempfile.gettempdir()
        rank_files.sweep(PREFIX, [base], KEPT_SECONDS)
        folder, _ = rank_files.make(PREFIX, base)  # held until this process ends
        _write_to(folder / LOG)
        _settle_in(given)
        why = Agent(given, connection, folder).live()
    except BaseException as error:
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}"
        if connection is not None:
            connection.line.send(codec.packed(say.Ending(why)))
    finally:
        processes.end(lambda: processes.descendants(os.getpid()), KILL_SECONDS)
        if why and not given.lifeline:
            os.write(terminal, f"gpufleet: {given.name or own_name()}: this node's agent has ended: {why}\n".encode())
        if connection is not None:
            connection.close(FAREWELL_SECONDS)
        os._exit(0)  # a thread may be stuck in the driver


def _write_to(log: Path) -> None:
    """All that this process and those that it starts print: a terminal, if they have one, is the controller's."""
    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


def _settle_in(settings: AgentSettings) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.adopt()
    with suppress(OSError):  # its Hello says that there is no such folder
        os.chdir(settings.run_folder)
    sys.path.insert(0, settings.run_folder)


class Agent:
    """`folder`: where its log and the reports of its own run are. It is removed when the controller ends the agent and
    has read all files."""

    def __init__(self, settings: AgentSettings, connection: wire.Dialled, folder: Path) -> None:
        self._settings = settings
        self._connection = connection
        self._folder = folder
        self._reached = interfaces.towards(settings.towards)
        self._aside = Aside()
        self._node: OwnNode | None = None  # until it was read
        self._open_things = ExitStack()
        self._ranks = RanksHere(LocalEngine(self._network, settings.likely))
        self._for_ranks: deque[Callable[[], None]] = deque()  # in their order
        self._suite: SuiteProcess | None = None
        self._read: set[str] = set()  # files of its own run, to their ends
        self._began = self._looked = time.monotonic()
        self._silent = 0.0  # seconds that it has listened for the head in vain
        self._joined = False
        self._connected: float | None = None  # since when, without a word of the head
        self._pulse_due = float("inf")
        self._why = ""  # it ends
        self._as_planned = False  # it ends with the run
        self._told: dict[type[say.Message], Callable[[Any], None]] = {
            say.Beat: lambda message: None,
            say.StartRanks: lambda message: self._for_ranks.append(lambda: self._start(message.specs)),
            say.Submit: lambda message: self._for_ranks.append(
                lambda: self._ranks.submit(message.ranks, message.parcel)
            ),
            say.Ask: self._asked,
            say.End: self._end,
        }
        self._asked_here: dict[type[say.Question], Callable[[Any], Any]] = {
            say.Rendezvous: lambda question: interfaces.free_rendezvous(self._reached.address),
            say.RunSuite: self._run_suite,
            say.ReadFile: self._read_file,
        }
        self._asked_of_ranks: dict[type[say.Question], Callable[[Any], Any]] = {
            say.Examine: lambda question: self._ranks.examine(question.ranks),
            say.KillRanks: lambda question: self._ranks.kill(question.timeout),
        }

    def live(self) -> str:
        """Until the head ends it, or is gone: why it ends before the run does, if so."""
        self._aside.do(NODE, lambda: same_install.own(self._settings), self._send)
        self._aside.do(NODE, self._open, self._greet)
        while not self._why:
            self._turn()
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} this agent ends: {self._why}", flush=True)
        if self._aside.idle(RANKS):
            self._ranks.kill(KILL_SECONDS)
        self._send(say.Ending(self._why))
        return "" if self._as_planned else self._why

    # ------------------------------------------------------------ the loop

    def _turn(self) -> None:
        with selectors.PollSelector() as selector:
            for descriptor in (*self._connection.filenos(), *([0] if self._settings.lifeline else [])):
                selector.register(descriptor, selectors.EVENT_READ)
            selector.register(self._aside, selectors.EVENT_READ)
            if self._aside.idle(RANKS):
                self._ranks.watch(selector)
            ready = selector.select(0.0 if self._connection.has_news else self._seconds_to_wait())
        if any(key.fd == 0 for key, _ in ready):
            self._why = "its controller is gone"
        self._hear()
        self._aside.take_in()
        while self._for_ranks and self._aside.idle(RANKS):
            self._for_ranks.popleft()()
        if self._aside.idle(RANKS):
            for event in self._ranks.news():
                if isinstance(event, say.RankDied):
                    why = event.reason + suite_process.full_disk(self._folder)
                    event = say.RankDied(event.rank, why)
                self._send(event)
        for news in self._suite.news() if self._suite else ():
            self._send(news)
            if isinstance(news, say.SuiteEnded):  # other nodes may still be at theirs
                self._for_ranks.append(self._ranks.get_ready)
        if time.monotonic() >= self._pulse_due:
            self._pulse()

    def _seconds_to_wait(self) -> float:
        now = time.monotonic()
        running = self._suite is not None and not self._suite.over
        return max(0.0, min(self._pulse_due - now, SUITE_SECONDS if running else PULSE_SECONDS))

    def _hear(self) -> None:
        """Of the time between two looks no more counts as silence than it waits: this process may have been stopped,
        and its connection has to be made again then."""
        now = time.monotonic()
        self._silent += min(now - self._looked, LONGEST_TURN_SECONDS)
        self._looked = now
        messages = self._connection.receive()
        if messages:
            self._silent, self._joined = 0.0, True
        for packed in messages:
            message = codec.unpacked(packed, say.ToAgent)
            self._told[type(message)](message)
        if not self._joined:
            self._why = self._why or self._not_joined(now)
        elif self._silent > self._settings.alone_seconds:
            self._why = f"nothing was heard of its controller for {self._settings.alone_seconds:g} s"

    def _not_joined(self, now: float) -> str:
        """Why it gives up to dial in; "" if it goes on. A head that is not there yet may come up."""
        head = self._settings.head
        if self._connection.was_connected and self._connected is None:
            self._connected = now
        if self._connected is not None and now - self._connected > REFUSED_SECONDS:
            if self._connection.was_refused:
                return f"the head at {head} has another secret than this node, or makes another run"
            return f"what listens at {head} does not answer as the head of a run"
        if self._connected is None and now - self._began > self._settings.join_seconds:
            return f"nothing listens at {head}, the head of the run, or it cannot be reached from here"
        return ""

    def _send(self, message: say.Message) -> None:
        self._connection.line.send(codec.packed(message))

    def _pulse(self) -> None:
        self._pulse_due = time.monotonic() + PULSE_SECONDS
        suite, node = self._suite, self._node
        readings = suite.readings if suite and not suite.over else node.readings if node else ()
        hottest, watts = (
            [value for gpu in readings if isinstance(value := gpu.get(name), float | int)]
            for name in ("temperature_c", "power_watts")
        )
        check = suite.check if suite and not suite.over else ""
        self._send(say.Pulse(time.time(), max(hottest, default=None), sum(watts) if watts else None, check))

    # ------------------------------------------------------------ what it is told

    def _open(self) -> say.Hello:
        self._node = self._open_things.enter_context(own_node.opened(self._settings))
        return self._node.hello(self._reached.name)

    def _greet(self, hello: say.Hello) -> None:
        self._send(hello)
        self._pulse_due = time.monotonic()

    def _start(self, specs: bytes) -> None:
        self._ranks.start(specs)
        self._of_node(lambda node: node.watch())

    def _end(self, message: say.End) -> None:
        self._why, self._as_planned = f"the head ended it: {message.why}", message.why == say.OVER
        folder = self._suite.folder if self._suite else None
        if folder is None or suite_process.sizes(folder).keys() <= self._read:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _of_node(self, work: Callable[[OwnNode], Any], then: Callable[[Any], None] = lambda result: None) -> None:
        """In the thread in which it is opened first."""

        def with_node() -> Any:
            assert self._node is not None
            return work(self._node)

        self._aside.do(NODE, with_node, then)

    # ------------------------------------------------------------ what it is asked

    def _asked(self, ask: say.Ask) -> None:
        question = ask.question
        if here := self._asked_here.get(type(question)):
            self._send(_reply(ask.number, here, question))
        elif of_ranks := self._asked_of_ranks.get(type(question)):
            self._for_ranks.append(
                lambda: self._aside.do(RANKS, lambda: _reply(ask.number, of_ranks, question), self._send)
            )
            if isinstance(question, say.KillRanks):
                self._for_ranks.append(lambda: self._of_node(lambda node: node.stop_watching()))
        else:
            self._of_node(lambda node: _reply(ask.number, node.answer, question), self._send)

    def _run_suite(self, question: say.RunSuite) -> int:
        if self._suite is not None and not self._suite.over:
            raise RuntimeError(f"its run goes on, as process {self._suite.pid}")
        self._suite, self._read = SuiteProcess(question, self._folder, os.environ), set()
        return self._suite.pid

    def _read_file(self, question: say.ReadFile) -> bytes:
        folder = self._suite.folder if self._suite else None
        if folder is None:
            raise FileNotFoundError("there is no run of this node alone")
        content = suite_process.part(folder, question.name, question.offset, question.most)
        if question.offset + len(content) >= (folder / question.name).stat().st_size:
            self._read.add(question.name)
        return content

    def _network(self, spec: Any) -> dict[str, str]:
        return ranks_here.of_network(self._reached.name, spec.local_index, os.environ)


def _reply(number: int, answer: Callable[[Any], Any], question: say.Question) -> say.Reply:
    try:
        return say.Reply(number, codec.packed(answer(question)))
    except Exception as error:  # whatever it is, the controller is told, and the agent lives on
        traceback.print_exc()
        return say.Reply(number, trouble=f"{type(error).__name__}: {error}")

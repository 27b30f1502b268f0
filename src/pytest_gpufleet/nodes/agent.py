"""The agent of a node: it owns its ranks, its GPUs and its own run. What may take its time has a thread of its own."""

import errno
import os
import pickle
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from pytest_gpufleet import safe_files
from pytest_gpufleet.machine import host, local_node
from pytest_gpufleet.machine.health import Guard, Health
from pytest_gpufleet.machine.local_node import Sampler
from pytest_gpufleet.machine.nvml import NoGpus
from pytest_gpufleet.model import codec, events
from pytest_gpufleet.nodes import launchers, messages, network, wire
from pytest_gpufleet.world.call import Answer, Death, RankSpec, nothing
from pytest_gpufleet.world.engines import processes, rank_files
from pytest_gpufleet.world.engines.local import LocalEngine

PULSE_SECONDS = SAMPLE_SECONDS = 1.0
KILL_SECONDS = 5.0  # for all that was started here to be gone
REFUSED_SECONDS = 45.0  # of connections that are closed at once: the head may be at its begin, or at its end
PREFIX = "gpufleet-node-"
EVIDENCE = "evidence.jsonl"  # as run/folder.py calls it
OUTPUT_BYTES = 16 * 1024  # the end of a traceback, or of pytest's own summary
LOOKED_AT = (b'"check_started"', b'"check_finished"', b'"verdict"')  # kinds of events
# Who answers a question: the agent's own thread, or one of these. The driver may keep for ever who asks for the state
# of a GPU, and ranks must be killed all the same.
HERE, NODE, RANKS, NETWORK = "here", "node", "ranks", "network"


def main(settings: str) -> NoReturn:
    """It ends with 0 whatever happens: the head alone has a verdict, and launchers take the highest status for it."""
    del sys.argv[1:]
    given = msgspec.json.decode(settings, type=launchers.AgentSettings)
    terminal = os.dup(2)
    connection, why = None, ""
    try:
        connection = wire.Dialled(os.read(0, wire.KEY_BYTES), given.run, given.head)
        base = given.keep_in or tempfile.gettempdir()
        rank_files.sweep(PREFIX, [base], 24 * 3600.0)  # those of agents that were killed: they say what was done then
        folder, _ = rank_files.make(PREFIX, base)  # held until this process ends
        with (folder / "agent.log").open("wb") as log:  # of all that is printed: a terminal is the controller's
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        processes.adopt()
        with suppress(OSError):  # its first message says that there is no such folder
            os.chdir(given.run_folder)
        sys.path.insert(0, given.run_folder)
        why = Agent(given, connection, folder).live()
    except BaseException as error:
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}"
        if connection is not None:
            connection.line.send(codec.packed(messages.End(why)))
    finally:
        processes.end(lambda: processes.descendants(os.getpid()), KILL_SECONDS)
        if why and not given.lifeline:
            name = given.name or host.own_name()
            os.write(terminal, f"gpufleet: {name}: this node's agent has ended: {why}\n".encode())
        if connection is not None:
            connection.close(linger=1.0)  # for its last message to be taken
        os._exit(0)  # a thread may be stuck in the driver


class Background:
    """Threads, each of which does its work in order. What follows is done by `take_in`, for which a selector wakes."""

    def __init__(self) -> None:
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._work: list[tuple[str, Future[Any], Callable[[Any], None]]] = []  # that `take_in` has not taken in
        self._finished = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._finished

    def idle(self, thread: str) -> bool:
        return all(thread != other for other, _, _ in self._work)

    def do(self, thread: str, work: Callable[[], Any], then: Callable[[Any], None] = lambda result: None) -> None:
        pool = self._threads.setdefault(thread, ThreadPoolExecutor(1, thread_name_prefix=f"gpufleet {thread}"))
        future = pool.submit(work)
        self._work.append((thread, future, then))
        future.add_done_callback(lambda _: os.eventfd_write(self._finished, 1))

    def take_in(self) -> None:
        """Raises what work has raised."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._finished)
        for work in [each for each in self._work if each[1].done()]:
            self._work.remove(work)
            _, future, then = work
            then(future.result())


class OwnNode:
    """What this node has. Not for two threads at a time."""

    def __init__(self, settings: launchers.AgentSettings) -> None:
        self._settings = settings
        self.node: local_node.LocalNode
        self._open_things = ExitStack()  # freed with this process, as are locks
        self._locks: ExitStack | None = None
        self._guard: Guard | None = None
        self._sampler: Sampler | None = None

    def open(self, interface: str) -> messages.Hello:
        """Read the machine, which takes seconds. Without GPUs it is a node all the same, and says why."""
        if self._settings.rehearse:
            self.node = local_node.without_gpus("--rehearse was given")
        else:
            try:
                self.node = self._open_things.enter_context(local_node.opened(self._settings.gpus))
            except NoGpus as reason:
                self.node = local_node.without_gpus(str(reason), str(reason))
        machine = events.HostFound(datetime.now(timezone.utc).isoformat(timespec="seconds"), self.node.host())
        return messages.Hello(host.serial(), os.getpid(), interface, self.node.topology, self.node.present(), machine)

    def lock(self) -> str:
        """Make the GPUs this run's own; "" or who has one. From here on what gets worse counts."""
        try:
            self._locks = self._locks or self.node.lock()
        except local_node.GpuTaken as taken:
            return str(taken)
        if self.node.topology.gpus and self._guard is None:
            self.node.kernel_log()  # of before, which the node's own run has judged
            self._guard = Guard(self.node)
            self._sampler = Sampler(self.node, SAMPLE_SECONDS, self._guard.note)
            self._sampler.start()
        return ""

    def check_health(self, failed: bool) -> Health:
        if self._guard is None or self._sampler is None:
            return Health()
        found, trouble = self._guard.check(failed), self._sampler.trouble
        unsampled = f"a GPU that slowed down may have gone unseen: {trouble}" if trouble else ""
        return msgspec.structs.replace(found, unseen="; ".join(filter(None, (found.unseen, unsampled))))


def sizes(folder: Path) -> dict[str, int]:
    """Every regular file below a folder, by its name seen from there, with its size in bytes. No link is followed."""
    found = {}
    for path in (Path(parent, name) for parent, _, names in os.walk(folder) for name in names):
        with suppress(FileNotFoundError):  # a run that goes on writes files and gives them other names
            if stat.S_ISREG((state := path.lstat()).st_mode):
                found[path.relative_to(folder).as_posix()] = state.st_size
    return found


def part(folder: Path, name: str, offset: int, most: int) -> bytes:
    """`most` bytes of a regular file from `offset` on; fewer at its end. OSError if it cannot be read, or is a link."""
    with safe_files.open_regular(folder / name) as file:
        return os.pread(file.fileno(), most, offset)


def full_disk(folder: Path, output: bytes = b"") -> str:
    """That the disk of this folder is full, as it is, or as a program wrote when it ended; "" if it is not."""
    full = os.strerror(errno.ENOSPC).encode() in output or shutil.disk_usage(folder).free < 1 << 20
    return f"; the disk is full that {folder} is on" if full else ""


class SuiteProcess:
    """In a session of its own; it ends when this process does. `check`: what it is at. OSError if it does not start."""

    def __init__(self, asked: messages.RunSuite, keep_in: Path, environment: Mapping[str, str]) -> None:
        self.check = ""
        self._verdict: tuple[events.VerdictWord | None, tuple[str, ...]] = (None, ())  # with its reasons
        self._reports = Path(tempfile.mkdtemp(prefix="run-", dir=keep_in))
        self._output = keep_in / f"{self._reports.name}.output"
        self._read = 0  # bytes of its evidence
        self.over = False  # its end was reported
        held, self._lifeline = os.pipe()
        try:
            with self._output.open("wb") as output:
                of_all = ("PYTEST_ADDOPTS", events.STARTED_BY)  # each node gets what is meant for it
                passed_on = {name: value for name, value in environment.items() if name not in of_all}
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "pytest", *asked.arguments, f"--fleet-dir={self._reports}"],
                    cwd=asked.folder, env={**passed_on, **asked.variables, events.ONE_OF_MANY: "1"}, pass_fds=[held],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            self.pid = self._process.pid
            processes.end_with(held, self.pid)
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(held)

    @property
    def folder(self) -> Path | None:
        """Of its run, once there is one."""
        return next((path.parent for path in self._reports.glob(f"*/{EVIDENCE}")), None)

    def news(self) -> Iterator[messages.CheckEnded | messages.SuiteEnded]:
        if self.over:
            return
        status = self._process.poll()  # asked first: what it wrote before it ended comes before its end
        yield from self._checks()
        if status is not None:
            self.over = True
            os.close(self._lifeline)
            size = self._output.stat().st_size
            output = part(self._output.parent, self._output.name, max(0, size - OUTPUT_BYTES), OUTPUT_BYTES)
            text, trouble = output.decode(errors="replace"), full_disk(self._reports, output)
            name, files = (self.folder.name, sizes(self.folder)) if self.folder else ("", {})
            yield messages.SuiteEnded(status, text, name, files, *self._verdict, trouble)

    def _checks(self) -> Iterator[messages.CheckEnded]:
        """Those that have ended, by the lines of its evidence that are complete by now and were not read yet."""
        folder, whole = self.folder, b""
        with suppress(OSError):  # opened anew each time: a run writes its evidence again if somebody removes it
            if folder is not None:
                with safe_files.open_regular(folder / EVIDENCE) as file:
                    file.seek(self._read)
                    whole, newline, _ = file.read(events.LONGEST_LINE + 1).rpartition(b"\n")
                self._read += len(whole) + len(newline)
        for line in (each for each in whole.split(b"\n") if any(kind in each for kind in LOOKED_AT)):
            with suppress(ValueError):  # somebody else wrote into the file, which the run itself reports in the end
                match events.typed(msgspec.json.decode(line)):
                    case events.CheckStarted(check=check):
                        self.check = check
                    case events.CheckFinished(check=check):
                        yield messages.CheckEnded(check.id, check.outcome, check.seconds)
                    case events.Verdict(verdict=verdict, reasons=reasons):
                        self._verdict = verdict, reasons


class Agent:
    """`folder`: of its log and of the reports of its own run; removed at its end, if the head has read all files."""

    def __init__(self, settings: launchers.AgentSettings, connection: wire.Dialled, folder: Path) -> None:
        self._settings = settings
        self._connection = connection
        self._folder = folder
        self._reached = network.towards(settings.towards or settings.head.rpartition(":")[0].strip("[]"))
        self._background = Background()
        self._node = OwnNode(settings)
        self._engine = LocalEngine(
            lambda spec: network.for_ranks(self._reached.name, spec.local_index, os.environ), settings.likely
        )
        self._suite: SuiteProcess | None = None
        self._ended: list[messages.CheckEnded | messages.SuiteEnded] = []  # of which the controller does not know yet
        self._read: set[str] = set()  # files of its own run, to their ends
        self._began = time.monotonic()
        self._listening = messages.Listening(2 * PULSE_SECONDS)
        self._heard: float | None = None  # its controller, after so many seconds of listening
        self._pulse_due = float("inf")
        self._why = ""  # it ends
        self._as_planned = False  # it ends with the run
        self._answers: dict[type[messages.Question], tuple[str, Callable[[Any], Any]]] = {
            messages.Rendezvous: (HERE, lambda question: network.free_rendezvous(self._reached.address)),
            messages.Listen: (
                HERE, lambda question: network.listen(network.of_traffic(self._reached, os.environ), question.token)
            ),
            messages.Connect: (NETWORK, lambda question: network.connect(question.nodes)),
            messages.Serve: (NETWORK, lambda question: network.serve(question, self._reached.address)),
            messages.Write: (NETWORK, lambda question: network.write(question, self._reached.address)),
            messages.RunSuite: (HERE, self._run_suite),
            messages.ReadFile: (HERE, self._read_file),
            messages.Examine: (RANKS, lambda question: self._engine.examine(question.ranks)),
            messages.KillRanks: (RANKS, lambda question: self._engine.kill(question.timeout)),
            messages.ReadHost: (NODE, lambda question: self._node.node.host(question.names)),
            messages.Lock: (NODE, lambda question: self._node.lock()),
            messages.CheckHealth: (NODE, lambda question: self._node.check_health(question.failed)),
        }  # fmt: skip

    def live(self) -> str:
        """Until the head ends it, or is gone: why it ends before the run does, if so."""
        self._background.do(NODE, lambda: launchers.own_install(self._settings), self._send)
        self._background.do(NODE, lambda: self._node.open(self._reached.name), self._begin)
        while not self._why:
            self._wait()
            self._receive()
            self._background.take_in()
            self._report(self._engine.wait(0.0) if self._background.idle(RANKS) else ())
            for news in self._suite.news() if self._suite else ():
                self._ended.append(news)
                if isinstance(news, messages.SuiteEnded):  # other nodes may still be at theirs
                    self._pulse_due = time.monotonic()
                    # Ranks start sooner then. If that cannot be, their start says why.
                    self._background.do(RANKS, lambda: self._deaths((), "", lambda: self._engine.get_ready(nothing)))
            if time.monotonic() >= self._pulse_due:
                self._pulse_due = time.monotonic() + PULSE_SECONDS
                check = self._suite.check if self._suite and not self._suite.over else ""
                self._send(messages.Pulse(time.time(), check, tuple(self._ended)))
                self._ended.clear()
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} this agent ends: {self._why}", flush=True)
        if self._background.idle(RANKS):
            self._engine.kill(KILL_SECONDS)
        self._send(messages.End(self._why))
        return "" if self._as_planned else self._why

    def _wait(self) -> None:
        running = self._suite is not None and not self._suite.over
        seconds = min(self._pulse_due - time.monotonic(), 0.2 if running else PULSE_SECONDS)  # it writes in between
        with selectors.PollSelector() as selector:
            for descriptor in (*self._connection.filenos(), *([0] if self._settings.lifeline else [])):
                selector.register(descriptor, selectors.EVENT_READ)
            selector.register(self._background, selectors.EVENT_READ)
            if self._background.idle(RANKS):
                self._engine.watch(selector)
            ready = selector.select(0.0 if self._connection.has_news else max(0.0, seconds))
        if any(key.fd == 0 for key, _ in ready):
            self._why = "its controller is gone"

    def _receive(self) -> None:
        self._listening.look(time.monotonic())
        for packed in self._connection.receive():
            self._heard = self._listening.seconds
            match message := codec.unpacked(packed, messages.ToAgent):
                case messages.StartRanks(specs):
                    self._background.do(RANKS, partial(self._start, specs), self._report)
                case messages.Submit(ranks, parcel):
                    how = "for its controller: nothing can be sent to it"
                    work = partial(self._engine.submit, ranks, parcel)
                    self._background.do(RANKS, partial(self._deaths, ranks, how, work), self._report)
                case messages.Ask():
                    self._answer(message)
                case messages.End(why):
                    self._why, self._as_planned = f"the head ended it: {why}", why == messages.OVER
                    folder = self._suite.folder if self._suite else None
                    if folder is None or sizes(folder).keys() <= self._read:
                        shutil.rmtree(self._folder, ignore_errors=True)
        if self._heard is None:
            self._why = self._why or self._not_joined()
        elif self._listening.seconds - self._heard > self._settings.alone_seconds:
            self._why = f"nothing was heard of its controller for {self._settings.alone_seconds:g} s"

    def _not_joined(self) -> str:
        """Why it gives up to dial in; "" if it goes on. A head that is not there yet may come up."""
        now, head, since = time.monotonic(), self._settings.head, self._connection.connected_at
        if since is None:
            nobody = f"nothing listens at {head}, the head of the run, or it cannot be reached from here"
            return nobody if now - self._began > self._settings.join_seconds else ""
        if now - since <= REFUSED_SECONDS:
            return ""
        if self._connection.was_refused:
            return f"the head at {head} has another secret than this node, or makes another run"
        return f"what listens at {head} does not answer as the head of a run"

    def _send(self, message: messages.FromAgent | messages.DialIn) -> None:
        self._connection.line.send(codec.packed(message))

    def _begin(self, hello: messages.Hello) -> None:
        self._send(hello)
        self._pulse_due = time.monotonic()

    def _start(self, specs: bytes) -> list[Death]:
        """`specs`: pickled, as the controller has them. They come from the process that started this one."""
        started: Sequence[RankSpec] = pickle.loads(specs)
        ranks = [spec.index for spec in started]
        return self._deaths(ranks, "before it had started", lambda: self._engine.start(started))

    def _deaths(self, ranks: Iterable[int], how: str, work: Callable[[], None]) -> list[Death]:
        """What goes wrong is the death of these ranks, and raises nothing."""
        try:
            work()
            return []
        except Exception as error:
            return [Death(rank, f"{how}: {type(error).__name__}: {error}") for rank in ranks]

    def _report(self, events: Iterable[Answer | Death]) -> None:
        for each in events:
            self._send(each if isinstance(each, Answer) else Death(each.rank, each.reason + full_disk(self._folder)))

    def _answer(self, ask: messages.Ask) -> None:
        thread, answer = self._answers[type(ask.question)]

        def reply() -> messages.Reply:
            try:
                return messages.Reply(ask.number, codec.packed(answer(ask.question)))
            except Exception as error:  # whatever it is, the controller hears of it, and the agent lives on
                traceback.print_exc()
                return messages.Reply(ask.number, trouble=f"{type(error).__name__}: {error}")

        if thread == HERE:
            self._send(reply())
        else:
            self._background.do(thread, reply, self._send)

    def _run_suite(self, question: messages.RunSuite) -> int:
        if self._suite is not None and not self._suite.over:
            raise RuntimeError(f"its run goes on, as process {self._suite.pid}")
        self._suite, self._read = SuiteProcess(question, self._folder, os.environ), set()
        return self._suite.pid

    def _read_file(self, question: messages.ReadFile) -> bytes:
        folder = self._suite.folder if self._suite else None
        if folder is None:
            raise FileNotFoundError("there is no run of this node alone")
        content = part(folder, question.name, question.offset, question.most)
        if question.offset + len(content) >= (folder / question.name).stat().st_size:
            self._read.add(question.name)
        return content

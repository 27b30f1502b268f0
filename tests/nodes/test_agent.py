"""The agent of a node as its controller meets it: a real process with real ranks, and a real run of its own."""

import json
import os
import pickle
import resource
import select
import signal
import subprocess
import threading
import time
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_gpufleet.machine.gpu_facts import READINGS
from pytest_gpufleet.machine.health import Health
from pytest_gpufleet.machine.kernel_log import Logged, Xid
from pytest_gpufleet.machine.local_node import GpuTaken
from pytest_gpufleet.machine.nvml import NoGpus
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.events import typed
from pytest_gpufleet.model.metric import Sample
from pytest_gpufleet.model.place import Gpu
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import code
from pytest_gpufleet.nodes import agent as agent_module, messages
from pytest_gpufleet.nodes.agent import Agent, Background, OwnNode
from pytest_gpufleet.nodes.launchers import AgentSettings
from pytest_gpufleet.world.call import Answer, Call, Trace, pack, pack_work, unpack
from pytest_gpufleet.world.engines import processes, rank_files
from pytest_gpufleet.world.engines.local import LocalEngine
from tests import machines
from tests.conftest import comes_true
from tests.forked import Started
from tests.nodes.controller import controlled, started_by
from tests.world.fake_engine import specs

ALONE = 5.0  # seconds without a beat: far more than between two, on a machine that is busy
HERE = (2, 3)  # the ranks of node 1, of two nodes with two each


def settings(folder, **other):
    return AgentSettings(**{"run_folder": str(folder), "rehearse": 2, "keep_in": str(folder), **other})


@pytest.fixture
def agent(tmp_path):
    with controlled(settings(tmp_path)) as controller:
        yield controller


def start_ranks(agent):
    agent.tell(messages.StartRanks(pickle.dumps(specs(2, 2)[2:])))
    assert {agent.hear(Answer).rank for _ in HERE} == set(HERE)


def submit(agent, function, *args):
    call = Call("it", (HERE,), (1, 1), False, pack_work(function, args, {}), number=7)
    agent.tell(messages.Submit(HERE, pack(call)))


def test_it_says_hello_first_and_then_that_it_is_there_until_garbage_ends_it(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", Started)  # by a fresh Python
    with controlled(settings(tmp_path, name="gf7")) as agent:
        hello = agent.hear(messages.Hello)
        assert (agent.dialled.name, agent.dialled.package) == ("gf7", code())
        assert (hello.pid, hello.interface) == (agent.pid, "lo")
        assert hello.topology.absent == "--rehearse was given"
        assert agent.hear(messages.Pulse).clock <= agent.hear(messages.Pulse).clock
        agent.tell(b"no message at all")
        assert "Error" in agent.hear(messages.End).why  # with what it was
        assert agent.process.wait() == 0


def falls_silent(rank):
    with rank.phase("deep in thought"):
        if rank.index:
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            pass


def test_hung_ranks_are_examined_and_killed(agent):
    start_ranks(agent)
    submit(agent, falls_silent)
    seen = {}
    while "stopped" not in seen.get(3, Trace()).state or "falls_silent" not in seen[2].stack:
        seen = agent.ask(messages.Examine((0, 1, 2, 3)))
        assert set(seen) == set(HERE)
    assert seen[2].phase == seen[3].phase == "deep in thought"
    ranks = started_by(agent)
    assert agent.ask(messages.KillRanks(60.0)) == {}
    assert len(started_by(agent) & ranks) <= 2  # the process that ranks are forked from, and its resource tracker
    submit(agent, falls_silent)  # to ranks that are gone
    assert agent.ask(messages.Examine(HERE)) == {}
    start_ranks(agent)  # and once more


def test_a_question_without_an_answer_is_told_so_and_of_its_own_runs_there_is_one_at_a_time(agent, tmp_path):
    for question in (messages.ReadFile("evidence.jsonl", 0, 10), messages.RunSuite((), "/no/such/folder")):
        assert agent.ask(question).trouble
    assert agent.ask(messages.Lock()) == ""
    (tmp_path / "wait").touch()
    run_suite(agent, tmp_path)
    assert "goes on" in agent.ask(messages.RunSuite((), str(tmp_path))).trouble


# ---------------------------------------------------------------- its own run
OWN = """
import os, subprocess

def test_plain():
    pass

def test_own(world):
    assert world.run(lambda rank: rank.index) == [0, 1]

def test_stays(world):
    away = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    print("away", away.pid)
    if os.path.exists("wait"):
        world.run(lambda rank: os.kill(os.getpid(), 19))
"""


def run_suite(agent, folder, *arguments):
    """The number of the process of a run on two CPU ranks."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_own.py").write_text(OWN)
    return agent.ask(messages.RunSuite(("--rehearse=2", "-p", "no:cacheprovider", *arguments), str(folder)))


def outcomes_of(agent):
    ended = []
    while not ended or not isinstance(ended[-1], messages.SuiteEnded):
        ended += agent.hear(messages.Pulse).ended
    return [each.outcome for each in ended[:-1]], ended[-1]


def test_its_own_run_is_told_while_it_goes_on_and_its_files_are_read_in_parts(agent, tmp_path):
    assert processes.look(run_suite(agent, tmp_path))
    outcomes, ended = outcomes_of(agent)
    assert (ended.exit_status, "3 passed" in ended.output) == (0, True), ended.output
    assert {"evidence.jsonl", "summary.json", "report.html", "junit.xml"} <= set(ended.files)
    kept = b""
    while part := agent.ask(messages.ReadFile("evidence.jsonl", len(kept), 1000)):
        kept += part
    assert len(kept) == ended.files["evidence.jsonl"]
    record = Record()
    for line in kept.splitlines():
        record.add(typed(json.loads(line)))
    assert outcomes == [check.outcome for check in record.checks.values()] == ["passed"] * 3
    assert (ended.verdict, [*ended.reasons]) == (record.verdict, record.reasons) == ("REHEARSAL", record.reasons)
    (folder,) = tmp_path.glob("gpufleet-node-*")
    agent.tell(messages.End("the run is over"))
    assert agent.hear(messages.End).why
    agent.process.wait()
    assert folder.exists()  # not all was read


def test_its_folder_is_removed_when_all_was_read(tmp_path, monkeypatch):
    """And that of an agent that was killed long ago. Options in the environment are for the run of all nodes."""
    left = tmp_path / "gpufleet-node-left"
    left.mkdir()
    (left / rank_files.MARKER).touch()
    os.utime(left, (0, 0))
    monkeypatch.setenv("PYTEST_ADDOPTS", "--nodes=3 --collect-only")
    with controlled(settings(tmp_path)) as agent:
        run_suite(agent, tmp_path, "-k", "test_plain")
        _, ended = outcomes_of(agent)
        assert ended.exit_status == 0, ended.output
        for name, size in ended.files.items():
            assert len(agent.ask(messages.ReadFile(name, 0, size))) == size
        agent.tell(messages.End("the run is over"))
        agent.listen_until_its_end()
    assert list(tmp_path.glob("gpufleet-node-*")) == []


# ---------------------------------------------------------------- however it ends, nothing is left
@pytest.mark.parametrize("killed", [False, True])
def test_nothing_is_left_of_it_but_what_has_left_one_that_is_killed(agent, tmp_path, killed):
    """Ranks, of which one holds the GIL, and a run in the middle of a check whose ranks hang."""
    (tmp_path / "wait").touch()
    start_ranks(agent)
    run_suite(agent, tmp_path)
    submit(agent, falls_silent)
    while agent.hear(messages.Pulse).check != "test_own.py::test_stays":
        pass
    while not (stray := [pid for pid in started_by(agent) if _is_sleep(pid)]):
        agent.hear(messages.Pulse)
    found = started_by(agent)
    assert len(found) >= 10  # a fork server and its tracker, two ranks: here and in its run, which has a child
    if killed:
        os.kill(agent.pid, signal.SIGKILL)
    else:
        agent.let_go()
    assert comes_true(lambda: not any(map(processes.look, found - ({*stray} if killed else set()))))
    if killed:
        os.kill(stray[0], signal.SIGKILL)


def _is_sleep(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text() == "sleep\n"


def test_what_came_while_it_was_stopped_counts_and_without_a_beat_it_ends_itself_and_writes_why(tmp_path):
    with controlled(settings(tmp_path, alone_seconds=ALONE)) as agent:
        agent.hear(messages.Hello)
        os.kill(agent.pid, signal.SIGSTOP)
        began = time.monotonic()
        while time.monotonic() < began + 1.2 * ALONE:
            agent.take_in(0.5)
        agent.tell(messages.Beat())
        os.kill(agent.pid, signal.SIGCONT)
        start_ranks(agent)  # beats are sent while it is waited for
        found = started_by(agent)
        agent.listen_until_its_end()  # the connection is open, and nothing is said
        assert [message for message in agent.heard if isinstance(message, messages.End)]
        assert not [pid for pid in found if processes.look(pid)]
        (log,) = tmp_path.glob("gpufleet-node-*/agent.log")
        assert f"nothing was heard of its controller for {ALONE:g} s" in log.read_text()


def test_ranks_have_an_interface_each_and_as_many_open_files_as_there_can_be(tmp_path, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth9")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    try:
        with controlled(settings(tmp_path)) as agent:
            start_ranks(agent)
            # Its own is the one that is judged.
            assert agent.ask(messages.ReadHost(("open_files_limit",)))["open_files_limit"] == hard - 1
            submit(agent, of_the_system)
            answers = [agent.hear(Answer) for _ in HERE]
            results = {answer.rank: unpack(pickle.loads(answer.parcel).result) for answer in answers}
            assert results == {2: ("lo", "=lo", hard), 3: ("eth9", "=lo", hard)}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def of_the_system(rank):
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return *(os.environ[name] for name in names), resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def take_in(background, thread):
    while not background.idle(thread):
        assert select.select([background], [], [], 60)[0]
        background.take_in()


def test_what_never_comes_back_holds_up_its_own_thread_alone_and_what_work_raises_is_raised():
    background, stuck, done = Background(), threading.Event(), []
    try:
        background.do("node", stuck.wait)
        background.do("node", lambda: "after it", done.append)
        background.do("ranks", lambda: "beside it", done.append)
        take_in(background, "ranks")
        assert (done, background.idle("node")) == (["beside it"], False)
    finally:
        stuck.set()
    take_in(background, "node")
    assert done == ["beside it", "after it"]
    background.do("node", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        take_in(background, "node")


def test_ranks_that_cannot_be_started_or_that_nothing_can_be_sent_to_have_died(tmp_path, monkeypatch):
    def disk_is_full(self, *given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalEngine, "start", disk_is_full)
    agent = Agent(settings(tmp_path, head="127.0.0.1:1"), SimpleNamespace(), tmp_path)
    died = agent._start(pickle.dumps(specs(1, 2)[1:]))
    assert [(each.rank, "No space left" in each.reason) for each in died] == [(1, True), (2, True)]


# ---------------------------------------------------------------- its node, on a machine with GPUs that is not here
GONE = "the driver is not loaded"
THERMAL_SLOWDOWN = 0x40  # nvml.h, nvmlClocksEventReasonHwThermalSlowdown


@pytest.fixture
def node():
    """A recorded machine whose facts a test changes: `now` of every GPU, `reasons` of the next samples."""
    here, stood_in = machines.recorded(), SimpleNamespace(now={}, reasons=0, taken="", sampled=threading.Event())
    known, stood_in.topology = here.machine, here.topology
    stood_in.logged = [Logged((Xid(here.topology.gpus[0].pci_bus_id, 79, "before"),))]
    stood_in.facts = lambda names: tuple(Gpu(gpu.index, {**gpu.facts, **stood_in.now}) for gpu in known.gpus)
    stood_in.host = lambda names=None: {name: known.host[name] for name in names or known.host}
    stood_in.kernel_log = lambda: stood_in.logged.pop() if stood_in.logged else Logged()
    stood_in.present = lambda: known.present

    def sample():
        stood_in.sampled.set()
        readings = {**dict.fromkeys(READINGS), "clock_event_reasons": stood_in.reasons}
        return Sample(0.0, (readings,) * len(known.gpus))

    def lock():
        if stood_in.taken:
            raise GpuTaken(stood_in.taken)
        return ExitStack()

    stood_in.sample, stood_in.lock = sample, lock
    return stood_in


@pytest.fixture
def own(node, monkeypatch):
    monkeypatch.setattr(agent_module.local_node, "opened", lambda wanted: nullcontext(node))
    own = OwnNode(AgentSettings("."))
    own.open("eth0")
    yield own
    if own._sampler:
        own._sampler.stop()


def health(own):
    return codec.unpacked(codec.packed(own.check_health(failed=False)), messages.CheckHealth.answer)


def test_a_machine_with_gpus_arrives_as_it_is_and_a_gpu_that_somebody_has_is_told(node, own):
    hello = codec.unpacked(codec.packed(own.open("eth0")), messages.FromAgent)
    assert (hello.topology, hello.machine.host, hello.present) == (node.topology, node.host(), node.present())
    node.taken = "GPU 0 is in use by another run"
    assert own.lock() == node.taken
    node.taken = ""
    assert own.lock() == ""
    node.taken = "this one has it"
    assert own.lock() == ""


def test_what_got_worse_is_told_once_also_between_two_questions_and_what_was_before_is_not(node, own):
    assert (health(own), own.lock(), health(own)) == (Health(), "", Health())
    node.now = {"ecc_uncorrected_volatile": 1}
    faults = health(own).faults
    assert sorted({str(place) for fault in faults for place in fault.subjects}) == ["gpu0", "gpu1", "gpu2", "gpu3"]
    assert health(own) == Health()
    node.reasons = THERMAL_SLOWDOWN
    node.sampled.clear()
    assert node.sampled.wait(60)
    own._sampler.stop()
    node.reasons = 0
    assert len(health(own).faults) == 4


def test_what_nobody_could_see_is_told(node, own):
    node.sample = lambda: 1 / 0
    own.lock()
    while "ZeroDivisionError" not in (found := health(own)).unseen:
        assert found.faults == ()
    node.logged = [Logged(unread="the kernel log was overwritten")]
    assert "the kernel log was overwritten" in health(own).unseen


def test_without_gpus_it_is_a_node_that_says_why(monkeypatch):
    def none(wanted):
        raise NoGpus(GONE)

    monkeypatch.setattr(agent_module.local_node, "opened", none)
    topology = OwnNode(AgentSettings(".", gpus=8)).open("eth0").topology
    assert (topology.gpus, topology.absent, topology.problems) == ((), GONE, (GONE,))

"""What a run on many nodes stands on; nodes that take no part, or do not answer any more, after their own runs."""

import json
import time
from types import SimpleNamespace

import pytest

from pytest_gpufleet.machine.health import Health
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.events import HostFound, NodeLeftOut, NodeLost
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import GpuTopology, Missing, gpu, where
from pytest_gpufleet.nodes.messages import CheckHealth, Hello, Listening, Lock, ReadHost, RunSuite
from pytest_gpufleet.run.cluster_run import ClusterRun, ClusterTarget
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.run.settings import Options
from tests.clusters import begun
from tests.nodes.fake_transport import hello


class Trouble(str):
    """An answer that is none."""


class Answering:
    """A Cluster of these nodes, each with its answer to every kind of question. `asked`: who was asked last, with so
    many `seconds` to answer."""

    def __init__(self, alive):
        self.alive, self.lost, self.left_out, self.listening = list(alive), {}, {}, Listening(1.0)
        healthy = {Lock: "", CheckHealth: Health(), ReadHost: {"network_ports": ()}, RunSuite: 4711}
        self.answers = {kind: dict.fromkeys(alive, answer) for kind, answer in healthy.items()}

    def ask_each(self, questions, timeout):
        self.asked, self.seconds = sorted(questions), timeout
        found = {node: self.answers[type(question)][node] for node, question in questions.items()}
        troubles = {node: str(why) for node, why in found.items() if isinstance(why, Trouble)}
        return {node: answer for node, answer in found.items() if node not in troubles}, troubles

    suite_news = ()

    def take(self, news, timeout):
        return []

    def leave_out(self, node, why):
        self.alive.remove(node)
        self.left_out[node] = why


@pytest.fixture
def cluster(monkeypatch):
    made = Answering(range(3))
    monkeypatch.setattr(ClusterRun, "cluster", made)
    return made


@pytest.fixture
def run(cluster, monkeypatch, tmp_path):
    """`said`: what it has put on record; `spoiled`: why that is not all."""
    made = ClusterRun(Options(nodes=3))
    made.said, made.spoiled = [], []
    hosts = {node: f"gf{node}" for node in range(3)}
    target = SimpleNamespace(topology=SimpleNamespace(gpus=(0,)), hosts=hosts)
    made.folder = RunFolder(tmp_path)
    monkeypatch.setattr(ClusterRun, "target", target)
    made.evidence = SimpleNamespace(
        record=begun([*hosts.values()], 3, None),
        spoil=lambda why: made.spoiled.extend(filter(None, [why])),
        close=lambda: None,
    )

    def record(event):
        made.said.append(event)
        made.evidence.record.add(event)

    monkeypatch.setattr(made, "record", record)
    return made


def test_why_a_node_does_not_tell_a_fact_is_known_here_and_on_record(cluster, run):
    untold = Missing("only root may ask the BMC", absent=True)
    hosts = {0: {"bmc": untold}, 1: {"bmc": None}, 2: {"bmc": {"power": []}}}
    cluster.answers[ReadHost] = {node: codec.unpacked(codec.packed(host), dict) for node, host in hosts.items()}
    assert run.hosts_now("bmc") == {0: untold, 1: None, 2: {"power": []}}
    said = hello(machine=HostFound("", {"bmc": untold, "kernel": "6.8.0"}))
    assert codec.unpacked(codec.packed(said), Hello).machine.host == {"bmc": untold, "kernel": "6.8.0"}
    untold = Missing("a virtual machine has none", absent=True)
    found = codec.typed(json.loads(json.dumps(codec.plain({"host": {"dmi": untold, "kernel": "6.8.0"}}))), HostFound)
    assert found.host["dmi"] == untold
    assert [found.get(fact) for fact in ("dmi", "kernel", "nvme")] == [None, "6.8.0", None]


def said_to_be_unfit(said, why):
    """Whether node 1 alone is, and is left out."""
    found, left_out = said
    assert (found.fault.name, found.fault.subjects) == ("node_unfit", (where("node1"),))
    return isinstance(left_out, NodeLeftOut) and left_out.node == 1 and str(why) in left_out.why


@pytest.mark.parametrize("answer", ["GPU 3 is in use by another run: process 4711", Trouble("no answer within 30 s")])
def test_a_node_that_cannot_be_locked_is_named_once_and_left_out(cluster, run, answer):
    cluster.answers[Lock][1] = answer
    run.lock()
    assert cluster.alive == [0, 2]
    assert said_to_be_unfit(run.said, answer)
    run.lock()
    assert (cluster.asked, len(run.said)) == ([0, 2], 2)


def test_what_got_worse_is_at_its_node_and_only_those_that_take_part_are_asked(cluster, run):
    run.lock()
    cluster.alive.remove(1)  # it is lost, and would be waited for
    cluster.answers[CheckHealth][2] = Health((Fault("pcie_replays", (gpu(3),), "17"),))
    (fault,) = run.check_health("a check")
    assert (cluster.asked, fault.subjects, fault.check, run.spoiled) == ([0, 2], (gpu(3, node=2),), "a check", [])


def test_what_a_node_does_not_tell_is_not_known_to_be_fine_and_a_run_that_ends_does_not_wait_long(cluster, run):
    run.lock()
    cluster.answers[CheckHealth][2] = cluster.answers[ReadHost][1] = Trouble("no answer within 30 s")
    assert run.check_health("a check") == []
    assert run.hosts_now("network_ports") == {0: (), 2: ()}
    assert [why.partition(":")[0] for why in run.spoiled] == ["gf2", "gf1"]
    usual = cluster.seconds
    run.interruption.heard = True
    run.check_health("the end of the run")
    assert cluster.seconds <= usual / 10


def test_who_was_left_out_by_the_engine_of_the_ranks_is_on_record_once(cluster, run):
    cluster.leave_out(1, "2 of its ranks could not be killed")
    run.check_health("a check")
    run.check_health("another")
    assert run.said == [NodeLeftOut(node=1, why="2 of its ranks could not be killed")]


NO_SPACE = Trouble("OSError: [Errno 28] No space left on device")


def test_a_node_whose_own_run_cannot_be_started_is_left_out_and_where_none_can_there_is_no_run(cluster, run, tmp_path):
    cluster.answers[RunSuite][1] = NO_SPACE
    run.start_alone(("test_a.py",), str(tmp_path))
    assert (cluster.alive, [*run.node_runs.all]) == ([0, 2], [0, 2])  # nobody waits for the run of the other
    assert said_to_be_unfit(run.said, NO_SPACE)
    assert {path.name for path in (tmp_path / "nodes").iterdir()} == {"0-gf0", "2-gf2"}
    cluster.answers[RunSuite] = dict.fromkeys(range(3), NO_SPACE)
    with pytest.raises(Refused, match="gf2: OSError"):
        run.start_alone(("test_a.py",), ".")


def test_a_node_that_is_lost_while_its_report_is_brought_here_is_named(cluster, run, monkeypatch):
    def settle(*given, again):
        cluster.alive.remove(2)
        cluster.lost[2] = "its agent died by SIGKILL"

    monkeypatch.setattr(run.node_runs, "settle", settle)
    run.finish(cut_short=False)
    lost, found = run.said
    assert lost == NodeLost(node=2, why="its agent died by SIGKILL")
    assert (found.fault.name, found.fault.subjects) == ("node_lost", (where("node2"),))


@pytest.mark.parametrize(("kernels", "threads"), [(("a", "a"), 4), (("a", "b"), 8)])
def test_ranks_of_nodes_that_are_one_host_share_its_processors(monkeypatch, kernels, threads):
    """Also in a rehearsal, which a launcher starts on hosts that are several."""
    hellos = {
        node: hello(node, machine=HostFound("", {"boot_id": kernel, "processors_allowed": 16}))
        for node, kernel in enumerate(kernels)
    }
    names = {0: "gf0", 1: "gf1"}
    monkeypatch.setattr(ClusterRun, "cluster", SimpleNamespace(alive=(0, 1), hellos=hellos, names=names))
    assert {spec.cpu_threads for spec in ClusterRun(Options(rehearse=2, nodes=2)).ranks._specs()} == {threads}


BUSES = ("00000000:0A:00.0", "")  # the second does not answer


@pytest.mark.parametrize(("kernels", "there"), [(("a", "a"), 2), (("a", "b"), 4), ((None, None), 4)])
def test_the_gpus_of_a_host_that_is_two_nodes_are_there_once(kernels, there):
    hellos = {
        node: hello(node, present=BUSES, machine=HostFound("", {"boot_id": kernel} if kernel else {}))
        for node, kernel in enumerate(kernels)
    }
    assert ClusterTarget({0: "gf0", 1: "gf1"}, hellos, rehearsed=0).gpus_present == there


def test_a_machine_of_a_node_knows_how_long_ago_it_was_read_by_whatever_clock_its_node_has(monkeypatch):
    target = ClusterTarget({0: "gf0"}, {0: hello(machine=HostFound("2096-10-02T07:06:40+00:00"))}, rehearsed=0)
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 600)
    assert target.machines[0].seconds_ago >= 600


def test_why_there_are_no_gpus_is_what_nodes_say_that_were_heard():
    absent = GpuTopology(absent="--rehearse was given")
    target = ClusterTarget({0: "gf0", 1: "gf1"}, {0: hello(topology=absent)}, rehearsed=2)
    assert (target.why, target.topologies[1].absent) == ("--rehearse was given", "its agent was never heard")

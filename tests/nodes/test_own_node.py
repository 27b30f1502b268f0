"""What an agent is asked about its node, on a machine with GPUs that is not here."""

import threading
from contextlib import ExitStack, nullcontext

import pytest

from pytest_gpufleet.machine.gpu_facts import READINGS
from pytest_gpufleet.machine.health import Health
from pytest_gpufleet.machine.kernel_log import Logged
from pytest_gpufleet.machine.locks import GpuTaken
from pytest_gpufleet.machine.nvml import NoGpus
from pytest_gpufleet.machine.xids import Xid
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.measurement import Sample
from pytest_gpufleet.nodes import agent, messages
from pytest_gpufleet.nodes.agent import OwnNode
from pytest_gpufleet.nodes.agent_process import AgentSettings
from tests import machines

GONE = "the driver is not loaded"
THERMAL_SLOWDOWN = 0x40  # nvml.h, nvmlClocksEventReasonHwThermalSlowdown


class StandIn:
    """A recorded machine whose facts a test changes: `now` of every GPU, `reasons` of the next samples."""

    def __init__(self):
        self._machine = machines.recorded().machine
        self.topology = machines.recorded().topology
        self.now, self.reasons, self.taken = {}, 0, ""
        self.logged = [Logged((Xid(self.topology.gpus[0].pci_bus_id, 79, "before"),))]
        self.sampled = threading.Event()

    def facts(self, names):
        gpus = self._machine.gpus
        return tuple(Gpu(gpu.index, {**gpu.facts, **self.now}) for gpu in gpus)

    def host(self, names=None):
        return {name: self._machine.host[name] for name in names or self._machine.host}

    def sample(self, slow=True):
        readings = dict.fromkeys(READINGS)
        self.sampled.set()
        return Sample(0.0, tuple({**readings, "clock_event_reasons": self.reasons} for _ in self.topology.gpus))

    def kernel_log(self):
        return self.logged.pop() if self.logged else Logged()

    def present(self):
        return self._machine.present

    def lock(self):
        if self.taken:
            raise GpuTaken(self.taken)
        return ExitStack()


@pytest.fixture
def node():
    return StandIn()


@pytest.fixture
def own(node, monkeypatch):
    monkeypatch.setattr(agent.local_node, "opened", lambda wanted: nullcontext(node))
    own = OwnNode(AgentSettings("."))
    own.open("eth0")
    yield own
    own.stop_watching()


def health(own):
    """After its way to the controller."""
    return codec.unpacked(codec.packed(own.check_health(failed=False)), messages.CheckHealth.answer)


def test_a_machine_with_gpus_arrives_as_it_is(node, own):
    hello = codec.unpacked(codec.packed(own.open("eth0")), messages.FromAgent)
    assert (hello.topology, hello.machine.host, hello.present) == (node.topology, node.host(), node.present())
    assert own.host(("kernel",)) == {"kernel": node.host()["kernel"]}


def test_what_got_worse_is_told_once_and_what_was_before_is_not(node, own):
    assert health(own) == Health()
    node.now = {"ecc_uncorrected_volatile": 1}
    faults = health(own).faults
    assert sorted({str(place) for fault in faults for place in fault.subjects}) == ["gpu0", "gpu1", "gpu2", "gpu3"]
    assert health(own) == Health()


def test_what_happens_between_two_questions_is_seen_while_ranks_work(node, own):
    assert health(own) == Health()
    node.reasons = THERMAL_SLOWDOWN
    own.watch()
    assert node.sampled.wait(60)
    own.stop_watching()
    node.reasons = 0
    assert len(health(own).faults) == 4


def test_what_nobody_could_see_is_told(node, own):
    node.sample = lambda slow: 1 / 0
    own.watch()
    while "ZeroDivisionError" not in (found := health(own)).unseen:
        assert found.faults == ()
    node.logged = [Logged(unread="the kernel log was overwritten")]
    assert "the kernel log was overwritten" in health(own).unseen


def test_a_gpu_that_somebody_has_is_told(node, own):
    node.taken = "GPU 0 is in use by another run"
    assert own.lock() == node.taken
    node.taken = ""
    assert own.lock() == ""
    node.taken = "this one has it"
    assert own.lock() == ""


def test_without_gpus_it_is_a_node_that_says_why(monkeypatch):
    def none(wanted):
        raise NoGpus(GONE)

    monkeypatch.setattr(agent.local_node, "opened", none)
    topology = OwnNode(AgentSettings(".", gpus=8)).open("eth0").topology
    assert (topology.gpus, topology.absent, topology.problems) == ((), GONE, (GONE,))

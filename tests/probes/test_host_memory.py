"""Host memory: which figure belongs to which NUMA node, and a node that lacks memory modules."""

import pytest

from pytest_gpufleet.hardware import host
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import numa_node
from pytest_gpufleet.verdict.judgement import judge
from tests.probes.test_links import machine

# Two NUMA nodes on ranks that have one, whose figures are those of their processors. This process may use more of one
# than of the other.
TWO_NODES = """
import threading
import pytest
from pytest_gpufleet import MiB
from pytest_gpufleet.probes import host_memory_bandwidth
from pytest_gpufleet.probes.memory import host_triad

NODES = {0: [0, 1, 4], 2: [2, 3]}
RATES = {0: 100.0, 1: 20.0, 2: 70.0, 3: 40.0, 4: 90.0}

def plant(rank):
    here = threading.local()

    class System:
        @staticmethod
        def sched_setaffinity(thread, processors):
            (here.processor,) = processors

    host_triad.os, host_triad.processors_by_numa_node = System, lambda: NODES
    host_triad._rate = lambda *given: RATES[here.processor]

@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_two_nodes(world, ranks):
    some = world.subset(range(ranks))
    some.run(plant)
    (measurement,) = host_memory_bandwidth(some, MiB, 0.01)
    assert {str(place): value for place, value in measurement.values.items()} == {"numa0": 120.0, "numa2": 110.0}
    assert dict(measurement.conditions) == {"operation": "triad"}
    assert all(len(samples) == 3 for samples in measurement.samples.values())
"""


def figures(*values):
    places = map(numa_node, range(len(values)))
    return Measurement("host_memory_bandwidth", dict(zip(places, values, strict=True)), {"operation": "triad"})


def judged(*values):
    return judge(figures(*values), None, machine(), "check", rehearsal=False, required=False)


def test_every_figure_belongs_to_its_numa_node(fleet):
    run = fleet(TWO_NODES, ranks=3)
    assert set(run.outcomes.values()) == {"passed"}, run.text


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_a_numa_node_that_lacks_a_memory_channel_is_named(nodes):
    finding = judged(*[300.0] * (nodes - 1), 275.0)  # 11 of 12 channels
    assert finding.state == "missed"
    assert [*finding.slower_than_peers] == [numa_node(nodes - 1)]


@pytest.mark.parametrize("values", [(300.0,), (300.0, 292.0), (300.0, 292.0, 288.0, 301.0)])
def test_healthy_memory_and_that_of_one_node_alone_are_not_missed(values):
    assert judged(*values).state == "for information"


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ({0: "0-1,4", 1: "2-3"}, {0: [0, 1, 4], 1: [2]}),
        ({0: "0-7", 1: "64-127", 2: ""}, {0: [0, 1, 2, 4]}),  # memory without processors, and processors of others
        ({}, {0: [0, 1, 2, 4]}),
    ],
    ids=["two nodes", "some without", "not told"],
)
def test_processors_are_those_of_this_process_by_numa_node(tmp_path, monkeypatch, lists, expected):
    for number, text in lists.items():
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{text}\n")
    monkeypatch.setattr(host, "NUMA_NODES", tmp_path)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda process: {0, 1, 2, 4})
    assert host.processors_by_numa_node() == expected

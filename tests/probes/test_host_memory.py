"""Host memory: which figure belongs to which NUMA node, and a node that lacks memory modules."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from pytest_gpufleet.hardware import host
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import numa_node
from pytest_gpufleet.probes import memory
from pytest_gpufleet.verdict.judgement import judge
from tests.probes.test_links import machine

# Two NUMA nodes on ranks that have one, whose figures are those of their processors.
TWO_NODES = """
import threading
import pytest
from pytest_gpufleet import MiB
from pytest_gpufleet.probes.memory import host_memory_bandwidth
from pytest_gpufleet.probes import memory

NODES = {0: [0, 1, 4], 2: [2, 3]}
RATES = {0: 100.0, 1: 20.0, 2: 70.0, 3: 40.0, 4: 90.0}

def plant(rank):
    here = threading.local()

    class System:
        @staticmethod
        def sched_setaffinity(thread, processors):
            (here.processor,) = processors

    memory.os, memory.host.processors_by_numa_node = System, lambda: NODES
    memory.host.short_of = lambda processors, memory: ""
    memory._rate = lambda *given: RATES[here.processor]

@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_two_nodes(world, ranks):
    some = world.subset(range(ranks))
    some.run(plant)
    (measurement,) = host_memory_bandwidth(some, MiB, 0.01)
    assert {str(place): value for place, value in measurement.values.items()} == {"numa0": 210.0, "numa2": 110.0}
    assert dict(measurement.conditions) == {"operation": "triad"}
    assert all(len(samples) == 3 for samples in measurement.samples.values())
"""

QUOTA = """
from pytest_gpufleet import MiB
from pytest_gpufleet.probes.memory import host_memory_bandwidth
from pytest_gpufleet.probes import memory

def plant(rank):
    memory.host.short_of = lambda processors, memory: "the container has the time of 1 processor"

def test_quota(world):
    world.run(plant)
    host_memory_bandwidth(world, MiB, 0.01)
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
        ({0: "0-1,4", 1: "2"}, {0: [0, 1, 4], 1: [2]}),
        ({0: "0-2,4", 1: "64-127", 2: ""}, {0: [0, 1, 2, 4]}),  # processors of others, and memory without processors
        ({0: "0-1,4", 1: "2-3"}, {0: [0, 1, 4]}),  # a cpuset with one processor of two would show half
        ({0: "0,2", 3: "1,4"}, {0: [0, 2]}),  # without the memory of node 3 its processors would fill that of node 0
        ({0: "0-63"}, {}),
        ({}, {0: [0, 1, 2, 4]}),
    ],
    ids=["two nodes", "some without", "part of one", "memory of one", "part of all", "not told"],
)
def test_a_numa_node_is_measured_where_this_process_has_all_of_it(tmp_path, monkeypatch, lists, expected):
    for number, text in lists.items():
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{text}\n")
    (tmp_path / "status").write_text("Mems_allowed:\t7\nMems_allowed_list:\t0-2\n")
    monkeypatch.setattr(host, "NUMA_NODES", tmp_path)
    monkeypatch.setattr(host, "STATUS", tmp_path / "status")
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda process: {0, 1, 2, 4})
    assert host.processors_by_numa_node() == expected


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, ""),
        ({"cpu.max": "max 100000", "memory.max": "max", "memory.current": "5"}, ""),
        ({"cpu.max": "6400000 100000", "memory.max": "64000000000", "memory.current": "32000000000"}, ""),
        ({"cpu.max": "800000 100000"}, "the container has the time of 8 processors, and 64 to run on"),
        ({"memory.max": "16000000000", "memory.current": "13000000000"}, "the container has 3 GB of memory left"),
    ],
    ids=["no container", "no limits", "enough", "a quota", "little memory"],
)
def test_what_a_container_leaves(tmp_path, monkeypatch, files, told):
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    assert host.short_of(64, 3 << 30).startswith(told)
    assert bool(host.short_of(64, 3 << 30)) is bool(told)


def test_the_thread_that_failed_tells_why(monkeypatch):
    here, rank = threading.local(), SimpleNamespace(phase=lambda name: nullcontext(), node=0)

    def lacks_memory_at_1(nbytes, value):
        if here.processor == 1:
            raise MemoryError("no more")

    monkeypatch.setattr(memory.os, "sched_setaffinity", lambda thread, one: setattr(here, "processor", *one))
    monkeypatch.setattr(memory, "_first_touched", lacks_memory_at_1)
    monkeypatch.setattr(memory, "_rate", lambda *given: 1.0)
    with pytest.raises(MemoryError, match="no more"):
        memory._triad(rank, 0, [0, 1, 2], 8, 0.0)


def test_a_container_with_a_quota_shows_no_memory(fleet):
    run = fleet(QUOTA)
    assert run.outcomes == {"test_quota": "not applicable"}, run.text

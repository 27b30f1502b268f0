"""Pairs of ranks and their links: the schedule, which figure belongs to which pair, and faults that must be named."""

import ctypes
import re
from statistics import median
from threading import Thread

import pytest

from pytest_gpufleet.model.place import GpuTopology
from pytest_gpufleet.probes.links.copies import host_bandwidth, pair_bandwidth, ring_bandwidth
from pytest_gpufleet.probes.links.copying import HostCopier, StartingLine
from tests.conftest import ACCEPTANCE

# Replaces the copies of the stand-in for a GPU on every rank, before any test.
PLANT = """
def plant(rank, fault):
    import ctypes
    from pytest_gpufleet.probes.links.copying import HostCopier

    genuine = HostCopier.genuine = getattr(HostCopier, "genuine", HostCopier.seconds)  # planted before each test

    def seconds(self, copies, warm_up, timed, meet=None):
        if fault == "nothing is copied" and rank.index == 2:
            if meet:
                meet()
            return 1e-3
        taken = genuine(self, copies, warm_up, timed, meet)
        if fault == "a bit is flipped" and rank.index == 2:
            last = copies[-1]
            ctypes.c_uint8.from_address(last[0] + last[2] - 1).value ^= 4
        return taken

    HostCopier.seconds = seconds
"""


def count(rank):
    """GB/s by who takes part: 10 x the one that copies + the one whose memory is copied, which its first word tells;
    and thousands for each copy that keeps the way busy meanwhile."""
    genuine = HostCopier.seconds

    def seconds(self, copies, warm_up, timed, meet=None):
        genuine(self, copies, warm_up, timed, meet)
        owner = ctypes.c_int64.from_address(copies[0][1]).value
        met = 100_000 if meet else 0
        return copies[0][2] / 1e9 / (10 * (rank.index + 1) + owner + 1 + 1000 * len(copies[1:]) + met)

    HostCopier.seconds = seconds


@pytest.fixture(scope="module")
def three(worlds):
    three = worlds(1, 4).subset(range(1, 4))  # ranks that are counted anew, but keep their places
    three.run(count)
    return three


def rounded(measurement):
    assert all(len(samples) == 3 for samples in measurement.samples.values())
    return {str(place): round(value) for place, value in measurement.values.items()}, dict(measurement.conditions)


PAIRS = [(i, j) for i in (1, 2, 3) for j in (1, 2, 3) if i != j]


@pytest.mark.parametrize(("direction", "values"), [
    ("read", {f"cpu{i}-cpu{j}": 10 * i + j for i, j in PAIRS}),
    ("write", {f"cpu{i}-cpu{j}": 11 * i for i, j in PAIRS}),
    ("write both ways", {f"cpu{i}-cpu{j}": 100_000 + 11 * i for i, j in PAIRS}),
    ("ring", {"cpu1-cpu2": 100_011, "cpu2-cpu3": 100_022, "cpu3-cpu1": 100_033}),  # all meet; the last is before 1
])  # fmt: skip
def test_every_figure_belongs_to_its_pair(three, direction, values):
    if direction == "ring":
        copied, under = ring_bandwidth(three, GpuTopology(), 4096), {}
    else:
        way = "both" if "both" in direction else direction
        copied, under = pair_bandwidth(three, GpuTopology(), way, 4096), {"direction": direction}
    assert copied.faults == []
    assert [*map(rounded, copied.measurements)] == [(values, {**under, "link": "host"})]


UNDER = {
    "host to device": {"host to device": 0},
    "device to host": {"device to host": 0},
    "both": {"host to device both ways": 1000, "device to host both ways": 1000},
}


@pytest.mark.parametrize(("at_once", "met", "method"), [("one", 0, {}), ("all", 100_000, {"method": "lined up"})])
def test_every_figure_belongs_to_its_rank(three, at_once, met, method):
    copied = host_bandwidth(three, [*UNDER], at_once, 4096)
    assert [*copied] == [*UNDER]
    for direction, under in UNDER.items():
        assert copied[direction].faults == []
        assert [*map(rounded, copied[direction].measurements)] == [
            ({f"cpu{i}": met + busy + 11 * i for i in (1, 2, 3)}, {"direction": each, "at_once": at_once, **method})
            for each, busy in under.items()
        ]


@pytest.mark.parametrize(("at_once", "counts"), [("one", max), ("all", median)])
def test_of_a_link_that_copies_alone_the_fastest_sample_counts(worlds, at_once, counts):
    copied = host_bandwidth(worlds(1, 4).subset([0]), ["host to device"], at_once, 4096)  # the rank that is not counted
    (measured,) = copied["host to device"].measurements
    ((place, samples),) = measured.samples.items()
    assert len(set(samples)) > 1
    assert measured.values[place] == counts(samples)


@pytest.mark.parametrize(("fault", "words"), [
    ("a bit is flipped", "1 of 131,072 words of 8 bytes are wrong: word 131,071 is 0x"),
    ("nothing is copied", "131,072 of 131,072 words of 8 bytes are wrong: word 0 is 0xffffffffffffffff, expected"),
], ids=["a flipped bit", "a copy that does nothing"])  # fmt: skip
def test_wrong_data_fails_the_links_that_it_crossed_and_no_others(planted, fault, words):
    run = planted(PLANT, fault, ACCEPTANCE / "test_5_links.py", "--rehearse=3", "-k", "not memory")
    assert set(run.outcomes.values()) == {"failed"}, run.text
    for check in run.record.checks.values():
        host, latency = "host_bandwidth" in check.id, "latency" in check.id
        pairs = ["CPU rank 2 and CPU rank 0", "CPU rank 2 and CPU rank 1"][: 1 if "ring" in check.id else 2]
        for place in ["CPU rank 2"] if host else pairs:
            assert f"{place}: {'' if latency else words}" in check.message
        assert not re.search("^CPU rank [01]:" if host else "^CPU rank [01] and", check.message, re.MULTILINE)


def test_ranks_meet_whomever_they_want_to_and_as_often():
    lines = [StartingLine(3) for _ in range(3)]
    for index, line in enumerate(lines):
        line.draw(index, [[each.offer] for each in lines])
    for other in (1, 2, 1):  # the third rank rests while the first two meet, and the other way round
        order = []

        def meets(other=other, order=order):
            lines[0].meet([other])
            order.append("went on")

        thread = Thread(target=meets)
        thread.start()
        order.append("came")
        lines[other].meet([0])
        thread.join()
        assert order == ["came", "went on"]
    for line in lines:
        line.memory.free()

"""Memory of a GPU and of the host: patterns, clocks while it is copied, and bandwidth at each NUMA node."""

import re
import sys
import threading
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from pytest_gpufleet.machine import processors, tools
from pytest_gpufleet.machine.gpu_facts import CLOCK_MEMORY, CLOCK_SM
from pytest_gpufleet.model.conditions import FAR
from pytest_gpufleet.model.endings import NotApplicable
from pytest_gpufleet.model.metric import GiB, MiB
from pytest_gpufleet.model.place import Gpu, gpu
from pytest_gpufleet.probes import memory
from pytest_gpufleet.probes.memory import ROW, SHARE, _block_bytes, patterns
from tests.acceptance import checks as checks  # which finds the checks
from tests.conftest import ACCEPTANCE
from tests.machine.fake_nvml import Card, FakeNvml, not_supported
from tests.machine.trees import written

EACH_GPU = ACCEPTANCE / "test_4_each_gpu.py"
HOLDS = "test_memory_holds_patterns"

# Flips a bit of memory on each rank from 1 on that has a fault, after it was written and before it is compared.
FAULT = """
def plant(rank, fault):
    import torch

    if not 0 < rank.index <= len(faults := fault.split(",")):
        return
    number, bit = map(int, faults[rank.index - 1].split())
    genuine = torch.ne
    comparisons = 0

    def ne(words, expected, out):
        nonlocal comparisons
        comparisons += words.numel() > 10_000  # not the small piece of memory that is tried out first
        if comparisons == number:
            words.view(-1)[12345] ^= 1 << bit
        return genuine(words, expected, out=out)

    torch.ne = ne
"""


WRONG = re.compile(
    r"^CPU rank (\d): wrong words in memory: 1; address 0x(\w+) "
    r"\(block 0x(\w+) to 0x(\w+)\) held 0x(\w{16}), expected 0x(\w{16}), wrong bits 0x(\w{16}), pattern (.+)$",
    re.MULTILINE,
)


def test_a_flipped_bit_is_found_and_its_address_named(planted):
    """By rank: the comparison before which it is flipped and the bit, and what was written there."""
    patterns = {"2 3": "address in address", "10 46": "random", "150 20": r"walking ones, step \d+"}
    run = planted(FAULT, ",".join(patterns), f"{EACH_GPU}::{HOLDS}", "--rehearse=4")
    found = WRONG.findall(run.check(HOLDS).message)
    assert [rank for rank, *_ in found] == ["1", "2", "3"], run.text
    for (_, *numbers, pattern), (flipped, expected_pattern) in zip(found, patterns.items(), strict=True):
        address, begin, _, held, expected, wrong = (int(number, 16) for number in numbers)
        assert address - begin == 8 * 12345
        assert wrong == held ^ expected == 1 << int(flipped.split()[1])
        assert re.match(expected_pattern, pattern)


def test_patterns_give_every_bit_both_values_and_every_word_its_own():
    words, again = (torch.empty(1024, dtype=torch.int64) for _ in range(2))
    ones, zeros, alone = (torch.zeros(1024, dtype=torch.int64) for _ in range(3))
    for pattern, same in zip(patterns(words.device, seed=0), patterns(words.device, seed=0), strict=True):
        pattern.fill(words, 1 << 40)
        same.fill(again, 1 << 40)
        assert (words == again).all(), pattern.name
        ones |= words
        zeros |= ~words
        if pattern.name in ("address in address", "random", "inverse of random"):
            assert len(words.unique()) == 1024, pattern.name
        if pattern.name.startswith("walking ones"):
            assert all(bin(half & 2**32 - 1).count("1") == 1 for half in words.view(torch.int32).tolist())
            alone |= words
    for seen in (ones, zeros, alone):
        assert (seen == -1).all()


def test_a_block_and_its_comparison_fit_beside_what_is_tested():
    for free in (gigabytes * GiB for gigabytes in (2, 4, 6, 8, 16, 141, 288)):
        # The comparison takes an eighth, the addresses at which rows begin a 32nd.
        assert _block_bytes(free) * (1 + 1 / 8 + 1 / 32) < (1 - SHARE) * free
        assert _block_bytes(free) % (8 * ROW) == 0


@pytest.mark.parametrize(("shared", "faults"), [(False, 2), (True, 0)])
def test_a_page_cache_occupies_no_memory_that_the_host_shares(monkeypatch, shared, faults):
    free = iter([4 * MiB, 4 * MiB - 128 * MiB])
    monkeypatch.setattr(memory, "_free_and_total", lambda device: (next(free), 128 * GiB))
    monkeypatch.setattr(memory, "shares_memory", lambda device: shared)
    rank = SimpleNamespace(device=torch.device("cpu"), phase=lambda name: nullcontext())
    assert len([*import_module("test_4_each_gpu").memory_faults(gpu(0), memory.hold_patterns(rank, 0.0))]) == faults


# ---------------------------------------------------------------- clocks under load
FULL = {CLOCK_SM: 1980, CLOCK_MEMORY: 3201}


@pytest.mark.parametrize(("clocks", "supported", "seen", "looks"), [
    ([345, 1410, 1980, 1410], True, 1980, 3),  # at its maximum it is looked at no longer
    ([1410], True, 1410, None),
    ([1980], False, 1980, None),  # nobody knows the maximum
])  # fmt: skip
def test_clocks_are_looked_at_until_they_are_at_their_maximum(monkeypatch, clocks, supported, seen, looks):
    """Of a GPU whose SM clock is one of `clocks` at each look, and then stays at the last."""
    nvml, looked = FakeNvml(Card(0)), []

    def clock(handle, which):
        if which == CLOCK_MEMORY:
            return FULL[which]
        looked.append(clocks[min(len(looked), len(clocks) - 1)])
        return looked[-1]

    nvml.nvmlDeviceGetClockInfo = clock
    nvml.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: 0
    nvml.nvmlDeviceGetMaxClockInfo = (lambda handle, clock: FULL[clock]) if supported else not_supported
    nvml.nvmlDeviceGetPowerUsage = lambda handle: 480_000
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(memory, "COPIED_BYTES", 64)
    monkeypatch.setattr(memory, "SECONDS", 0.1)
    rank = SimpleNamespace(gpu=Gpu(0, {"uuid": Card(0).uuid}), device=torch.device("cpu"))
    assert memory.clocks_under_load(rank) == (seen, 3201, 0, 480.0)
    assert len(looked) == looks if looks else len(looked) > 3


# ---------------------------------------------------------------- host memory
NODES = {0: [0, 1, 4], 2: [2, 3]}
RATES = {0: 100.0, 1: 20.0, 2: 70.0, 3: 40.0, 4: 90.0}


def near(one, other):
    return any({one, other} <= {*processors} for processors in NODES.values())


def two_numa_nodes(rank, short=""):
    """Of which a rank has one, and whose figures are those of their processors."""
    here = threading.local()

    class System:
        @staticmethod
        def sched_setaffinity(thread, processors):
            (here.processor,) = processors
            here.began = getattr(here, "began", here.processor)  # where it was when it wrote to its memory

    memory.os, memory.by_numa_node = System, lambda: NODES
    memory.tools.short_of = lambda processors, memory: short
    memory._rate = lambda *given: RATES[here.processor] * (1 if near(here.began, here.processor) else 0.5)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_figure_belongs_to_its_numa_node(three_ranks, ranks):
    some = three_ranks.subset(range(ranks))
    some.run(two_numa_nodes)
    measurements = memory.host_memory_bandwidth(some, MiB, 0.01)
    assert [dict(each.conditions) for each in measurements] == [{"operation": "triad"}, {"operation": FAR}]
    for each, share in zip(measurements, (1, 0.5), strict=True):
        assert {str(place): value for place, value in each.values.items()} == {
            "numa0": 210.0 * share, "numa2": 110.0 * share,
        }  # fmt: skip
        assert all(len(samples) == 3 for samples in each.samples.values())


def test_a_container_with_a_quota_has_no_figure(three_ranks):
    three_ranks.run(two_numa_nodes, "the container has the time of 1 processor")
    with pytest.raises(NotApplicable, match="the time of 1 processor"):
        memory.host_memory_bandwidth(three_ranks, MiB, 0.01)


@pytest.mark.parametrize(("lists", "expected"), [
    ({0: "0-1,4", 1: "2"}, {0: [0, 1, 4], 1: [2]}),
    ({0: "0-2,4", 1: "64-127", 2: ""}, {0: [0, 1, 2, 4]}),  # processors of others, and memory without processors
    ({0: "0-1,4", 1: "2-3"}, {0: [0, 1, 4]}),  # a cpuset with one processor of two would show half
    ({0: "0,2", 3: "1,4"}, {0: [0, 2]}),  # without the memory of node 3 its processors would fill that of node 0
    ({0: "0-63"}, {}),
    ({}, {0: [0, 1, 2, 4]}),
], ids=["two nodes", "some without", "part of one", "memory of one", "part of all", "not known"])  # fmt: skip
def test_a_numa_node_is_measured_where_this_process_has_all_of_it(tmp_path, monkeypatch, lists, expected):
    files = {f"sys/devices/system/node/node{number}/cpulist": f"{text}\n" for number, text in lists.items()}
    written(tmp_path, {**files, "proc/self/status": "Mems_allowed:\t7\nMems_allowed_list:\t0-2\n"})
    monkeypatch.setattr(processors.os, "sched_getaffinity", lambda process: {0, 1, 2, 4})
    assert processors.by_numa_node(tmp_path) == expected


LITTLE = {"memory.max": "16000000000", "memory.current": "13000000000"}


@pytest.mark.parametrize(("files", "words"), [
    ({}, ""),
    ({"cpu.max": "max 100000", "memory.max": "max", "memory.current": "5"}, ""),
    ({"cpu.max": "6400000 100000", "memory.max": "64000000000", "memory.current": "32000000000"}, ""),
    ({"cpu.max": "800000 100000"}, "the container has the time of 8 processors, and 64 to run on"),
    ({**LITTLE, "memory.stat": "file 9000000000\ninactive_file 20\nshmem 0"}, "the container has 3 GB of memory left"),
    ({**LITTLE, "memory.stat": "anon 4000000000\ninactive_file 6000000000\nactive_file 3000000000\nshmem 0"}, ""),
], ids=["no container", "no limits", "enough", "a quota", "little memory", "a cache of files"])  # fmt: skip
def test_what_a_container_leaves(tmp_path, monkeypatch, files, words):
    monkeypatch.setattr(tools, "CGROUP", written(tmp_path, files))
    assert tools.short_of(64, 3 << 30).startswith(words)
    assert bool(tools.short_of(64, 3 << 30)) is bool(words)


def test_the_thread_that_failed_tells_why(monkeypatch):
    here, rank = threading.local(), SimpleNamespace(phase=lambda name: nullcontext(), node=0)

    def lacks_memory_at_1(nbytes, value):
        if here.processor == 1:
            raise MemoryError("no more")

    monkeypatch.setattr(memory.os, "sched_setaffinity", lambda thread, one: setattr(here, "processor", *one))
    monkeypatch.setattr(memory, "_first_touched", lacks_memory_at_1)
    monkeypatch.setattr(memory, "_rate", lambda *given: 1.0)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with pytest.raises(MemoryError, match="no more"):
        memory._triad(rank, 0, [0, 1, 2], [0, 1, 2], 8, 0.0, "triad")

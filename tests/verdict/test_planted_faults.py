"""What the judge says of faults that are planted into recorded machines: docs/planted-faults.md has a row for each.

Figures are those of the recorded machines, each with the fault in every place that can have it, one after the other.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.measurement import GpuState, Measurement
from pytest_gpufleet.model.metric import GiB
from pytest_gpufleet.model.place import WORLD, Where, gpu, numa_node
from pytest_gpufleet.model.record import Record, read
from pytest_gpufleet.probes.compute.rate import relative_rate
from pytest_gpufleet.probes.search.collective import who_slows_pairs
from pytest_gpufleet.verdict.accusations import of_finding
from pytest_gpufleet.verdict.judgement import judge
from pytest_gpufleet.verdict.profile import for_gpu
from tests.acceptance.checks import outcomes, ranks_answer
from tests.boards import BOARDS
from tests.machines import recorded

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
RECORDED = Path(__file__).parents[1] / "recorded"
PAGE = Path(__file__).parents[2] / "docs" / "planted-faults.md"
MACHINES = ("h200x4-a", "h200x4-b", "h200x4-c")
HEALTHY = ("h200x1-e", "h200x2-f", *MACHINES)
LOST_LINK = 17 / 18
# What each GPU of three machines lost for each kelvin that it was warmer, over all precisions but fp64 at most.
PER_KELVIN = 0.0022

# Who is to blame, and what was found.
Found = Iterator[tuple[Collection[Where], Iterable[Fault]]]


@cache
def run_of(name: str) -> Record:
    return read(RECORDED / name / "evidence.jsonl")


def figures(record: Record, metric: str, **under: object) -> list[Measurement]:
    every = [finding.measurement for finding in record.findings if finding.measurement.metric == metric]
    return [each for each in every if under.items() <= each.conditions.items()]


def slowed(measurement: Measurement, factor: float, by: Where | None = None) -> Measurement:
    """The measurement with all places, or those that one device is part of, at this part of what they reached."""
    slow = {at: value * factor for at, value in measurement.values.items() if by is None or by in at.parts}
    return replace(measurement, values={**measurement.values, **slow}, samples={})


def said(record: Record, measurements: Iterable[Measurement], model: str = H200, **how: object) -> list[Fault]:
    found = [
        judge(each, for_gpu(model), record.topology, "check", rehearsal=False, measured=tuple(measurements), **how)
        for each in measurements
    ]
    return [fault for finding in found if finding.state == "missed" for fault in of_finding(finding)]


def gpus(record: Record) -> list[Where]:
    return [each.place for each in record.topology.gpus]


def products(record: Record) -> list[Measurement]:
    """Matrix products at each precision, with the temperature that each GPU had in that check."""
    with_states = []
    for finding in record.findings:
        if finding.measurement.metric == "gemm" and finding.measurement.conditions.get("at_once") == "all":
            _, begin, end = next(span for span in record.spans if span[0] == finding.check)
            samples = [each["gpus"] for each in record.telemetry if begin <= each["time"] <= end + 1]
            hottest = [max(gpus[index]["temperature_c"] for gpus in samples) for index in range(len(samples[0]))]
            states = {gpu(index): GpuState(temperature_c=each) for index, each in enumerate(hottest)}
            with_states.append(replace(finding.measurement, samples={}, gpu_states=states))
    return with_states


# ---------------- what is planted


def slow_products(record: Record) -> Found:
    """One GPU reaches 96 % of what its peers do at its temperature, on the average."""
    per_kelvin = next(each.per_kelvin for each in for_gpu(H200).tolerances if each.metric == "gemm_relative")
    for bad in gpus(record):
        rates = []
        for rate in products(record):
            warmth = {at: state.temperature_c or 0.0 for at, state in rate.gpu_states.items()}
            usual = fmean(
                value * (1 + per_kelvin * (warmth[at] - warmth[bad])) for at, value in rate.values.items() if at != bad
            )
            rates.append(replace(rate, values={**rate.values, bad: 0.96 * usual}))
        yield {bad}, said(record, [relative_rate(rates)])


def warm(record: Record) -> Found:
    for hot in gpus(record):
        rates = []
        for rate in products(record):
            state = replace(rate.gpu_states[hot], temperature_c=(rate.gpu_states[hot].temperature_c or 0.0) + 8)
            lost = slowed(rate, 1 - 8 * PER_KELVIN, hot)
            rates.append(replace(lost, gpu_states={**rate.gpu_states, hot: state}))
        yield (), said(record, [relative_rate(rates), *rates])


def all_memories(record: Record) -> Found:
    for each in figures(record, "memory_bandwidth"):
        yield gpus(record), said(record, [slowed(each, 0.95)])


def one_memory(record: Record) -> Found:
    for each in figures(record, "memory_bandwidth"):
        for bad in gpus(record):
            yield {bad}, said(record, [slowed(each, 0.99, bad)])


def one_host_link(record: Record) -> Found:
    for direction in ("host to device", "device to host"):
        (each,) = figures(record, "host_bandwidth", direction=direction, at_once="one")
        for bad in gpus(record):
            yield {bad}, said(record, [slowed(each, 0.95, bad)])


def pairs(record: Record) -> list[Measurement]:
    return [each for way in ("read", "write") for each in figures(record, "pair_bandwidth", direction=way)]


def all_pairs(record: Record) -> Found:
    for each in pairs(record):
        yield each.values, said(record, [slowed(each, 0.96)])


def pairs_of_one(record: Record) -> Found:
    for each in pairs(record):
        for bad in gpus(record):
            slow = slowed(each, 0.99, bad)
            yield [at for at in each.values if bad in at.parts], said(record, [slow])


def who_has_slow_pairs(record: Record) -> Found:
    for each in pairs(record):
        for bad in gpus(record):
            yield {bad}, [who_slows_pairs([slowed(each, 0.99, bad).values])]


def lost_links(record: Record) -> Found:
    for collective in ("all_reduce", "broadcast", "reduce", "sendrecv", "all_to_all"):
        for nbytes in (GiB, 8 * GiB):
            for each in figures(record, "busbw", collective=collective, bytes=nbytes):
                yield {WORLD}, said(record, [slowed(each, LOST_LINK)])


def half_training(record: Record) -> Found:
    for each in figures(record, "solo_train_throughput"):
        yield gpus(record), said(record, [slowed(each, 0.5)])


def healthy(record: Record) -> Found:
    """`spread` of products excepted: samples were phases of the power controller before 0.3."""
    kept = [finding.measurement for finding in record.findings if finding.measurement.metric != "spread"]
    yield (), said(record, [replace(each, samples={}) for each in kept])


# ---------------- what no recorded run has: readings as this version takes them


def half_training_of_an_h100() -> Found:
    """5,500 images/s would be healthy; the only figure that is published was measured with another program."""
    facts = BOARDS[H100].gpu().facts
    record = run_of("h200x4-a")
    h100 = replace(record.topology, gpus=tuple(Gpu(each.index, facts) for each in record.topology.gpus))
    each_gpu = dict.fromkeys(gpus(record), 1.0)
    parts = [
        Measurement("memory_bandwidth", dict.fromkeys(each_gpu, 2970.0), {"operation": "triad", "at_once": "all"}),
        Measurement("gemm", dict.fromkeys(each_gpu, 680.0), {"precision": "fp16", "at_once": "all"}),
    ]
    under = {"model": "resnet50", "recipe": "amp", "ranks": 1, "batch": 1024, "image": 224}
    for value, blamed in ((2750.0, gpus(record)), (5500.0, [])):
        training = Measurement("solo_train_throughput", dict.fromkeys(each_gpu, value), under)
        found = judge(training, for_gpu(H100), h100, "check", rehearsal=False, measured=parts)
        assert found.state in ("met", "missed")
        yield blamed, of_finding(found) if found.state == "missed" else []


def missing_module() -> Found:
    """One of twelve channels of a socket is empty. Medians of one node differed by 3 %."""
    for other, blamed in ((11 / 12, {numa_node(1)}), (0.97, set[Where]())):
        nodes = {numa_node(0): 230.0, numa_node(1): other * 230.0}
        measurement = Measurement("host_memory_bandwidth", nodes, {"operation": "triad"})
        yield blamed, said(run_of("h200x4-a"), [measurement])


def inventory(change: str, check: str, **more: object) -> Found:
    yield {gpu(2)}, outcomes(recorded(change), **more)[check].faults


def narrow_slot() -> Found:
    change = "gpus[2].update(pcie_width=8, pcie_width_max=8, pcie_width_able={'gpu': 16, 'port': 8})"
    return inventory(change, "test_pcie_width_is_full")


def lost_link() -> Found:
    return inventory("gpus[2]['nvlink_states'][4] = 0", "test_nvlinks_are_up")


def locked_clocks() -> Found:
    free = {"sm": 1980, "memory": 3201, "reasons": 0}
    answers = [free, free, {**free, "sm": 1410}, free]
    return inventory("", "test_clocks_are_full_under_load", world=ranks_answer(answers, "clocks_under_load"))


@dataclass(frozen=True)
class Row:
    """A row of the page: what is planted, in which machines, the code of what is said, and where."""

    fault: str
    plant: Callable[[Record], Found] | Callable[[], Found]
    code: str
    where: str
    machines: Sequence[str] = MACHINES


ROWS = {
    "products": Row("one GPU 4 % slow in matrix products", slow_products, "slower_than_peers", "that GPU"),
    "all-memories": Row("all memories 5 % slow", all_memories, "limit_missed", "every GPU"),
    "one-memory": Row("one memory 1 % slow", one_memory, "slower_than_peers", "that GPU"),
    "host-link": Row("one host link 5 % slow", one_host_link, "slower_than_peers", "that GPU"),
    "all-pairs": Row("all pairs 4 % slow", all_pairs, "limit_missed", "every pair"),
    "pairs-of-one": Row("all pairs of one GPU 1 % slow", pairs_of_one, "slower_than_peers", "its pairs"),
    "whose-pairs": Row("the same: whose they are", who_has_slow_pairs, "links_slow", "that GPU"),
    "lost-link": Row("17 of 18 NVLinks on one GPU", lost_link, "nvlink_down", "that GPU", ()),
    "lost-links": Row("17 of 18 NVLinks on every GPU", lost_links, "limit_missed", "all together"),
    "slot": Row("a slot of 8 lanes", narrow_slot, "pcie_slot_narrow", "that GPU", ()),
    "clocks": Row("locked clocks", locked_clocks, "clocks_pinned", "that GPU", ()),
    "training": Row("half ResNet-50 speed", half_training, "limit_missed", "every GPU"),
    "training-h100": Row("half ResNet-50 speed, on H100", half_training_of_an_h100, "limit_missed", "every GPU", ()),
    "memory-module": Row("a memory module missing", missing_module, "slower_than_peers", "that NUMA node", ()),
    "warm": Row("one GPU 8 K warmer, and healthy", warm, "", ""),
    "healthy": Row("nothing", healthy, "", "", HEALTHY),
}


@pytest.mark.parametrize("name", ROWS)
def test_planted(name: str) -> None:
    row = ROWS[name]
    found = [each for machine in row.machines for each in row.plant(run_of(machine))] if row.machines else row.plant()
    count = 0
    for blamed, faults in found:
        told = {(fault.code, subject) for fault in faults for subject in fault.subjects}
        assert told == {(row.code, place) for place in blamed}
        count += 1
    assert count


def test_the_page_says_what_is_tested() -> None:
    rows = re.findall(r"^\| `(.*)` \| (.*) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    says = {name: f"`{row.code}`: {row.where}" if row.code else "nothing" for name, row in ROWS.items()}
    assert rows
    assert set(rows) <= {(name, row.fault, says[name]) for name, row in ROWS.items()}

"""What versions before 0.3 told in texts alone is read as faults."""

import json
from pathlib import Path

import pytest

from pytest_gpufleet.model import old_evidence
from pytest_gpufleet.model.check import Check
from pytest_gpufleet.model.events import SCHEMA
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import Pair, gpu
from pytest_gpufleet.model.record import Record, read
from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.run.folder import RunFolder

RECORDED = Path(__file__).parents[1] / "recorded"
CHECK = "test_5_links.py::test_x"


def identity(index):
    return f"GPU {index} NVIDIA H200, serial 165432400000{index}, 00000000:5D:00.0, GPU-8f2c41d{index}"


def read_as_faults(message, check=CHECK, findings=(), failed_by="other"):
    checks = [Check(check, "failed", 1.0, message=message, failed_by=failed_by)]
    return [(fault.code, fault.subjects) for fault in old_evidence.faults(checks, findings)]


@pytest.mark.parametrize(
    ("message", "subjects"),
    [
        ("AssertionError: {5}: nvlinks_active is 9, should be 18\n{6}: nvlinks_active is 17", [gpu(5), gpu(6)]),
        ("{5}: pcie_replays was 0, is 17", [gpu(5)]),
        ("AssertionError: rank 5 of 8, {5}: 3 elements differ\nassert not [...]", [gpu(5)]),
        ("rank 5 of 8, {5} corrupts data: only without it all is right\nrank 2 of 8, {2}:\n  wrong", [gpu(5)]),
        ("the link between rank 2 of 8, {2} and rank 5 of 8, {5}: it reaches 12 GB/s", [Pair(gpu(2), gpu(5))]),
        ("AssertionError: wrong\n\ngpus = ({5}, {6})\nit compares {5}: with {6}", []),
        ("no single GPU: all pairs are about equally slow", []),
    ],
)
def test_only_lines_that_begin_with_a_gpu_accuse_it(message, subjects):
    told = read_as_faults(message.format(*map(identity, range(8))))
    assert told == ([("check_failed", (subject,)) for subject in subjects] or [("check_failed", ())])


@pytest.mark.parametrize(
    ("states", "code", "subjects"),
    [
        (["raised", *["returned"] * 7], "rank_raised", [5]),
        (["raised", "raised", *["running"] * 6], "rank_raised", [5, 6]),
        (["died", *["raised"] * 7], "rank_died", [5]),
        (["running"] * 8, "rank_hung", [5]),
        (["raised"] * 8, "rank_raised", [5, 6, 7, 0, 1, 2, 3, 4]),
    ],
)
def test_the_story_of_ranks_accuses_who_failed_and_not_who_tells_it(states, code, subjects):
    ranks = [(5 + number) % 8 for number in range(8)]
    stories = [f"rank {rank} of 8, {identity(rank)}: {state}" for rank, state in zip(ranks, states, strict=True)]
    message = "\n".join([stories[0], "(test_x)", "", *stories])
    assert read_as_faults(message) == [(code, tuple(map(gpu, subjects)))]


def test_what_stands_before_figures_is_the_cause_that_was_found():
    slow = Finding(CHECK, Measurement("busbw", {"world": 12.0}, {"bytes": 8}), "missed", missed=("world",))
    figures = "bus bandwidth (bytes=8): 1 place misses the limit\n  world: 12 GB/s, limit"
    for cause, told in (
        (f"rank 5 of 8, {identity(5)}: every pair with it reaches 12 GB/s\n", [("slower_than_peers", (gpu(5),))]),
        ("no single GPU: each of the 6 pairs is slow\n", [("cause_unclear", ())]),
        ("", []),
    ):
        assert read_as_faults(f"{cause}{figures}", findings=[slow], failed_by="limits") == told


def test_health_is_a_fault_that_was_watched():
    fault = old_evidence.worsened(CHECK, f"{identity(3)}: pcie_replays was 0, is 17")
    assert (fault.code, fault.subjects, fault.check, fault.watched) == ("health_worsened", (gpu(3),), CHECK, True)
    assert fault.told(lambda _: identity(3)) == f"{identity(3)}: pcie_replays was 0, is 17"
    switch = "nvidia-nvswitch0 on PCI 0000:c1:00.0: SXid 20034 (Fatal: x); what to do: reset"
    assert (old_evidence.worsened(CHECK, switch).subjects, old_evidence.worsened(CHECK, switch).what) == ((), switch)


def test_a_recorded_neighbour_is_read():
    record = read(RECORDED / "h200x4-neighbour" / "evidence.jsonl")
    neighbours = [fault for fault in record.faults if fault.code == "foreign_process"]
    assert [fault.subjects for fault in neighbours] == [(gpu(0),), (gpu(2),)]
    assert {fault.subjects for fault in record.faults if fault.code == "slower_than_peers"} == {(gpu(2),)}


def test_a_machine_of_schema_1_is_a_list_of_one_node() -> None:
    record = read(RECORDED / "h200x2-f" / "evidence.jsonl")
    assert [(node.index, node.host) for node in record.run.nodes] == [(0, record.run.host)]
    assert [gpu.nvlinks_active for gpu in record.topology.gpus] == [18, 18]
    assert all({"processes", "ecc_mode"} <= gpu.facts.keys() for gpu in record.topology.gpus)


def test_more_nodes_than_the_run_has_are_refused() -> None:
    topology = {"gpus": [], "links": []}
    with pytest.raises(ValueError, match=r"nodes"):
        Record().add({"event": "topology", "nodes": [topology, topology]})


def test_a_figure_of_a_metric_that_nobody_defined_can_be_read() -> None:
    finding = Finding("a.py::b", Measurement("busbw", {"world": 1.0}, {}), "not judged").to_json()
    finding["measurement"] = {**finding["measurement"], "metric": "decode_rate", "definition": None}
    record = Record()
    record.add({"event": "finding", "finding": finding})
    assert record.findings[0].measurement.unit == "unknown unit"


def test_evidence_of_a_later_schema_is_refused_and_not_read_as_if_it_were_of_this_one(tmp_path):
    first, *rest = (RECORDED / "h200x1-e" / "evidence.jsonl").read_text().splitlines()
    header = {**json.loads(first), "schema": SCHEMA + 1, "plugin": "9.1.0"}
    (tmp_path / "evidence.jsonl").write_text("\n".join([json.dumps(header), *rest]))
    with pytest.raises(Refused, match=r"9\.1\.0"):
        RunFolder(tmp_path).record()
    with pytest.raises(Refused, match=r"9\.1\.0"):
        read(tmp_path / "evidence.jsonl")

"""The GPUs at a glance: whom failures name, and what each group of checks says of each GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_gpufleet.model import place
from pytest_gpufleet.model.check import Check
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.record import Record, read
from pytest_gpufleet.report.accused import Blame, blames
from pytest_gpufleet.report.gpu_grid import standings
from pytest_gpufleet.report.groups import groups
from pytest_gpufleet.report.reason_texts import why
from pytest_gpufleet.verdict.judgement import LimitMissed
from pytest_gpufleet.world.rank_failure import RankFailure, RankReport, State

LINKS = "acceptance/test_5_links.py::test_pair_bandwidth[read]"
PAIRS = [f"gpu{i}-gpu{j}" for i in range(8) for j in range(8) if i != j]

RecordOf = Callable[..., Record]


def stand(record: Record) -> dict[str, dict[str, str]]:
    """group -> GPU (or "machine") -> what its cell says."""
    parts = groups(record)
    rows = standings(record, parts, blames(record))
    return {
        part.title: {str(row.gpu.place) if row.gpu else "machine": row.cells[column].text for row in rows}
        for column, part in enumerate(parts)
    }


def only(record: Record) -> Blame:
    (blame,) = blames(record).values()
    return blame


def failed(message: str, check: str = LINKS) -> list[Check]:
    return [Check(check, "failed", 1.0, message=message)]


def pairs(*slow: str) -> Finding:
    values = {pair: 12.0 if pair in slow else 394.0 for pair in PAIRS}
    return Finding(
        LINKS,
        Measurement("pair_bandwidth", values, {"direction": "read"}),
        "missed",
        missed=tuple(map(place.read, slow)),
    )


def test_healthy_machine_is_ok_everywhere(standard: Record) -> None:
    cells = stand(standard)
    assert {"Inventory", "Health", "Exactness", "Compute", "Memory", "Links", "Collectives", "ResNet-50"} <= set(cells)
    assert {text for group in cells.values() for text in group.values()} == {"ok"}


def test_bad_gpu_is_seen_at_a_glance(bad_gpu: Record) -> None:
    cells = stand(bad_gpu)
    assert cells["Inventory"]["gpu5"] == cells["Links"]["gpu5"] == cells["ResNet-50"]["gpu5"] == "failed"
    assert cells["Compute"]["gpu5"] == "failed 7x"
    assert cells["Collectives"]["gpu5"] == "failed 27x"  # the cause that was found names it
    assert cells["Memory"]["gpu5"] == cells["Health"]["gpu5"] == "ok"
    assert {cells["Links"][f"gpu{index}"] for index in range(8) if index != 5} == {"with GPU 5"}
    others = [group[place] for name, group in cells.items() if name != "Links" for place in group if place != "gpu5"]
    assert set(others) == {"ok"}
    assert "GPU 5 (serial 1654324000005) is named in 37 of them" in why(bad_gpu)


@pytest.mark.parametrize(
    ("slow", "named", "beside", "everybody"),
    [
        (["gpu0-gpu5"], ["gpu0", "gpu5"], [], False),
        ([pair for pair in PAIRS if "gpu5" in pair], ["gpu5"], [0, 1, 2, 3, 4, 6, 7], False),
        ([pair for pair in PAIRS if "gpu2" in pair or "gpu5" in pair], ["gpu2", "gpu5"], [0, 1, 3, 4, 6, 7], False),
        ([pair for pair in PAIRS if "gpu5" in pair or pair == "gpu0-gpu1"], ["gpu5", "gpu0", "gpu1"], [2, 3], False),
        (PAIRS, [], [], True),
    ],
    ids=["one pair", "one GPU", "two GPUs", "one GPU and one more pair", "all"],
)
def test_pairs_point_to_the_gpu_that_they_share(
    record_of: RecordOf, slow: list[str], named: list[str], beside: list[int], everybody: bool
) -> None:
    finding = pairs(*slow)
    message = str(LimitMissed([finding], GpuTopology())) if finding.limit else "bandwidth between two GPUs (x): slow"
    blame = only(record_of(findings=[finding], checks=failed(message)))
    assert sorted(blame.named) == sorted(map(place.read, named))
    assert {place.gpu(index) for index in beside} <= set(blame.beside)
    assert blame.everybody == everybody


def story(rank: int, state: State, gpu: Any) -> RankReport:
    return RankReport(rank, f"rank {rank} of 8, {gpu.identity}", state, "AssertionError" if state == "raised" else "")


@pytest.mark.parametrize(
    ("states", "named", "everybody"),
    [
        (["raised", *["returned"] * 7], ["gpu5"], False),
        (["raised", "raised", *["running"] * 6], ["gpu5", "gpu6"], False),
        (["died", *["raised"] * 7], ["gpu5"], False),
        (["running"] * 8, ["gpu5"], False),
        (["raised"] * 8, [], True),
    ],
)
def test_story_of_a_failure_blames_who_failed_and_not_who_tells_it(
    record_of: RecordOf, accepted: Record, states: list[State], named: list[str], everybody: bool
) -> None:
    gpus = accepted.topology.gpus
    ranks = [(5 + number) % 8 for number in range(8)]
    reports = tuple(story(rank, state, gpus[rank]) for rank, state in zip(ranks, states, strict=True))
    record = record_of(checks=failed(str(RankFailure("exception", "test_x", reports))))
    assert only(record) == Blame(tuple(map(place.read, named)), {}, everybody)
    assert stand(record)["Links"]["gpu3"] == ("unclear" if everybody else "—" if named else "ok").replace("—", "")


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("AssertionError: {5}: nvlinks_active is 9, should be 18\n{6}: nvlinks_active is 17", ["gpu5", "gpu6"]),
        ("{5}: pcie_replays was 0, is 17", ["gpu5"]),
        ("AssertionError: rank 5 of 8, {5}: 3 elements differ\nassert not [...]", ["gpu5"]),
        ("rank 5 of 8, {5} corrupts data: only without it everything is right\nrank 2 of 8, {2}:\n  wrong", ["gpu5"]),
        ("the link between rank 2 of 8, {2} and rank 5 of 8, {5}: this pair reaches 12 GB/s", ["gpu2", "gpu5"]),
        ("AssertionError: wrong\n\ngpus = ({5}, {6})\nit compares {5}: with {6}", []),
        ("no single GPU: all pairs are about equally slow", []),
    ],
)
def test_only_lines_that_begin_with_a_gpu_accuse_it(
    record_of: RecordOf, accepted: Record, message: str, named: list[str]
) -> None:
    text = message.format(*(gpu.identity for gpu in accepted.topology.gpus))
    assert list(only(record_of(checks=failed(text))).named) == [place.read(name) for name in named]


def test_what_all_ranks_missed_together_marks_the_machine(record_of: RecordOf) -> None:
    check = "acceptance/test_6_collectives.py::test_bus_bandwidth[all_reduce-64MiB]"
    finding = Finding(check, Measurement("busbw", {"world": 12.0}, {"bytes": 8}), "missed", missed=(place.WORLD,))
    other = Check("acceptance/test_1_inventory.py::test_shared_memory_is_large_enough", "failed", 0.1, message="64 MB")
    record = record_of(findings=[finding], checks=[*failed("", check), other], verdict="REJECTED")
    cells = stand(record)
    assert cells["Collectives"]["machine"] == cells["Inventory"]["machine"] == "failed"
    assert cells["Collectives"]["gpu3"] == "unclear"
    assert cells["Inventory"]["gpu3"] == ""  # the host's fault says nothing of a GPU
    assert "None of them points to a single GPU" in why(record)


NEIGHBOUR = Path(__file__).parents[1] / "recorded" / "h200x4-neighbour" / "evidence.jsonl"
XID = "acceptance/test_2_health.py::test_no_grave_xid_in_the_kernel_log"


def test_a_neighbour_explains_slow_figures_and_no_fault_of_the_hardware() -> None:
    record = read(NEIGHBOUR)
    cells = stand(record)
    assert {cells[group]["gpu2"] for group in ("Inventory", "Compute", "Memory", "Collectives", "ResNet-50")} == {
        "shared"
    }
    assert {group["machine"] for group in cells.values()} <= {"ok", "not run", ""}
    assert "Nothing here speaks against GPU 0 or GPU 2." in why(record)

    gpu = record.topology.gpus[2]
    record.checks[XID] = Check(XID, "failed", 1.0, message=f"{gpu.identity}: XID 79", failed_by="other")
    assert stand(record)["Health"]["gpu2"] == "failed"
    told = why(record)
    assert "Nothing here speaks against GPU 0." in told
    assert f"GPU 2 (serial {gpu.serial}) is named in 1 of them." in told

    # Another GPU that is slow has no neighbour to blame.
    slow = Finding(LINKS, Measurement("pair_latency", {"gpu3": 9.0}, {}), "missed", missed=(place.gpu(3),))
    record.findings.append(slow)
    assert f"GPU 3 (serial {record.topology.gpus[3].serial}) is named in 1 of them." in why(record)


def test_what_did_not_run_is_not_ok(incomplete: Record, rehearsal: Record) -> None:
    cells = stand(incomplete)
    assert cells["Endurance"]["machine"] == "not judged"  # it never finished
    assert cells["Links"]["machine"] == "not run"
    assert cells["Links"]["gpu3"] == ""
    assert cells["Collectives"]["machine"] == "not judged"
    assert {place for group in stand(rehearsal).values() for place in group} == {"machine"}

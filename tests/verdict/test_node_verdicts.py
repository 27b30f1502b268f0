"""What a run on many nodes amounts to: by what became of each, and by what was found between them."""

from pathlib import Path

import pytest

from pytest_gpufleet.model.events import FaultFound, NodeFinished
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.limit import Grade
from pytest_gpufleet.model.place import Place, gpu
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.node_verdicts import Nodes, State, faults_of, hosts_blamed, unaccepted
from pytest_gpufleet.verdict.reading import read
from tests import clusters
from tests.clusters import Ends, cluster
from tests.runs import ALONE

HEALTH = "acceptance/test_2_health.py::test_no_memory_error_is_recorded"


@pytest.fixture
def limits(tmp_path: Path) -> Path:
    return clusters.limits(tmp_path / "contract.toml")


def ended(tmp_path: Path, limits: Path, ends: Ends | None = None, **otherwise: object) -> Record:
    return read(cluster(tmp_path / "run", limits, ends, **otherwise) / "evidence.jsonl")  # type: ignore[arg-type]


def states(record: Record) -> list[tuple[State, tuple[str, ...]]]:
    return [(each.state, each.hosts) for each in unaccepted(record)]


def test_healthy_nodes_that_reach_each_other_are_accepted(tmp_path: Path, limits: Path) -> None:
    record = ended(tmp_path, limits)
    assert (record.verdict, record.exit_status, states(record)) == ("ACCEPTED", 0, [])
    assert record.reasons[0].endswith("on 3 nodes")
    assert {end.basis for end in record.finished.values()} == {"contract"}
    own = "what only the customer's profile contract.toml lets pass on a node, its own report tells"
    assert own in record.reasons


@pytest.mark.parametrize(
    ("ends", "verdict", "state"),
    [
        (Ends(lost={1: "its agent died by SIGKILL"}), "REJECTED", "lost"),
        (Ends(failed={1: (HEALTH,)}), "REJECTED", "rejected"),
        (Ends(left_out={1: "it has another driver"}), "INCOMPLETE", "left out"),
        (Ends(died=(1,)), "INCOMPLETE", "unfinished"),
        (Ends(without={1: "test_2_health"}), "INCOMPLETE", "incomplete"),
        (Ends(not_here=(1,)), "INCOMPLETE", "not here"),
    ],
)
def test_one_node_that_is_not_fine_is_named(
    ends: Ends, verdict: str, state: State, tmp_path: Path, limits: Path
) -> None:
    record = ended(tmp_path, limits, ends)
    assert (record.verdict, states(record)) == (verdict, [(state, ("gf2",))])
    assert any("gf2" in reason for reason in record.reasons)


def test_nodes_of_which_the_same_is_true_are_told_in_one_line_and_the_gravest_come_first(
    tmp_path: Path, limits: Path
) -> None:
    ends = Ends(without={0: "test_2_health", 1: "test_2_health"}, lost={2: "silent for 10 s"})
    record = ended(tmp_path, limits, ends)
    assert states(record) == [("lost", ("gf10",)), ("incomplete", ("gf1", "gf2"))]


def test_a_lost_node_counts_as_lost_whatever_else_it_is(tmp_path: Path, limits: Path) -> None:
    record = ended(tmp_path, limits, Ends(lost={1: "silent"}, left_out={1: "it is lost"}))
    assert states(record) == [("lost", ("gf2",))]


@pytest.mark.parametrize(("wanted", "verdict"), [(4, "REJECTED"), (2, "REJECTED"), (3, "ACCEPTED"), (0, "ACCEPTED")])
def test_as_many_nodes_are_there_as_were_asked_for(wanted: int, verdict: str, tmp_path: Path, limits: Path) -> None:
    record = ended(tmp_path, limits, wanted=wanted)
    assert (record.verdict, states(record)) == (verdict, [])
    assert (f"{wanted} were asked for" in record.reasons[0]) == (verdict == "REJECTED")


def test_what_is_slow_between_healthy_nodes_rejects_all(tmp_path: Path, limits: Path) -> None:
    record = ended(tmp_path, limits, values={"world": 200.0})
    assert (record.verdict, states(record)) == ("REJECTED", [])
    assert [finding.check for finding in record.findings if finding.state == "missed"] == [
        f"acceptance/{clusters.NODES_CHECK}"
    ]


def test_a_figure_that_missed_on_a_node_is_a_fault_at_its_place_among_all_nodes(tmp_path: Path, limits: Path) -> None:
    record = ended(tmp_path, limits, other={2: {"solo_train_throughput gpu3": 5000.0}})
    assert record.verdict == "REJECTED"
    found = [(fault.name, fault.subjects) for fault in record.faults if fault.check == ALONE]
    assert ("limit_missed", (gpu(3, node=2),)) in found
    assert hosts_blamed(record, ALONE) == ("gf10",)
    assert any(ALONE in reason and "gf10" in reason and "gf1 " not in reason for reason in record.reasons)
    # Its figures are in its own evidence, and no other node's GPU is meant.
    assert {finding.check for finding in record.findings} == {f"acceptance/{clusters.NODES_CHECK}"}
    assert record.topology.identity(gpu(3, node=2)).startswith("gf10 GPU 3 ")


def test_what_has_no_place_on_its_node_is_at_the_node(tmp_path: Path, limits: Path) -> None:
    cluster(tmp_path / "run", limits, Ends(failed={1: (HEALTH,)}), other={1: {"busbw world": 100.0}})
    own = read(tmp_path / "run" / "nodes" / "1-gf2" / "evidence.jsonl")
    slow = next(finding.check for finding in own.findings if finding.state == "missed")
    assert [fault.subjects for fault in faults_of(1, own, slow)] == [(Place(1, "node"),)]


def test_the_same_gpu_in_two_nodes_is_one_node_told_twice(tmp_path: Path, limits: Path) -> None:
    record = ended(tmp_path, limits, hosts=("gf1", "gf1", "gf3"))
    assert record.verdict == "INCOMPLETE"
    assert states(record) == [("one GPU", ("gf1", "gf1"))]


def fault(code: str, *nodes: int) -> FaultFound:
    return FaultFound(fault=Fault(code, tuple(Place(node, "node") for node in nodes), "gone"))


@pytest.mark.parametrize(
    ("ends", "wanted", "told", "reasons"),
    [
        (Ends(lost={1: "gone"}), 3, fault("node_lost", 1), 1),
        (Ends(), 4, fault("node_missing"), 1),
        (Ends(), 3, fault("node_lost", 1), 1),  # somebody took the event away
        (Ends(), 3, fault("node_missing"), 1),
        (Ends(lost={1: "gone"}), 3, fault("node_lost", 2), 2),
    ],
)
def test_a_node_that_is_gone_is_told_once(
    ends: Ends, wanted: int, told: FaultFound, reasons: int, tmp_path: Path, limits: Path
) -> None:
    record = ended(tmp_path, limits, ends, wanted=wanted, more=[told])
    assert (record.verdict, len(record.reasons)) == ("REJECTED", reasons)


def test_a_verdict_stands_on_the_lowest_grade_of_all_nodes() -> None:
    grades: tuple[Grade, ...] = ("calibrated", "physical", "published")
    ends = {node: NodeFinished(node=node, run="", verdict="ACCEPTED", basis=grade) for node, grade in enumerate(grades)}
    record = Record(finished=ends)
    assert basis.lowest(record) == "physical"
    assert basis.PHYSICAL in basis.described(record)


def test_many_nodes_are_told_by_their_number_and_the_first_names() -> None:
    told = Nodes("lost", tuple(f"gf{number}" for number in range(9)), "the switch went dark").text
    assert told == "9 nodes (gf0, gf1, gf2, gf3, gf4, gf5 and 3 more) lost: the switch went dark"

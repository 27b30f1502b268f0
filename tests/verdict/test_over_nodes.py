"""What a run on many nodes amounts to: by what became of each, and by what was found between them."""

from dataclasses import replace

import pytest

from pytest_gpufleet.model.events import FaultFound, NodeFinished
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import Place
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.fleet.fleet_verdict import over_nodes, settled
from pytest_gpufleet.verdict.fleet.host_runs import between
from pytest_gpufleet.verdict.reading import read
from tests import clusters
from tests.clusters import Ends, cluster
from tests.runs import ALONE

HEALTH = "acceptance/test_2_health.py::test_no_memory_error_is_recorded"


@pytest.fixture
def limits(tmp_path):
    return clusters.limits(tmp_path / "contract.toml")


def ended(tmp_path, limits, ends=None, **otherwise):
    return read(cluster(tmp_path / "run", limits, ends, **otherwise) / "evidence.jsonl")


def gaps(tmp_path, record):
    found = over_nodes(record, RunFolder(tmp_path / "run").own_runs(record)).gaps
    return [(gap.kind, gap.hosts) for gap in found]


def test_healthy_nodes_that_reach_each_other_are_accepted(tmp_path, limits):
    record = ended(tmp_path, limits)
    assert (record.verdict, record.exit_status, gaps(tmp_path, record)) == ("ACCEPTED", 0, [])
    assert record.reasons[0].startswith("3 hosts (gf1, gf2, gf10) are ACCEPTED")
    assert {end.basis for end in record.finished.values()} == {"contract"}


@pytest.mark.parametrize(("ends", "verdict", "found"), [
    (Ends(lost={1: "its agent died by SIGKILL"}), "REJECTED", ["lost"]),
    (Ends(failed={1: (HEALTH,)}), "REJECTED", []),
    (Ends(failed={1: (HEALTH,)}, left_out={1: "REJECTED"}), "REJECTED", []),
    (Ends(left_out={1: "it has another driver"}), "INCOMPLETE", ["left out"]),
    (Ends(died=(1,)), "INCOMPLETE", ["unfinished", "incomplete"]),
    (Ends(without={1: "test_2_health"}), "INCOMPLETE", ["incomplete"]),
    (Ends(not_here=(1,)), "INCOMPLETE", ["not here"]),
    (Ends(lost={1: "silent"}, left_out={1: "it is lost"}), "REJECTED", ["lost"]),
])  # fmt: skip
def test_one_node_that_is_not_fine_is_named(ends, verdict, found, tmp_path, limits):
    record = ended(tmp_path, limits, ends)
    assert record.verdict == verdict
    assert sorted(gaps(tmp_path, record)) == sorted((kind, ("gf2",)) for kind in found)
    assert any("gf2" in reason for reason in record.reasons)


def test_nodes_of_which_the_same_is_true_are_one_reason_and_the_gravest_come_first(tmp_path, limits):
    ends = Ends(without={0: "test_2_health", 1: "test_2_health"}, lost={2: "silent for 10 s"})
    first, second, *_ = ended(tmp_path, limits, ends).reasons
    assert first == "1 host (gf10) lost: silent for 10 s"
    assert second == "2 hosts (gf1, gf2) INCOMPLETE"


@pytest.mark.parametrize(("wanted", "verdict"), [(4, "REJECTED"), (2, "REJECTED"), (3, "ACCEPTED"), (0, "ACCEPTED")])
def test_as_many_nodes_are_there_as_were_asked_for(wanted, verdict, tmp_path, limits):
    record = ended(tmp_path, limits, wanted=wanted)
    assert (record.verdict, gaps(tmp_path, record)) == (verdict, [])
    assert (f"{wanted} were asked for" in record.reasons[0]) == (verdict == "REJECTED")


def test_what_is_slow_between_healthy_nodes_rejects_all(tmp_path, limits):
    record = ended(tmp_path, limits, values={"world": 200.0})
    assert (record.verdict, gaps(tmp_path, record)) == ("REJECTED", [])
    assert [finding.check for finding in record.findings if finding.state == "missed"] == [
        f"acceptance/{clusters.NODES_CHECK}"
    ]


def test_a_figure_that_missed_on_a_node_rejects_it_and_stands_in_its_own_evidence(tmp_path, limits):
    record = ended(tmp_path, limits, other={2: {"solo_train_throughput gpu3": 5000.0}})
    assert record.verdict == "REJECTED"
    assert record.reasons[0] == "1 host (gf10) is REJECTED"
    assert {finding.check for finding in record.findings} == {f"acceptance/{clusters.NODES_CHECK}"}
    assert (record.faults, ALONE in record.checks) == ([], False)


def test_the_same_gpu_in_two_nodes_is_one_node_said_twice(tmp_path, limits):
    record = ended(tmp_path, limits, hosts=("gf1", "gf1", "gf3"))
    assert record.verdict == "INCOMPLETE"
    assert gaps(tmp_path, record) == [("one GPU", ("gf1", "gf1"))]


def test_what_each_node_checked_counts_once_where_the_evidence_of_0_3_has_it_twice(tmp_path, limits):
    """Its own run has the failure, which was repeated in the run over all."""
    record = ended(tmp_path, limits, Ends(failed={1: (HEALTH,)}))
    own = RunFolder(tmp_path / "run").own_runs(record)
    of_node = own[1].record.checks[HEALTH]
    twice = replace(
        record,
        checks={**record.checks, HEALTH: of_node},
        started=[*record.started, HEALTH],
        faults=[Fault("check_failed", (Place(1, "node"),), "it failed", check=HEALTH)],
    )
    assert (between(twice, own).checks.keys(), between(twice, own).faults) == (record.checks.keys(), [])
    assert settled(twice, "", own).reasons == record.reasons
    assert settled(twice, "").verdict == "REJECTED"  # where the node's own evidence is not here


def fault(code, *nodes):
    return FaultFound(fault=Fault(code, tuple(Place(node, "node") for node in nodes), "gone"))


@pytest.mark.parametrize(("ends", "wanted", "told", "reasons"), [
    (Ends(lost={1: "gone"}), 3, fault("node_lost", 1), 1),
    (Ends(), 4, fault("node_missing"), 1),
    (Ends(), 3, fault("node_lost", 1), 1),  # somebody took the event away
    (Ends(), 3, fault("node_missing"), 1),
    (Ends(lost={1: "gone"}), 3, fault("node_lost", 2), 2),
])  # fmt: skip
def test_a_node_that_is_gone_is_told_once(ends, wanted, told, reasons, tmp_path, limits):
    record = ended(tmp_path, limits, ends, wanted=wanted, more=[told])
    against = [reason for reason in record.reasons if "judged by limits" not in reason]
    assert (record.verdict, len(against)) == ("REJECTED", reasons)


def test_a_verdict_stands_on_the_lowest_grade_of_all_nodes():
    grades = ("calibrated", "physical", "published")
    ends = {node: NodeFinished(node=node, run="", verdict="ACCEPTED", basis=grade) for node, grade in enumerate(grades)}
    record = Record(finished=ends)
    assert basis.lowest(record) == "physical"
    assert basis.THEORETICAL in basis.described(record)

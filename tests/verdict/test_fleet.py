"""What the runs of many hosts, or of the nodes of one run, amount to: who is missing, unlike the others, slower."""

import json
from dataclasses import replace

import pytest

from pytest_gpufleet.model.events import FaultFound, NodeFinished, as_written
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.metric import METRICS
from pytest_gpufleet.model.place import Gpu, Place, gpu
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report.hosts import document
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.fleet import equality, fleet_peers
from pytest_gpufleet.verdict.fleet.fleet_peers import FAMILY, clocks_apart, minority, slow_places
from pytest_gpufleet.verdict.fleet.fleet_verdict import Fleet, ended as fleet_of_record, judge_fleet, judged
from pytest_gpufleet.verdict.fleet.host_runs import Common, Unusable, between, expected_as, kept, natural, read_own
from pytest_gpufleet.verdict.judgement import read
from tests import clusters
from tests.clusters import Ends, cluster
from tests.conftest import ROOT
from tests.fleets import fleet_of, host_run, measured_twice, rejected, slower
from tests.machines import first_gpus
from tests.runs import ALONE

NAMES = [f"node-{number:03}" for number in range(1, 9)]


def fleet(unusable=(), expected=NAMES, **differing):
    return judge_fleet(fleet_of(8, **differing), unusable, expected)


def gaps(found):
    return [(gap.kind, gap.hosts) for gap in found.gaps]


def with_another_driver(topology):
    return replace(topology, driver="570.86.15")


def with_facts(**facts):
    return lambda topology: replace(
        topology, gpus=tuple(Gpu(each.index, {**each.facts, **facts}) for each in topology.gpus)
    )


def of_the_first(**facts):
    return lambda topology: replace(topology, gpus=(Gpu(0, {**topology.gpus[0].facts, **facts}), *topology.gpus[1:]))


OTHER_BOARDS = {"board_part_number": "965-2G520-0041-000"}
# A healthy fleet, and what is told beside that without a fault.
NOTES = {
    "nothing": (lambda: fleet(), ""),
    "nobody names the hosts": (lambda: fleet(expected=None), "a missing one goes unseen"),
    "more GPUs in a host": (
        lambda: fleet(node_003=host_run("node-003", run={"gpus_present": 8})), "1 host (node-003) is tested in part"),
    "other part numbers": (
        lambda: fleet(node_003=host_run("node-003", machine=with_facts(**OTHER_BOARDS))),
        f"{OTHER_BOARDS['board_part_number']} (node-003)"),
    "one host": (lambda: judge_fleet(fleet_of(1), (), NAMES[:1]), "node-001"),
}  # fmt: skip


@pytest.mark.parametrize("what", NOTES)
def test_healthy_hosts_are_a_healthy_fleet(what):
    make, told = NOTES[what]
    found = make()
    assert (found.verdict, found.exit_status, [*found.grades][-1]) == ("ACCEPTED", 0, "project")
    assert (found.gaps, found.faults, found.slow, found.differences) == ((), (), (), ())
    assert [told in note for note in found.notes] == [True] * bool(told)


RUNS = sorted((ROOT / "docs" / "results").glob("2026-11-28-*/**/evidence.jsonl"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.parent.name)
def test_a_fleet_reads_of_findings_what_every_command_does_but_for_samples_and_details(path, tmp_path):
    lines = [f"{json.dumps(json.loads(line))}\n" for line in path.read_text().splitlines()]  # as a run writes them
    (tmp_path / "evidence.jsonl").write_text("".join(lines))
    common = Common()
    lean, whole = read_own(tmp_path / "evidence.jsonl", common), kept(read(path), Common())
    assert (lean.findings, lean.verdict, lean.checks) == (whole.findings, whole.verdict, whole.checks)
    found = [line.encode() for line in lines if line.startswith('{"event": "finding"')]
    assert {len(common.event(line).finding.measurement.samples) for line in found} == {0}
    assert {len(as_written(line).finding.measurement.samples) for line in found} != {0}


# ---------------------------------------------------------------- who is there
def of_another_host():
    copy = host_run("node-002")
    return replace(copy, record=replace(copy.record, run=host_run("node-003").record.run))


# The third host as it is given, or all that there is, and the gaps that this leaves.
GAPS = {
    "missing": (lambda: judge_fleet(fleet_of(7), (), NAMES), [("missing", ("node-008",))]),
    "not expected": (lambda: fleet(expected=NAMES[1:]), [("unexpected", ("node-001",))]),
    "a folder that cannot be used": (
        lambda: judge_fleet(fleet_of(7), (Unusable("reports/x", "node-008", "not made of this"),), NAMES),
        [("unusable", ("node-008",)), ("missing", ("node-008",))],
    ),
    "one run under two names": (of_another_host, [("one GPU", ("node-002", "node-003"))]),
    "rehearsed, and held against nobody": (
        lambda: host_run("node-003", run={"rehearsal": True}, change=slower(0.5)), [("rehearsal", ("node-003",))],
    ),
    "died": (lambda: host_run("node-003", verdict=None), [("incomplete", ("node-003",))]),
    "nothing": (lambda: judge_fleet([], (), None), []),
}  # fmt: skip


@pytest.mark.parametrize("case", GAPS)
def test_who_lacks_or_cannot_count_is_named(case):
    make, expected = GAPS[case]
    found = made if isinstance(made := make(), Fleet) else fleet(node_003=made)
    assert (found.verdict, found.exit_status, gaps(found), found.faults) == ("INCOMPLETE", 10, expected, ())
    assert not expected or expected[0][1][0] in found.reasons[0]


def test_two_machines_of_one_name_are_no_two_runs_of_one():
    other = host_run("node-003", machine=with_facts(uuid="GPU-of-another"), utc="2030-01-01T09:00:00+00:00")
    found = judge_fleet([*fleet_of(8), other], (), NAMES)
    assert (found.verdict, gaps(found)) == ("INCOMPLETE", [("one name", ("node-003",))])


@pytest.mark.parametrize(("host", "expected", "known"), [
    ("node-1", ["node-1"], "node-1"),
    ("node-1.rack.example", ["node-1"], "node-1"),
    ("node-1", ["node-1.rack.example"], "node-1.rack.example"),
    ("node-1", ["node-1.rack.example", "node-1.other.example"], None),
    ("node-1.rack.example", ["node-1.other.example"], None),
    ("node-11", ["node-1"], None),
])  # fmt: skip
def test_a_domain_makes_no_other_host(host, expected, known):
    assert expected_as(host, expected) == known


def test_of_two_runs_of_a_host_the_newest_counts_whatever_the_older_one_was():
    """By the moment, and not by how that is written: 10:00+02:00 is 08:00 UTC."""
    newer = replace(rejected("node-003"), folder="reports/newer")
    newer = replace(
        newer, record=replace(newer.record, run=host_run("node-003", utc="2030-01-01T09:00:00+00:00").record.run)
    )
    older = host_run("node-003", utc="2030-01-01T10:00:00+02:00")
    found = judge_fleet([newer, *fleet_of(8, node_003=older)], (), NAMES)
    assert (found.verdict, len(found.hosts), len(found.notes)) == ("REJECTED", 8, 1)
    assert found.hosts[2].folder == "reports/newer"
    assert older.folder in found.notes[0]


def test_the_worst_host_decides_and_rehearsals_alone_are_a_rehearsal():
    incomplete = host_run("node-003", verdict="INCOMPLETE", reasons=["1 required check was deselected"])
    found = fleet(node_003=incomplete)
    assert (found.verdict, gaps(found)) == ("INCOMPLETE", [("incomplete", ("node-003",))])
    found = fleet(node_003=incomplete, node_004=rejected("node-004"))
    assert (found.verdict, found.exit_status) == ("REJECTED", 1)
    assert "node-004" in found.reasons[0]
    assert "node-003" in found.reasons[1]
    hosts = [host_run(name, run={"rehearsal": True}, verdict="REHEARSAL", exit_status=0) for name in NAMES]
    found = judge_fleet(hosts, (), NAMES)
    assert (found.verdict, found.exit_status, found.gaps) == ("REHEARSAL", 0, ())
    assert judge_fleet(hosts[1:], (), NAMES).exit_status == 10


@pytest.mark.parametrize("run", [{"plugin": "0.2.0"}, {"level": "quick"}, {"profile_sha256": "f" * 64}])
def test_runs_that_are_not_alike_are_named(run):
    found = fleet(node_003=host_run("node-003", run=run))
    assert (found.verdict, found.differences) == ("INCOMPLETE", ())
    assert {gap for gap in gaps(found) if gap[0] == "run otherwise"} == {("run otherwise", ("node-003",))}


# ---------------------------------------------------------------- who is unlike the others
@pytest.mark.parametrize(("fact", "differing"), [
    ("driver", {"machine": with_another_driver}),
    ("VBIOS", {"machine": with_facts(vbios="96.00.00.00.00")}),
    ("VBIOS", {"machine": of_the_first(vbios="96.00.00.00.00")}),
    ("InfoROM", {"machine": with_facts(inforom_version="G520.0280.00.00")}),
    ("number of GPUs", {"machine": lambda topology: first_gpus(topology, 3)}),
    ("GPU model", {"machine": with_facts(name="NVIDIA H100 80GB HBM3")}),
    ("ECC", {"machine": with_facts(ecc_mode=[0, 0])}),
    ("kernel", {"facts": {"kernel": "5.15.0"}}),
    ("IOMMU of the GPUs", {"facts": {"pci_devices": {"0000:18:00.0": {"kind": "gpu", "iommu": "DMA-FQ"}}}}),
    ("open NVIDIA driver", {"facts": {"gpudirect": {"peer_module": None, "open_modules": False}}}),
    ("variable NCCL_ALGO", {"run": {"environment": {"NCCL_ALGO": "Ring"}}}),
])  # fmt: skip
def test_a_host_that_is_unlike_the_others_is_named(fact, differing):
    found = fleet(node_003=host_run("node-003", **differing))
    assert fact in [each.fact for each in found.differences]
    assert {each.hosts for each in found.differences} == {("node-003",)}
    assert {(fault.name, fault.subjects) for fault in found.faults if fault.name == "host_unlike_others"} == {
        ("host_unlike_others", (Place(2, "node"),))
    }
    assert (found.verdict, found.exit_status) == ("REJECTED", 1)


@pytest.mark.parametrize("differing", [
    {"machine": lambda topology: replace(topology, driver=None)},
    {"machine": of_the_first(vbios=None)},
    {"facts": {"kernel": None, "pci_devices": None}},
])  # fmt: skip
def test_a_host_of_which_a_fact_is_not_known_is_unlike_nobody(differing):
    found = fleet(node_003=host_run("node-003", **differing))
    assert (found.differences, [fault.name for fault in found.faults]) == ((), [])


def test_where_nobody_has_a_majority_nobody_is_blamed_but_half_of_the_fleet_cannot_hide():
    hosts = [host_run(name, machine=with_another_driver if number % 2 else None) for number, name in enumerate(NAMES)]
    found = judge_fleet(hosts, (), NAMES)
    assert [(each.fact, each.usual, len(each.hosts)) for each in found.differences] == [("driver", None, 8)]
    assert [fault.subjects for fault in found.faults] == [()]
    assert found.verdict == "REJECTED"
    slow = {"node-005", "node-006", "node-007", "node-008"}
    hosts = [host_run(name, change=slower(0.1 if name in slow else 0.0)) for name in NAMES]
    found = [each for each in slow_places(dict(enumerate(hosts))).slow if each.figure.name == "solo_train_throughput"]
    assert {hosts[each.node].host for each in found if each.everywhere} == slow


@pytest.mark.parametrize("variable", ["NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "NCCL_HOSTID"])
def test_what_names_the_devices_of_a_host_may_differ(variable):
    same = dict(fleet_of(8)[0].record.run.environment)
    other = host_run("node-003", run={"environment": {**same, variable: "GPU-1"}})
    assert fleet(node_003=other).verdict == "ACCEPTED"


# ---------------------------------------------------------------- who is slower than all others
def test_a_host_that_is_slow_everywhere_and_a_gpu_that_is_slow_alone_are_found():
    """Its GPUs are all alike, so no run of its own could say so."""
    found = fleet(node_003=host_run("node-003", change=slower(0.1)))
    assert found.verdict == "REJECTED"
    assert (Place(2, "node"),) in {fault.subjects for fault in found.faults}
    assert {part.node for fault in found.faults for subject in fault.subjects for part in subject.parts} == {2}
    everywhere = {each.figure.name for each in found.slow if each.everywhere}
    assert everywhere >= {"pair_bandwidth", "memory_bandwidth", "solo_train_throughput"}
    assert {each.node for each in found.slow} == {2}
    found = fleet(node_003=host_run("node-003", change=slower(0.1, 1)))
    alone = [fault.subjects for fault in found.faults if all(isinstance(each, Place) for each in fault.subjects)]
    assert set(alone) == {(gpu(1, 2),)}
    pairs = [fault.subjects for fault in found.faults if fault.subjects not in alone]
    assert pairs
    assert all(gpu(1, 2) in pair.parts for subjects in pairs for pair in subjects)


# Boards 692-2G520-0282-000 and -001 of the H200, as they were recorded.
OTHER_BOARD = {"copy": 0.006, "triad": -0.007, "bf16": -0.024, "fp8": -0.030}


def of_other_board(name, by=0.0):
    made = host_run(name, machine=with_facts(board_part_number="692-2G520-0282-001"), change=slower(by))
    findings = []
    for finding in made.record.findings:
        of = finding.measurement
        factor = next((1 - less for what, less in OTHER_BOARD.items() if what in of.conditions.values()), 1)
        values = {place: value * factor for place, value in of.values.items()}
        findings.append(replace(finding, measurement=replace(of, values=values)))
    return replace(made, record=replace(made.record, findings=findings))


@pytest.mark.parametrize("others", [1, 2, 4])
def test_another_board_revision_accuses_nobody(others):
    found = fleet(**{f"node_{n:03}": of_other_board(f"node-{n:03}") for n in range(1, others + 1)})
    assert (found.verdict, found.slow, found.odd) == ("ACCEPTED", (), ())


def test_a_host_that_is_alone_with_its_part_number_is_held_against_all_of_its_model():
    found = fleet(node_003=of_other_board("node-003", 0.1))
    assert {(each.node, each.everywhere) for each in found.slow if len(each.places) > 1} == {(2, True)}


@pytest.mark.parametrize(("beside", "verdict"), [({}, "INCOMPLETE"), ({"node_004": slower(0.1)}, "REJECTED")])
def test_a_host_beside_somebody_elses_process_is_not_tested_and_one_that_is_slow_is_rejected(beside, verdict):
    busy = with_facts(processes=["process 4711 (python3), 2.1 GiB"])
    shared = host_run("node-003", machine=busy, change=slower(0.3))
    slow = {name: host_run(name.replace("_", "-"), change=change) for name, change in beside.items()}
    found = fleet(node_003=shared, **slow)
    assert found.verdict == verdict
    said = [each for each in found.reasons if "worse than the fleet's peers" in each]
    assert ["node-003" in each for each in said] == [False, True][-len(said) :]


def test_one_family_of_measurements_is_one_witness_and_no_fault():
    def slow_collectives(metric, place, value):
        return value * 0.9 if metric == "busbw" else value

    found = fleet(node_003=host_run("node-003", change=slow_collectives))
    assert {(each.node, each.figure.name) for each in found.odd} == {(2, "busbw")}
    assert {(each["host"], each["metric"]) for each in document(found)["odd_hosts"]} == {("node-003", "busbw")}
    assert (found.verdict, found.faults, len(found.notes)) == ("ACCEPTED", (), 1)
    assert all(each in found.notes[0] for each in ("node-003", "test_6_collectives.py::test_bus_bandwidth"))


def slow_copies(metric, place, value):
    return value * 0.95 if metric == "memory_bandwidth" else value


@pytest.mark.parametrize("again", [False, True])
def test_a_second_measurement_confirms_it(again):
    once = host_run("node-003", change=slow_copies)
    found = fleet(node_003=measured_twice(once) if again else once)
    assert [bool(found.slow), bool(found.odd), found.verdict] == [again, not again, ["ACCEPTED", "REJECTED"][again]]
    before = replace(host_run("node-003", change=slow_copies, utc="2020-01-01T09:00:00+00:00"), folder="reports/before")
    found = judge_fleet([before, *fleet_of(8, node_003=once)], (), NAMES)
    assert {(fault.name, fault.subjects) for fault in found.faults} == {("slower_than_peers", (Place(2, "node"),))}


def test_every_metric_has_a_family():
    assert METRICS.keys() - FAMILY.keys() == {"spread"}


def test_figures_that_no_other_host_has_are_told_and_gpus_of_another_model_are_no_peers():
    lone = host_run("node-003", folder="h200x1-e")
    assert slow_places(dict(enumerate(fleet_of(8, node_003=lone)))).without_peers == ("node-003",)
    assert "node-003" in fleet(node_003=lone).notes[0]
    assert slow_places(dict(enumerate(fleet_of(8)))).without_peers == ()
    other = with_facts(name="NVIDIA H100 80GB HBM3")
    hosts = fleet_of(8, node_003=host_run("node-003", machine=other, change=slower(0.3)))
    assert judge_fleet(hosts, (), NAMES).slow == ()


def test_names_are_sorted_as_people_count():
    assert natural("node-9") < natural("node-10") < natural("node-100")
    assert natural("gf10") < natural("gf10a")
    assert natural("rack2-node1") < natural("rack10-node1")
    assert natural("9" * 5000) > natural("8" * 5000)


# ----------------------------------------------------------------
NUMBERS = (0, 2, 5, 7)


def nodes(**differing):
    return dict(zip(NUMBERS, fleet_of(4, **differing), strict=True))


@pytest.mark.parametrize(("change", "of", "named", "left_out"), [
    (None, (), [], set()),
    (with_another_driver, (3,), [(Place(5, "node"),)], {5}),
    (with_facts(gsp_firmware="1"), (3,), [(Place(5, "node"),)], {5}),
    (of_the_first(power_limit_watts=500.0), (3,), [(Place(5, "node"),)], set()),  # it works with the others
    (with_another_driver, (1, 2), [()], set()),  # of two halves nobody is the minority
])  # fmt: skip
def test_a_node_unlike_the_others_is_named_and_left_out_for_its_software(change, of, named, left_out):
    runs = nodes(**{f"node_00{n}": host_run(f"node-00{n}", machine=change) for n in of})
    faults = fleet_peers.nodes_differ(runs, equality.unlike)
    assert [fault.subjects for fault in faults] == named
    assert {fault.name for fault in faults} <= {"host_unlike_others"}
    assert minority(runs).keys() == left_out
    assert slow_places(runs).slow == ()


def test_a_gpu_that_is_slower_than_those_of_all_nodes_is_named_with_its_node():
    found = slow_places(nodes(node_004=host_run("node-004", change=slower(0.1, 1))))
    faults = [each.fault for each in found.slow]
    assert {fault.name for fault in faults} == {"slower_than_peers"}
    assert all(gpu(1, 7) in subject.parts for fault in faults for subject in fault.subjects)


@pytest.mark.parametrize(("ahead", "off"), [
    ({0: 0.0, 2: 0.049, 5: -0.049}, []),
    ({0: 0.0, 2: 0.2, 5: 0.001}, [2]),
    ({0: 5.0, 2: 5.0, 5: -3.0}, [5]),
    ({0: 0.0, 2: 0.06}, [0, 2]),
    ({0: 0.0, 2: 0.04}, []),
    ({}, []),
], ids=str)  # fmt: skip
def test_the_clock_of_a_node_is_held_against_those_of_most(ahead, off):
    assert [(fault.name, fault.subjects) for fault in clocks_apart(ahead)] == [
        ("clock_skew", (Place(node, "node"),)) for node in off
    ]


# ---------------------------------------------------------------- what a run on many nodes amounts to
HEALTH = "acceptance/test_2_health.py::test_no_memory_error_is_recorded"


@pytest.fixture
def limits(tmp_path):
    return clusters.limits(tmp_path / "contract.toml")


def ended(tmp_path, limits, ends=None, **otherwise):
    return read(cluster(tmp_path / "run", limits, ends, **otherwise) / "evidence.jsonl")


def gaps_of(tmp_path, record):
    _, fleet = fleet_of_record(record, RunFolder(tmp_path / "run").own_runs(record))
    return [(gap.kind, gap.hosts) for gap in fleet.gaps]


def test_healthy_nodes_that_reach_each_other_are_accepted(tmp_path, limits):
    record = ended(tmp_path, limits)
    assert (record.verdict, record.exit_status, gaps_of(tmp_path, record)) == ("ACCEPTED", 0, [])
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
    assert sorted(gaps_of(tmp_path, record)) == sorted((kind, ("gf2",)) for kind in found)
    assert any("gf2" in reason for reason in record.reasons)


def test_nodes_of_which_the_same_is_true_are_one_reason_and_the_gravest_come_first(tmp_path, limits):
    ends = Ends(without={0: "test_2_health", 1: "test_2_health"}, lost={2: "silent for 10 s"})
    first, second, *_ = ended(tmp_path, limits, ends).reasons
    assert first == "1 host (gf10) lost: silent for 10 s"
    assert second == "2 hosts (gf1, gf2) INCOMPLETE"


@pytest.mark.parametrize(("wanted", "verdict"), [(4, "REJECTED"), (2, "REJECTED"), (3, "ACCEPTED"), (0, "ACCEPTED")])
def test_as_many_nodes_are_there_as_were_asked_for(wanted, verdict, tmp_path, limits):
    record = ended(tmp_path, limits, wanted=wanted)
    assert (record.verdict, gaps_of(tmp_path, record)) == (verdict, [])
    assert (f"{wanted} were asked for" in record.reasons[0]) == (verdict == "REJECTED")


def test_a_figure_that_missed_on_a_node_rejects_it_and_stands_in_its_own_evidence(tmp_path, limits):
    record = ended(tmp_path, limits, other={2: {"solo_train_throughput gpu3": 5000.0}})
    assert record.verdict == "REJECTED"
    assert record.reasons[0] == "1 host (gf10) is REJECTED"
    assert {finding.check for finding in record.findings} == {f"acceptance/{clusters.NODES_CHECK}"}
    assert (record.faults, ALONE in record.checks) == ([], False)


def test_the_same_gpu_in_two_nodes_is_one_node_said_twice(tmp_path, limits):
    record = ended(tmp_path, limits, hosts=("gf1", "gf1", "gf3"))
    assert record.verdict == "INCOMPLETE"
    assert gaps_of(tmp_path, record) == [("one GPU", ("gf1", "gf1"))]


def test_what_each_node_checked_counts_once_where_the_evidence_of_0_3_has_it_twice(tmp_path, limits):
    """Its own run has the failure, which was repeated in the run over all."""
    record = ended(tmp_path, limits, Ends(failed={1: (HEALTH,)}))
    own = RunFolder(tmp_path / "run").own_runs(record)
    of_node = own[1].record.checks[HEALTH]
    failed = Fault("check_failed", (Place(1, "node"),), "it failed", check=HEALTH)
    started, checks = [*record.started, HEALTH], {**record.checks, HEALTH: of_node}
    twice = replace(record, checks=checks, started=started, faults=[failed])
    assert (between(twice).checks.keys(), between(twice).faults) == (record.checks.keys(), [])
    assert judged(twice, "", own)[0].reasons == record.reasons
    assert judged(twice, "")[0].verdict == "REJECTED"  # where the node's own evidence is not here


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

"""Who computes other bits: a GPU beside those of its machine, a machine beside others, and who is not compared."""

from dataclasses import replace

import pytest

from pytest_gpufleet.model.events import Fingerprint, Part
from pytest_gpufleet.model.place import Place, gpu
from pytest_gpufleet.report.several_runs import compared
from pytest_gpufleet.verdict.across_runs.run_comparison import compare
from pytest_gpufleet.verdict.fingerprint_rules import gpus_apart, nothing_repeats
from pytest_gpufleet.verdict.fleet.equality import not_compared, other_bits
from pytest_gpufleet.verdict.fleet.fleet_peers import fingerprints_in_common, nodes_compute_otherwise
from pytest_gpufleet.verdict.fleet.fleet_verdict import judge_fleet
from tests.fleets import fleet_of, healthy, host_run

CHECK = "acceptance/test_3_fingerprint.py::test_gpus_compute_the_same_bits[products]"
H200, H100 = "NVIDIA H200, 132 SMs, compute capability 9.0", "NVIDIA H100 PCIe, 114 SMs, compute capability 9.0"
LIBRARIES = {"torch": "2.9.0", "cuda": "13.0", "cudnn": "9.13.0", "cublas": "130002"}
DATA, RIGHT, WRONG, UNSTEADY = "d" * 64, "a" * 64, "b" * 64, ""


def fingerprints(*outputs, kind=H200, libraries=LIBRARIES, data=DATA, ranks=0):
    """Of a machine whose GPUs compute these hashes in one part, and all the same in another; with ranks, also their
    sum."""
    together = {f"all_reduce of {ranks} ranks, float32": Part(data, RIGHT)} if ranks else {}
    return tuple(
        Fingerprint(gpu(index), kind, libraries, {"product": Part(data, output), "sum": Part(data, RIGHT), **together})
        for index, output in enumerate(outputs)
    )


@pytest.mark.parametrize(("outputs", "named"), [
    ([RIGHT] * 8, []),
    ([RIGHT], []),
    ([RIGHT] * 3 + [WRONG], [(gpu(3),)]),
    ([RIGHT, UNSTEADY], [(gpu(1),)]),
    ([RIGHT, WRONG], [(gpu(0), gpu(1))]),  # nobody can say which
    ([RIGHT, RIGHT, WRONG, WRONG], [(gpu(0), gpu(1), gpu(2), gpu(3))]),
    ([RIGHT, RIGHT, WRONG, UNSTEADY], [(gpu(2),), (gpu(3),)]),
    ([UNSTEADY] * 4, []),  # it is the software that does not repeat it
    ([RIGHT, UNSTEADY, UNSTEADY], []),
])  # fmt: skip
def test_a_gpu_that_computes_otherwise_is_named(outputs, named):
    faults = gpus_apart(fingerprints(*outputs))
    assert [fault.subjects for fault in faults] == named
    assert all("product" in fault.what and "sum" not in fault.what for fault in faults)


def test_other_models_and_libraries_are_no_peers_within_a_machine():
    mixed = fingerprints(RIGHT, RIGHT) + tuple(
        Fingerprint(gpu(2 + index), H100, LIBRARIES, {"product": Part(DATA, WRONG)}) for index in range(2)
    )
    assert gpus_apart(mixed) == []


def test_data_that_the_host_made_otherwise_are_found():
    two, (one, _) = fingerprints(RIGHT, RIGHT), fingerprints(RIGHT, RIGHT, data="e" * 64)
    (fault,) = gpus_apart([*two, *(Fingerprint(gpu(2), H200, LIBRARIES, one.parts),)])
    assert (fault.subjects, "the data of product" in fault.what) == ((gpu(2),), True)


def test_where_nothing_repeats_there_is_nothing_to_compare():
    once = tuple(Fingerprint(gpu(0), H200, LIBRARIES, {"product": Part(DATA, UNSTEADY)}) for _ in range(2))
    assert nothing_repeats(once)
    assert not nothing_repeats(fingerprints(UNSTEADY))


# ---------------------------------------------------------------- machines


def record(*outputs, driver="580.159.04", **how):
    base = healthy()
    found = fingerprints(*outputs, **how)
    return replace(base, topology=replace(base.topology, driver=driver), fingerprints={CHECK: found})


A, ALSO_A, B = record(*[RIGHT] * 4), record(*[RIGHT] * 4), record(*[WRONG] * 4)


@pytest.mark.parametrize(("machines", "named", "usual"), [
    ([A, A, ALSO_A], None, None),
    ([A, B, ALSO_A], {"1"}, RIGHT[:12]),
    ([A, B], {"0", "1"}, None),  # nobody can say which
    ([record(*[WRONG] * 8), record(RIGHT), record(RIGHT)], {"0"}, RIGHT[:12]),  # a large one has one vote
    ([record(RIGHT, RIGHT, RIGHT, WRONG), A], None, None),  # a bad GPU is no bad machine
    ([record(RIGHT, WRONG), A], None, None),  # and without a majority it has no vote
])  # fmt: skip
def test_a_machine_whose_gpus_agree_on_wrong_bits_is_named(machines, named, usual):
    records = {str(number): each for number, each in enumerate(machines)}
    found = other_bits(records)
    assert [({*each.hosts}, each.usual, each.code) for each in found] == (
        [(named, usual, "machine_bits_differ")] if named else []
    )
    assert all("product" in each.fact and "sum" not in each.fact for each in found)
    assert not_compared(records) == []


@pytest.mark.parametrize(
    "how", [{"libraries": {**LIBRARIES, "torch": "2.8.0"}}, {"kind": H100}, {"driver": "570.86.15"}]
)
def test_other_models_and_versions_are_not_compared_and_it_is_said(how):
    runs = {"a": A, "b": record(*[WRONG] * 4, **how)}
    assert other_bits(runs) == []
    assert not_compared(runs) != []
    assert other_bits({"a": A, "b": record(*[WRONG] * 4, driver="580.65.06")}) != []  # another minor version


def test_of_other_numbers_of_gpus_only_what_each_does_alone_is_compared():
    eight, two = record(*[RIGHT] * 8, ranks=8), record(WRONG, WRONG, ranks=2)
    (found,) = other_bits({"a": eight, "b": eight, "c": two})
    assert (found.hosts, "all_reduce" in found.fact) == (("c",), False)
    assert other_bits({"a": eight, "b": record(RIGHT, RIGHT, ranks=2)}) == []


def test_a_run_without_a_fingerprint_is_told_beside_others():
    assert not_compared({"a": healthy(), "b": healthy()}) == []
    assert "none (a)" in not_compared({"a": healthy(), "b": A})[0]


def test_the_comparison_of_runs_tells_of_it():
    comparison = compare({"a": A, "b": B, "c": ALSO_A})
    document = compared(comparison, 4).document
    assert [list(each["others"].values()) for each in document["fingerprints"]] == [[["b"]]]
    assert compared(comparison, 4).bad
    assert not compared(compare({"a": A, "again": ALSO_A}), 4).bad


def test_a_fleet_with_such_a_machine_is_rejected():
    taken = {"fingerprints": A.fingerprints}
    hosts = [host_run(f"node-00{number}", **taken) for number in range(3)]
    assert judge_fleet(hosts).verdict == "ACCEPTED"
    fleet = judge_fleet([*hosts, host_run("node-003", fingerprints=B.fingerprints)])
    found = [(fault.name, fault.subjects) for fault in fleet.faults]
    assert (fleet.verdict, found) == ("REJECTED", [("machine_bits_differ", (Place(3, "node"),))])


def test_a_node_of_one_run_is_named_by_its_number():
    nodes = dict(zip((0, 2, 5), fleet_of(3), strict=True))
    assert not fingerprints_in_common(nodes)
    taken = {0: A, 2: B, 5: A}
    nodes = {
        number: replace(run, record=replace(run.record, fingerprints=taken[number].fingerprints))
        for number, run in nodes.items()
    }
    assert fingerprints_in_common(nodes)
    assert [fault.subjects for fault in nodes_compute_otherwise(nodes)] == [(Place(2, "node"),)]

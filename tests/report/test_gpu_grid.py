"""The GPUs at a glance: whom failures name, and what each group of checks says of each GPU."""

import re
from dataclasses import replace

import pytest

from pytest_gpufleet.model.events import Check
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.metric import Measurement
from pytest_gpufleet.model.place import WORLD, Pair, Place, gpu, read as read_place
from pytest_gpufleet.report.banner import why
from pytest_gpufleet.report.failures import Accused, accused, grid_rows, groups
from pytest_gpufleet.report.page import page as html
from pytest_gpufleet.run.summary import summary as document
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.accusations import causes, explaining
from pytest_gpufleet.verdict.gaps import gaps
from tests.report.conftest import RUN, TRAINING, record_of
from tests.report.page import Page

LINKS = "acceptance/test_5_links.py::test_pair_bandwidth[read]"
PAIRS = [f"gpu{i}-gpu{j}" for i in range(8) for j in range(8) if i != j]


def stand(record):
    """group -> GPU (or "machine") -> what its cell says."""
    parts = groups(record)
    rows = grid_rows(record, parts, accused(record))
    return {
        part.title: {str(row.gpu.place) if row.gpu else "machine": row.cells[column].text for row in rows}
        for column, part in enumerate(parts)
    }


def only(record):
    (one,) = accused(record).values()
    return one


def failed(check=LINKS):
    return [Check(check, "failed", 1.0, message="it says so", failed_by="other")]


def pairs(*slow):
    values = {pair: 12.0 if pair in slow else 394.0 for pair in PAIRS}
    measured = Measurement("pair_bandwidth", values, {"direction": "read"})
    return Finding(LINKS, measured, "missed", missed=tuple(map(read_place, slow)))


def test_a_figure_that_two_checks_show_counts_once_wherever_figures_are_counted(incomplete):
    def counts():
        unjudged = [gap.subject for gap in gaps(incomplete) if gap.kind == "not judged"]
        tally = re.findall(r"\d+ measurements: [\d a-z,]+", Page(html(incomplete)).text)
        shown = [group.findings for group in groups(incomplete)]
        return shown, unjudged, tally, document(incomplete, "0" * 64).counts.findings, basis.by_grade(incomplete)

    once = counts()
    incomplete.findings += [replace(finding, check=TRAINING) for finding in incomplete.findings]
    assert counts() == once
    assert once[2]


def test_bad_gpu_is_seen_at_a_glance(bad_gpu):
    cells = stand(bad_gpu)
    assert cells["Inventory"]["gpu2"] == cells["ResNet-50"]["gpu2"] == "failed"
    assert cells["Compute"]["gpu2"] == "failed 7x"
    assert cells["Links"]["gpu2"] == "failed 3x"
    assert cells["Collectives"]["gpu2"] == "failed 25x"  # the cause that was found names it
    assert cells["Memory"]["gpu2"] == cells["Health"]["gpu2"] == "ok"
    others = [f"gpu{index}" for index in (0, 1, 3)]
    assert {cells["Links"][place] for place in others} == {"with GPU 2"}
    assert {group[place] for name, group in cells.items() if name != "Links" for place in others} == {"ok"}
    assert {name for name, group in cells.items() if group["machine"] != "ok"} == {"Collectives", "ResNet-50"}
    assert "GPU 2 (serial 0000000000002) in 37 checks" in why(bad_gpu)


@pytest.mark.parametrize(("slow", "named", "beside", "everybody"), [
    (["gpu0-gpu5"], [0, 5], [], False),
    ([pair for pair in PAIRS if "gpu5" in pair], [5], [0, 1, 2, 3, 4, 6, 7], False),
    ([pair for pair in PAIRS if "gpu2" in pair or "gpu5" in pair], [2, 5], [0, 1, 3, 4, 6, 7], False),
    ([pair for pair in PAIRS if "gpu5" in pair or pair == "gpu0-gpu1"], [5, 0, 1], [2, 3], False),
    (PAIRS, [], [], True),
], ids=["one pair", "one GPU", "two GPUs", "one GPU and one more pair", "all"])  # fmt: skip
def test_pairs_point_to_the_gpu_that_they_share(slow, named, beside, everybody):
    accused = only(record_of(findings=[pairs(*slow)], checks=failed()))
    assert {*accused.named} == {gpu(index) for index in named}
    assert {gpu(index) for index in beside} <= set(accused.beside)
    assert accused.everybody == everybody


def found(code, *subjects, check=LINKS):
    return Fault(code, subjects, "what is wrong", check=check)


@pytest.mark.parametrize(("subjects", "named", "everybody"), [
    ([gpu(5)], [gpu(5)], False),
    ([gpu(5), gpu(6)], [gpu(5), gpu(6)], False),
    ([gpu(index) for index in range(8)], [], True),
    ([WORLD], [], True),
    ([Pair(gpu(2), gpu(5))], [gpu(2), gpu(5)], False),
    ([Place(0, "node")], [], False),
    ([gpu(31)], [], False),
    ([], [], False),
])  # fmt: skip
def test_faults_name_their_subjects(subjects, named, everybody):
    record = record_of(checks=failed(), faults=[found("collective_wrong", *subjects)])
    assert only(record) == Accused(tuple(named), {}, everybody)
    assert stand(record)["Links"]["gpu3"] == ("unclear" if everybody else "")


def test_what_all_ranks_missed_together_marks_the_machine_which_is_all_that_a_rehearsal_has(rehearsal):
    check = "acceptance/test_6_collectives.py::test_bus_bandwidth[all_reduce-64MiB]"
    finding = Finding(check, Measurement("busbw", {"world": 12.0}, {"bytes": 8}), "missed", missed=(WORLD,))
    other = Check("acceptance/test_1_inventory.py::test_shared_memory_is_large_enough", "failed", 0.1, message="64 MB")
    record = record_of(findings=[finding], checks=[*failed(check), other], verdict="REJECTED")
    cells = stand(record)
    assert cells["Collectives"]["machine"] == cells["Inventory"]["machine"] == "failed"
    assert cells["Collectives"]["gpu3"] == "unclear"
    assert cells["Inventory"]["gpu3"] == ""  # the host's fault says nothing of a GPU
    assert "No single GPU is named" in why(record)
    assert {place for group in stand(rehearsal).values() for place in group} == {"machine"}


XID = "acceptance/test_2_health.py::test_no_grave_xid_in_the_kernel_log"


@pytest.mark.parametrize(("cause", "at", "effect", "explained"), [
    ("foreign_process", [gpu(5)], found("limit_missed", gpu(5)), True),
    ("foreign_process", [gpu(5)], found("limit_missed", Pair(gpu(2), gpu(5))), True),
    ("foreign_process", [gpu(5)], found("limit_missed", WORLD), True),
    ("foreign_process", [gpu(5)], found("cause_unclear"), True),
    ("foreign_process", [gpu(5)], found("memory_occupied", gpu(5)), True),
    ("foreign_process", [gpu(5)], found("xid_of_process", gpu(5)), True),
    ("foreign_process", [gpu(5)], found("xid_of_process", gpu(4)), False),
    ("foreign_process", [gpu(5)], found("limit_missed", gpu(4)), False),
    ("foreign_process", [gpu(5)], found("matmul_wrong", gpu(5)), False),
    ("harmful_variable", [Place(0, "node")], found("limit_missed", gpu(4)), True),
    ("harmful_variable", [Place(1, "node")], found("limit_missed", gpu(4)), False),
    ("ecc_off", [gpu(5)], found("limit_missed", gpu(5)), False),
])  # fmt: skip
def test_a_cause_outranks_its_effects_at_the_same_place(cause, at, effect, explained):
    inventory = "acceptance/test_1_inventory.py::test_x"
    checks = [*failed(inventory), *failed()]
    record = record_of(checks=checks, faults=[found(cause, *at, check=inventory), effect], verdict="REJECTED")
    assert accused(record)[LINKS].is_explained == explained
    assert bool(accused(record)[LINKS].named) == (not explained)


RAIL = Place(0, "rail", 3)


@pytest.mark.parametrize(("transport", "effect", "explained"), [
    ("local", found("rail_slow", RAIL), True),
    ("local", found("node_slow", Place(0, "node")), True),
    ("local", found("limit_missed", Pair(RAIL, Place(1, "rail", 3))), True),
    ("local", found("rail_slow", Place(1, "rail", 3)), False),
    ("local", found("limit_missed", gpu(3)), False),  # what a GPU does by itself
    ("", found("limit_missed", WORLD), False),  # one machine uses no rail
])  # fmt: skip
@pytest.mark.parametrize("cause", ["acs_enabled", "iommu_not_passthrough", "gpudirect_module_missing", "nic_not_local"])
def test_what_keeps_an_adapter_from_its_gpu_explains_a_slow_rail(cause, transport, effect, explained):
    record = record_of(run={**RUN, "transport": transport}, faults=[found(cause, RAIL), effect])
    assert bool(explaining(effect, causes(record))) == explained

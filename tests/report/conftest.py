"""Records of runs: recorded ones, as they are and with faults planted, and others made of events."""

from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest

from pytest_gpufleet.machine.gpu_facts import TELEMETRY
from pytest_gpufleet.model import codec, events
from pytest_gpufleet.model.codec import Moment
from pytest_gpufleet.model.events import Check, RunHeader
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.metric import Sample
from pytest_gpufleet.model.place import WORLD, GpuTopology, gpu
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.report.page import page as html_of
from pytest_gpufleet.verdict.across_runs.rejudgement import judge_again
from pytest_gpufleet.verdict.judgement import read
from pytest_gpufleet.verdict.profile import for_gpu
from tests import runs
from tests.conftest import EVIDENCE
from tests.fleets import fleet_of, healthy, rejected
from tests.node_records import Between, of_nodes
from tests.report.page import Page

BANDWIDTH, TRAINING = "test_6_collectives.py::test_bus_bandwidth", "test_8_resnet50.py::test_each_gpu_alone"
RUN = {
    "host": "node17.example", "utc": Moment("2026-11-20T09:14:03+00:00"), "level": "standard", "gpus": "8",
    "rehearsal": False, "command": "pytest acceptance/ --gpus 8", "profile": "H200", "python": "3.12.9",
    "command_line": {"start": "pytest", "arguments": "acceptance/ --gpus 8", "suite": "acceptance/"},
    "pytest": "9.2.0", "environment": {"NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
}  # fmt: skip
H200X8 = runs.topology("node17", runs.H200, gpus=8, compute_capability=[9, 0])
SAMPLE = Sample(1.0, (dict.fromkeys(TELEMETRY, 1.0),) * 8)


def passed(*ids):
    return [Check(check, "passed", 1.5, check.split("::")[1].replace("_", " ")) for check in ids]


NAMES = ("1_inventory.py::test_count", "1_inventory.py::test_same_model", "2_health.py::test_no_ecc_errors",
         "1_inventory.py::test_nvlinks_are_up")  # fmt: skip
INVENTORY = passed(*(f"acceptance/test_{name}" for name in NAMES))


def record_of(
    run=RUN, topology=H200X8, findings=(), checks=(), faults=(), deselected=(), verdict=None, reasons=(),
    telemetry=(SAMPLE,),
):  # fmt: skip
    return Record.of(
        codec.typed(run, RunHeader),
        events.SuiteSeen(manifest=shipped()),
        events.TopologyFound(nodes=[topology]),
        *(events.CheckStarted(check=check.id) for check in checks),
        *(events.Judged(finding=finding) for finding in findings),
        *(events.FaultFound(fault=fault) for fault in faults),
        *(events.CheckFinished(check=check) for check in checks),
        *(events.Telemetry(sample=sample) for sample in telemetry),
        *([events.Deselected(checks=list(deselected))] if deselected else []),
        *([events.Verdict(verdict=verdict, reasons=list(reasons))] if verdict else []),
    )


def accepted_record():
    """Two H200 at level standard."""
    return read(EVIDENCE / "h200x2-g" / "evidence.jsonl")


def figures_not_judged(why, *collectives):
    """Bus bandwidth of that run, not judged for these collectives, or for all."""
    unjudged = {"state": "not judged", "limit": None, "reason": why}
    return [
        replace(each, **unjudged if each.measurement.conditions["collective"] in collectives or not collectives else {})
        for each in accepted_record().findings
        if each.check.startswith(BANDWIDTH)
    ]


def rehearsal_record():
    ecc = Check("test_2_health.py::test_no_ecc_errors", "not applicable", 0.0, "No ECC errors", "", "there is no GPU")
    return record_of(
        {**RUN, "rehearsal": True, "gpus": "auto", "profile": None, "environment": {}},
        GpuTopology(torch="2.13.0+cpu"),
        figures_not_judged("a rehearsal on CPU ranks is not judged"),
        [*passed(BANDWIDTH, TRAINING), ecc],
        verdict="REHEARSAL",
        reasons=["Rehearsed on 2 CPU ranks: every check that can run without a GPU passed."],
    )


def incomplete_record():
    """Bus bandwidth alone, of two collectives without a limit."""
    why = "profile H200 has no limit for these conditions: calibrate on a known-good machine"
    record = record_of(
        findings=figures_not_judged(why, "gather", "scatter"), checks=[*INVENTORY, *passed(BANDWIDTH)],
        deselected=[TRAINING], verdict="INCOMPLETE",
        reasons=["1 required check was deselected.", "1 required check never finished."],
    )  # fmt: skip
    record.started.append("acceptance/test_9_endurance.py::test_nvlinks_stayed_clean")
    return record


SLOW = {"gemm": 0.87, "pair_bandwidth": 0.54, "busbw": 0.61, "solo_train_throughput": 0.86}
BAD, NVLINKS = gpu(2), "test_1_inventory.py::test_nvlinks_are_up"


def bad_record():
    """Four H200 of which one is slow, and with it what all do together, and has lost NVLinks."""

    def slowed(finding):
        of = finding.measurement
        slow = {at: of.values[at] * SLOW.get(of.metric, 1) for at in of.values if at == WORLD or BAD in at.parts}
        return replace(finding, measurement=replace(of, values={**of.values, **slow}, samples={}))

    record = healthy("h200x4-a")
    lost = Fault("nvlink_down", (BAD,), "nvlinks_active is 9, should be 18", check=NVLINKS)
    what = "every pair with it reaches 212 GB/s, all others 394"
    slow_links = [
        Fault("links_slow", (BAD,), what, check=each.check)
        for each in record.findings
        if each.measurement.metric in ("pair_bandwidth", "busbw")
    ]
    failed = {"outcome": "failed", "failed_by": "other", "message": lost.described(record.topology.identity)}
    slow = replace(
        record,
        checks={**record.checks, NVLINKS: replace(record.checks[NVLINKS], **failed)},
        findings=[*map(slowed, record.findings)],
        faults=[lost, *slow_links],
        telemetry=read(EVIDENCE / "h200x4-a" / "evidence.jsonl").telemetry,
    )
    again = judge_again(slow, for_gpu(runs.H200))
    return replace(again, judged_again="", reasons=again.reasons[1:])


RECORDS = {
    "ACCEPTED": accepted_record, "BAD GPU": bad_record, "REHEARSAL": rehearsal_record, "INCOMPLETE": incomplete_record,
}  # fmt: skip


recorded = cache(lambda name: RECORDS[name]())
page_of = cache(lambda name: Page(html_of(recorded(name), sha256="5e0" * 21 + "1")))


@pytest.fixture(params=RECORDS)
def every_record(request):
    return deepcopy(recorded(request.param))


@pytest.fixture(params=RECORDS)
def every_page(request):
    return page_of(request.param)


def _fixture(name):
    @pytest.fixture
    def record():
        return deepcopy(recorded(name))

    return record


accepted, bad_gpu, rehearsal, incomplete = map(_fixture, RECORDS)


@pytest.fixture(scope="session")
def faulty():
    """3 is slow with everybody, rail 1 of 5 is, 4 is rejected by its own run and left out, 7 is lost."""
    hosts = fleet_of(8, node_004=rejected("node-004"))
    between = Between(nodes=(2,), rails=((4, 1),), lost={6: "nothing heard"}, left_out={3: "REJECTED"})
    return of_nodes(hosts, between)[0]

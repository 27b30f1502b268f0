"""Records of runs as they come out of evidence.jsonl: each is written event by event and folded again."""

from copy import deepcopy
from dataclasses import asdict, replace
from functools import cache, partial

import pytest

from pytest_gpufleet.machine.gpu_facts import TELEMETRY
from pytest_gpufleet.model import codec, events
from pytest_gpufleet.model.events import Check, RunHeader
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.metric import Measurement, MiB, Sample
from pytest_gpufleet.model.place import GpuTopology
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report.page import page as html_of
from pytest_gpufleet.run.folder import Evidence
from pytest_gpufleet.verdict.verdict import conclude
from tests import runs
from tests.report import standard_run
from tests.report.page import Page
from tests.report.standard_run import SUITE

BANDWIDTH = "acceptance/test_6_collectives.py::test_bus_bandwidth"
TRAINING = "acceptance/test_8_resnet50.py::test_each_gpu_alone"
RUN = {
    "host": "node17.example", "utc": "2026-11-20T09:14:03Z", "level": "standard", "gpus": "8", "rehearsal": False,
    "command": "pytest acceptance/ --gpus 8", "profile": "H200", "python": "3.12.9", "pytest": "9.2.0",
    "command_line": {"start": "pytest", "arguments": "acceptance/ --gpus 8", "suite": "acceptance/"},
    "environment": {"NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "plugin": SUITE.version,
}  # fmt: skip
H200X8 = runs.topology(
    "node17", runs.H200, gpus=8, memory_bytes=150754820096, board_part_number="692-2G520-0282-000",
    compute_capability=[9, 0], power_limit_watts=700.0,
)  # fmt: skip


def passed(*ids):
    return [Check(check, "passed", 1.5, check.split("::")[1].replace("_", " ")) for check in ids]


NAMES = ("1_inventory.py::test_count", "1_inventory.py::test_same_model", "2_health.py::test_no_ecc_errors",
         "1_inventory.py::test_nvlinks_are_up")  # fmt: skip
INVENTORY = passed(*(f"acceptance/test_{name}" for name in NAMES))


@pytest.fixture
def record_of(tmp_path):
    return lambda **run: written(tmp_path, **run)


SAMPLE = Sample(1.0, (dict.fromkeys(TELEMETRY, 1.0),) * 8)


def written(
    folder, run=RUN, topology=H200X8, findings=(), checks=(), faults=(), unfinished=(), deselected=(), verdict=None,
    reasons=(), telemetry=(SAMPLE,)
):  # fmt: skip
    (folder / "evidence.jsonl").unlink(missing_ok=True)
    evidence = Evidence(folder / "evidence.jsonl")
    for event in (
        RunHeader(**run),
        events.SuiteSeen(manifest=SUITE),
        events.TopologyFound(nodes=[topology]),
        *(events.CheckStarted(check=each) for each in (*(check.id for check in checks), *unfinished)),
        *(events.Judged(finding=finding) for finding in findings),
        *(events.FaultFound(fault=fault) for fault in faults),
        *(events.CheckFinished(check=asdict(check)) for check in checks),
        *(events.Telemetry(sample=sample) for sample in telemetry),
        *([events.Deselected(checks=list(deselected))] if deselected else []),
        *([events.Verdict(verdict=verdict, reasons=list(reasons))] if verdict else []),
    ):
        evidence.add(event)
    evidence.close()
    return evidence.record


def rehearsal_record(folder):
    conditions = {"dtype": "float32", "ranks": 2}
    figures = (
        Measurement("busbw", {"world": 1.234 * step}, {"collective": name, "bytes": step * MiB, **conditions})
        for name in ("all_reduce", "all_gather")
        for step in (1, 4, 16)
    )
    why = "a rehearsal on CPU ranks is not judged"
    findings = [Finding(BANDWIDTH, each, "not judged", reason=why) for each in figures]
    ecc_check = "acceptance/test_2_health.py::test_no_ecc_errors"
    ecc = Check(ecc_check, "not applicable", 0.0, "No ECC errors", "", "there is no GPU")
    run = {**RUN, "rehearsal": True, "gpus": "auto", "profile": None, "environment": {}}
    return written(
        folder, run, GpuTopology(torch="2.13.0+cpu"), findings, [*passed(BANDWIDTH, TRAINING), ecc],
        verdict="REHEARSAL", reasons=["Rehearsed on 2 CPU ranks: every check that can run without a GPU passed."],
    )  # fmt: skip


def incomplete_record(folder):
    """Bus bandwidth alone, of two collectives without a limit."""
    reason = "profile H200 has no limit for these conditions: calibrate on a known-good machine"
    unjudged = {"state": "not judged", "limit": None, "reason": reason}
    largest = {"metric": "busbw", "bytes": standard_run.SIZES[-1]}
    found = []
    for each in standard_run.measured(H200X8, {}).findings:
        conditions = each.measurement.conditions
        if {"metric": each.measurement.metric, "bytes": conditions.get("bytes")} == largest:
            changed = unjudged if conditions["collective"] in ("gather", "scatter") else {}
            found.append(replace(each, check=BANDWIDTH, **changed))
    return written(
        folder, findings=found, checks=[*INVENTORY, *passed(BANDWIDTH)], deselected=[TRAINING], verdict="INCOMPLETE",
        unfinished=["acceptance/test_9_endurance.py::test_nvlinks_stayed_clean"],
        reasons=["1 required check was deselected.", "1 required check never finished."],
    )  # fmt: skip


def standard_record(folder, bad=False, seconds=30):
    """A whole run at level standard; with `bad`, GPU 5 is slow and has lost links."""
    run, failed = standard_run.bad_gpu(H200X8) if bad else (standard_run.measured(H200X8, {}), {})
    checks = standard_run.checks(run, failed)
    by_id = {check.id: check for check in checks}
    record = Record(run=codec.typed(RUN, RunHeader), manifest=SUITE, checks=by_id, findings=run.findings)
    verdict, reasons = conclude(record)
    telemetry = standard_run.telemetry(seconds)
    return written(folder, RUN, H200X8, run.findings, checks, run.faults, (), (), verdict, reasons, telemetry)


RECORDS = {
    "STANDARD": standard_record, "BAD GPU": partial(standard_record, bad=True), "REHEARSAL": rehearsal_record,
    "INCOMPLETE": incomplete_record,
}  # fmt: skip


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):

    @cache
    def record(name):
        return RECORDS[name](tmp_path_factory.mktemp("run"))

    return record


@pytest.fixture(params=RECORDS)
def every_record(request, recorded):
    return deepcopy(recorded(request.param))


@pytest.fixture(scope="session")
def page_of(recorded):
    return cache(lambda name: Page(html_of(recorded(name), sha256="5e0" * 21 + "1")))


@pytest.fixture(params=RECORDS)
def every_page(request, page_of):
    return page_of(request.param)


def _fixture(name):
    @pytest.fixture
    def record(recorded):
        return deepcopy(recorded(name))

    return record


standard = _fixture("STANDARD")
bad_gpu = _fixture("BAD GPU")
rehearsal = _fixture("REHEARSAL")
incomplete = _fixture("INCOMPLETE")

"""Records of runs as they come out of evidence.jsonl: each is written event by event and folded again."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from pytest_gpufleet.machine.gpu_facts import TELEMETRY
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.events import (
    Check,
    CheckFinished,
    CheckStarted,
    Deselected,
    FaultFound,
    Judged,
    RunHeader,
    SuiteSeen,
    Telemetry,
    TopologyFound,
    Verdict,
)
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.measurement import Measurement, Sample
from pytest_gpufleet.model.metric import MiB
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report.page import page as html_of
from pytest_gpufleet.run.evidence import Evidence
from pytest_gpufleet.verdict.verdict import conclude
from tests import runs
from tests.report import standard_run
from tests.report.page import Page
from tests.report.standard_run import SUITE

BANDWIDTH = "acceptance/test_6_collectives.py::test_bus_bandwidth"
TRAINING = "acceptance/test_8_resnet50.py::test_each_gpu_alone"
RUN = {
    "host": "node17.example",
    "utc": "2026-11-20T09:14:03Z",
    "command": "pytest acceptance/ --gpus 8",
    "command_line": {"start": "pytest", "arguments": "acceptance/ --gpus 8", "suite": "acceptance/"},
    "level": "standard",
    "gpus": "8",
    "rehearsal": False,
    "profile": "H200",
    "environment": {"NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    "python": "3.12.9",
    "pytest": "9.2.0",
    "plugin": SUITE.version,
}
H200X8 = runs.topology(
    "node17",
    runs.H200,
    gpus=8,
    memory_bytes=150754820096,
    board_part_number="692-2G520-0282-000",
    compute_capability=[9, 0],
    power_limit_watts=700.0,
)


def passed(*ids: str) -> list[Check]:
    return [Check(check, "passed", 1.5, check.split("::")[1].replace("_", " ")) for check in ids]


INVENTORY = passed(
    "acceptance/test_1_inventory.py::test_count",
    "acceptance/test_1_inventory.py::test_same_model",
    "acceptance/test_2_health.py::test_no_ecc_errors",
    "acceptance/test_1_inventory.py::test_nvlinks_are_up",
)


@pytest.fixture
def record_of(tmp_path: Path) -> Callable[..., Record]:
    """Write a run's events as the plugin does, and give the record they fold to."""
    return lambda **run: written(tmp_path, **run)


def written(
    folder: Path,
    run: dict[str, Any] = RUN,
    topology: GpuTopology | None = H200X8,
    findings: list[Finding] | tuple[Finding, ...] = (),
    checks: list[Check] | tuple[Check, ...] = (),
    faults: Iterable[Fault] = (),
    unfinished: list[str] | tuple[str, ...] = (),
    deselected: list[str] | tuple[str, ...] = (),
    verdict: str | None = None,
    reasons: list[str] | tuple[str, ...] = (),
    telemetry: Iterable[Sample] = (Sample(1.0, (dict.fromkeys(TELEMETRY, 1.0),) * 8),),
) -> Record:
    (folder / "evidence.jsonl").unlink(missing_ok=True)
    evidence = Evidence(folder / "evidence.jsonl")
    for event in (
        RunHeader(**run),
        SuiteSeen(manifest=SUITE),
        *([TopologyFound(nodes=[topology])] if topology else []),
        *(CheckStarted(check=each) for each in (*(check.id for check in checks), *unfinished)),
        *(Judged(finding=finding) for finding in findings),
        *(FaultFound(fault=fault) for fault in faults),
        *(CheckFinished(check=asdict(check)) for check in checks),
        *(Telemetry(sample=sample) for sample in telemetry),
        *([Deselected(checks=list(deselected))] if deselected else []),
        *([Verdict(verdict=verdict, reasons=list(reasons))] if verdict else []),
    ):
        evidence.add(event)
    evidence.close()
    return evidence.record


def rehearsal_record(folder: Path) -> Record:
    conditions = {"dtype": "float32", "ranks": 2}
    findings = [
        Finding(
            BANDWIDTH,
            Measurement("busbw", {"world": 1.234 * step}, {"collective": name, "bytes": step * MiB, **conditions}),
            "not judged",
            reason="a rehearsal on CPU ranks is not judged",
        )
        for name in ("all_reduce", "all_gather")
        for step in (1, 4, 16)
    ]
    ecc_check = "acceptance/test_2_health.py::test_no_ecc_errors"
    ecc = Check(ecc_check, "not applicable", 0.0, "No ECC errors", "", "there is no GPU")
    return written(
        folder,
        run={**RUN, "rehearsal": True, "gpus": "auto", "profile": None, "environment": {}},
        topology=GpuTopology(torch="2.13.0+cpu"),
        findings=findings,
        checks=[*passed(BANDWIDTH, TRAINING), ecc],
        verdict="REHEARSAL",
        reasons=["Rehearsed on 2 CPU ranks: every check that can run without a GPU passed."],
    )


def incomplete_record(folder: Path) -> Record:
    """Bus bandwidth alone, of two collectives without a limit."""
    reason = "profile H200 has no limit for these conditions: calibrate on a known-good machine"
    unjudged = {"state": "not judged", "limit": None, "reason": reason}
    largest = {"metric": "busbw", "bytes": standard_run.SIZES[-1]}
    found = [
        replace(
            each,
            check=BANDWIDTH,
            **(unjudged if each.measurement.conditions["collective"] in ("gather", "scatter") else {}),
        )
        for each in standard_run.measured(H200X8, {}).findings
        if {"metric": each.measurement.metric, "bytes": each.measurement.conditions.get("bytes")} == largest
    ]
    return written(
        folder,
        findings=found,
        checks=[*INVENTORY, *passed(BANDWIDTH)],
        unfinished=["acceptance/test_9_endurance.py::test_nvlinks_stayed_clean"],
        deselected=[TRAINING],
        verdict="INCOMPLETE",
        reasons=["1 required check was deselected.", "1 required check never finished."],
    )


def standard_record(folder: Path, bad: bool = False, seconds: int = 30) -> Record:
    """A whole run at level standard; with `bad`, GPU 5 is slow and has lost links."""
    run, failed = standard_run.bad_gpu(H200X8) if bad else (standard_run.measured(H200X8, {}), {})
    run.findings += standard_run.compared(H200X8)
    checks = standard_run.checks(run, failed)
    verdict, reasons = conclude(
        Record(
            run=codec.typed(RUN, RunHeader),
            manifest=SUITE,
            checks={check.id: check for check in checks},
            findings=run.findings,
        )
    )
    telemetry = standard_run.telemetry(seconds)
    return written(
        folder,
        findings=run.findings,
        checks=checks,
        faults=run.faults,
        verdict=verdict,
        reasons=reasons,
        telemetry=telemetry,
    )


RECORDS = {
    "STANDARD": standard_record,
    "BAD GPU": partial(standard_record, bad=True),
    "REHEARSAL": rehearsal_record,
    "INCOMPLETE": incomplete_record,
}


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Record]:
    """The record of a run by its name in RECORDS, made once."""

    @cache
    def record(name: str) -> Record:
        return RECORDS[name](tmp_path_factory.mktemp("run"))

    return record


@pytest.fixture(params=RECORDS)
def every_record(request: pytest.FixtureRequest, recorded: Callable[[str], Record]) -> Record:
    return deepcopy(recorded(request.param))


@pytest.fixture(scope="session")
def page_of(recorded: Callable[[str], Record]) -> Callable[[str], Page]:
    """The report of a run by its name in RECORDS, made once."""
    return cache(lambda name: Page(html_of(recorded(name), sha256="5e0" * 21 + "1")))


@pytest.fixture(params=RECORDS)
def every_page(request: pytest.FixtureRequest, page_of: Callable[[str], Page]) -> Page:
    return page_of(request.param)


def _fixture(name: str) -> Callable[..., Record]:
    @pytest.fixture
    def record(recorded: Callable[[str], Record]) -> Record:
        return deepcopy(recorded(name))

    return record


standard = _fixture("STANDARD")
bad_gpu = _fixture("BAD GPU")
rehearsal = _fixture("REHEARSAL")
incomplete = _fixture("INCOMPLETE")

"""Records of runs as they come out of evidence.jsonl: each is written event by event and folded again."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.events import Check, RunHeader
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.gpu import Gpu, GpuTopology
from pytest_gpufleet.model.limit import Limit
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import GiB, MiB
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report.page.report_page import summary
from pytest_gpufleet.run.evidence import Evidence
from pytest_gpufleet.verdict.health_rules import TELEMETRY
from pytest_gpufleet.verdict.verdict import conclude
from tests.report import standard_run
from tests.report.page import Page
from tests.report.standard_run import SUITE

BANDWIDTH = "acceptance/test_6_collectives.py::test_bus_bandwidth"
TRAINING = "acceptance/test_8_resnet50.py::test_each_gpu_alone"
RING = {"dtype": "float32", "ranks": 8, "nvls": False}
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
# nccl-tests' figures for a healthy machine with NVLS off, GB/s at 64 MiB, 1 GiB, 8 GiB.
HEALTHY = {
    "all_reduce": (317.2, 359.5, 366.9),
    "all_gather": (280.5, 343.5, 359.7),
    "reduce_scatter": (283.9, 345.2, 360.5),
    "broadcast": (292.4, 357.2, 362.5),
    "all_to_all": (269.3, 330.2, 344.2),
}
FLOORS = {"all_reduce": 329.4, "all_gather": 325.0, "reduce_scatter": 325.0}


def gpu(index: int) -> Gpu:
    return Gpu(
        index,
        {
            "name": "NVIDIA H200",
            "uuid": f"GPU-8f2c41d{index}-77aa-4c1e-9b1d-5a0c33e9f10{index}",
            "pci_bus_id": f"00000000:{0x5D + 8 * index:02X}:00.0",
            "memory_bytes": 150754820096,
            "serial": f"165432400{index:04d}",
            "board_part_number": "692-2G520-0282-000",
            "vbios": "96.00.A5.00.1A",
            "compute_capability": [9, 0],
            "pcie_generation": 5,
            "pcie_generation_max": 5,
            "pcie_width": 16,
            "pcie_width_max": 16,
            "nvlink_states": [1] * 18,
            "power_limit_watts": 700.0,
        },
    )


H200X8 = GpuTopology(
    gpus=tuple(gpu(index) for index in range(8)),
    links=tuple(tuple("X" if i == j else "NV18" for j in range(8)) for i in range(8)),
    fabric="nvswitch",
    driver="580.159.04",
    cuda_driver="13.0",
    cuda="13.0",
    cudnn="9.13.0",
    nccl="2.28.9",
    torch="2.11.0+cu130",
)


def minimum(metric: str, value: float, unit: str, conditions: dict[str, Any]) -> Limit:
    source = "MLE: stas00/ml-engineering, network/benchmarks"
    return Limit(metric, "min", value, unit, "published", source, conditions, "h200.toml", measured=value / 0.9)


def curves() -> list[Finding]:
    """The bandwidth curves of a healthy machine: the largest size is judged where a limit is known."""
    findings = []
    for collective, values in HEALTHY.items():
        for nbytes, value in zip((64 * MiB, GiB, 8 * GiB), values, strict=True):
            conditions = {"collective": collective, "bytes": nbytes, **RING}
            samples = {"world": (value - 0.4, value, value + 0.3)}
            measurement = Measurement("busbw", {"world": value}, conditions, samples, {"algorithm": "ring"})
            if floor := FLOORS.get(collective) if nbytes == 8 * GiB else None:
                finding = Finding(BANDWIDTH, measurement, "met", minimum("busbw", floor, "GB/s", conditions))
            elif nbytes == 8 * GiB:
                reason = "profile H200 has no limit for these conditions: calibrate on a known-good machine"
                finding = Finding(BANDWIDTH, measurement, "not judged", reason=reason)
            else:
                finding = Finding(BANDWIDTH, measurement, "for information")
            findings.append(finding)
    return findings


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
    telemetry: Iterable[dict[str, Any]] = ({"time": 1.0, "gpus": [dict.fromkeys(TELEMETRY, 1.0)] * 8},),
) -> Record:
    (folder / "evidence.jsonl").unlink(missing_ok=True)
    evidence = Evidence(folder / "evidence.jsonl")
    evidence.add("run", **run)
    evidence.add("suite", manifest=SUITE.to_json())
    if topology:
        evidence.add("topology", nodes=[codec.plain(topology)])
    for check in checks:
        evidence.add("check_started", check=check.id)
    for finding in findings:
        evidence.add("finding", finding=finding.to_json())
    for fault in faults:
        evidence.add("fault", fault=fault.to_json())
    for check in checks:
        evidence.add("check_finished", check=asdict(check))
    for check_id in unfinished:
        evidence.add("check_started", check=check_id)
    for sample in telemetry:
        evidence.add("telemetry", sample=sample)
    if deselected:
        evidence.add("deselected", checks=list(deselected))
    if verdict:
        evidence.add("verdict", verdict=verdict, reasons=list(reasons))
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
    return written(
        folder,
        findings=curves(),
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


def bad_gpu_record(folder: Path) -> Record:
    return standard_record(folder, bad=True)


RECORDS = {
    "STANDARD": standard_record,
    "BAD GPU": bad_gpu_record,
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
    return cache(lambda name: Page(summary(recorded(name), sha256="5e0" * 21 + "1")))


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

"""Folders of runs on machines that are not here, written as a run writes them: through Evidence, judged for real."""

from dataclasses import replace

import msgspec

from pytest_gpufleet.machine.gpu_facts import TELEMETRY
from pytest_gpufleet.model import events
from pytest_gpufleet.model.events import Check
from pytest_gpufleet.model.metric import GiB, Measurement, MiB
from pytest_gpufleet.model.place import Gpu, GpuTopology
from pytest_gpufleet.model.suite import Suite, shipped
from pytest_gpufleet.report.machine_section import facts
from pytest_gpufleet.run.folder import Evidence
from pytest_gpufleet.verdict import profile
from pytest_gpufleet.verdict.basis import as_given
from pytest_gpufleet.verdict.judgement import FORMULA, LimitMissed, judge, unsteady
from pytest_gpufleet.verdict.verdict import EXIT_STATUS, conclude
from tests.edited_evidence import seal

H200 = "NVIDIA H200"
UNKNOWN = "NVIDIA X9000"  # no shipped profile knows it
BANDWIDTH = "acceptance/test_6_collectives.py::test_bus_bandwidth"
ALONE = "acceptance/test_8_resnet50.py::test_each_gpu_alone"
GPUS = ("gpu0", "gpu1", "gpu2", "gpu3")

# As of another version: the same checks, with numbered cases, and no check has to leave the figures it is there for.
_FIGURELESS = {"figures": (), "figures_of_several": ()}
_CHECKS = {
    name: msgspec.structs.replace(check, cases=tuple(map(str, range(len(check.cases)))), **_FIGURELESS)
    for name, check in shipped().checks.items()
}
SUITE = Suite("0.0.0", _CHECKS)
RING = {"collective": "all_reduce", "dtype": "float32", "ranks": 4, "nvls": False}

RESNET = {"model": "resnet50", "recipe": "amp", "ranks": 1, "batch": 256}

# What a healthy machine gives, and whether a limit for it is required.
FIGURES = (
    (f"{BANDWIDTH}[0]", Measurement("busbw", {"world": 360.0}, {**RING, "bytes": 8 * GiB}), True),
    (f"{BANDWIDTH}[1]", Measurement("busbw", {"world": 21.0}, {**RING, "bytes": MiB}), False),
    (f"{BANDWIDTH}[2]", Measurement("collective_latency", {"world": 31.4159}, {**RING, "bytes": 8}), True),
    (ALONE, Measurement("solo_train_throughput", dict.fromkeys(GPUS, 6200.0), RESNET), True),
)

# A contract that they meet: sense, value, unit and conditions of each limit.
CONTRACT = {
    "busbw": ("min", 350.0, "GB/s", 'bytes = "8 GiB"'),
    "collective_latency": ("max", 40.0, "us", ""),
    "solo_train_throughput": ("min", 6000.0, "images/s", ""),
}


def limit(metric, sense, value, unit, when="", grade="contract"):
    return (
        f'[[limit]]\nmetric = "{metric}"\n{sense} = {value}\nunit = "{unit}"\ngrade = "{grade}"\n'
        f'source = "order 4711"\nwhen = {{ {when} }}\n'
    )


def contract(grades=None, **values):
    """The text of a profile with the limits of CONTRACT: of other grades, and with other values, by their metrics."""
    limits = (
        limit(metric, sense, values.get(metric, value), unit, when, (grades or {}).get(metric, "contract"))
        for metric, (sense, value, unit, when) in CONTRACT.items()
    )
    return f'name = "Contract 4711"\nmatch = ["{UNKNOWN}"]\n{"".join(limits)}'


def written(path, text=contract()):  # noqa: B008
    path.write_text(text)
    return path


def topology(host="node7", model=UNKNOWN, driver="580.159.04", gpus=4, **facts):
    """GPUs behind an NVSwitch; `facts` are more of each."""
    own = [
        {"name": model, "uuid": f"GPU-{host}-{index}", "pci_bus_id": f"00000000:{0x5D + 8 * index:02X}:00.0",
         "serial": f"{host}-S{index}"}
        for index in range(gpus)
    ]  # fmt: skip
    cards = tuple(Gpu(index, {**each, **facts}) for index, each in enumerate(own))
    links = tuple(tuple("X" if i == j else "NV18" for j in range(gpus)) for i in range(gpus))
    return GpuTopology(cards, links, "nvswitch", driver, "13.0", "13.0", "9.13.0", "2.28.9", "2.11.0+cu130")


def record(
    folder, host="node7", values=None, limits=None, failed=None, machine=None, ends=True,
    utc="2026-11-21T01:40:06+00:00", without="no file", suite=SUITE, readings=TELEMETRY, faults=(),
):  # fmt: skip
    """The folder of a run of level standard on 4 GPUs in which every check ran; it can be ACCEPTED if `limits` has one
    for each figure. `values`: other values, by "metric place". `failed`: checks that failed, and by what. `without`:
    the file whose checks did not run. `readings`: the readings of telemetry. `faults`: seen beside the checks."""
    machine, values, failed = machine or topology(host), values or {}, failed or {}
    folder.mkdir(parents=True)
    evidence = Evidence(folder / "evidence.jsonl")
    limit = profile.choose(limits, (gpu.name for gpu in machine.gpus))
    evidence.add(events.RunHeader(
        host=host, utc=utc, command="pytest acceptance/ --gpus 4", gpus="4", ranks=4, python="3.12.3", pytest="9.2.0",
        profile=limit.name if limit else None, plugin=SUITE.version,
    ))  # fmt: skip
    evidence.add(events.SuiteSeen(manifest=suite))
    evidence.add(events.TopologyFound(nodes=[machine]))
    evidence.add(events.Judging(formula=FORMULA))
    evidence.add(events.Telemetry(sample={"time": 0.0, "gpus": [dict.fromkeys(readings, 30.0) for _ in machine.gpus]}))
    if limits and limit:
        evidence.add(events.ProfileGiven(profile=as_given(limit, (gpu.name for gpu in machine.gpus))))
    cases = [case for name in SUITE.required("standard") for case in SUITE.cases(name)]
    for case in (case for case in cases if without not in case):
        check = Check(f"acceptance/{case}", "passed", 1.5, case.split("::")[1])
        evidence.add(events.CheckStarted(check=check.id))
        findings = []
        for measured, required in ((measured, required) for name, measured, required in FIGURES if name == check.id):
            found = {at: values.get(f"{measured.metric} {at}", value) for at, value in measured.values.items()}
            how = {"rehearsal": False, "required": required}
            findings.append(judge(replace(measured, values=found), limit, machine, check.id, **how))
        findings += [finding for each in findings if (finding := unsteady(each, machine))]
        for finding in findings:
            evidence.add(events.Judged(finding=finding))
        if missed := [finding for finding in findings if finding.state == "missed"]:
            message = str(LimitMissed(missed, machine))
            check = replace(check, outcome="failed", message=message, failed_by="limits")
        if check.id in failed:
            check = replace(check, outcome="failed", message=check.message or "broken", failed_by=failed[check.id])
        evidence.add(events.CheckFinished(check=check))
    for fault in faults:
        evidence.add(events.FaultFound(fault=fault))
    if ends:
        verdict, reasons = conclude(evidence.record)
        evidence.add(events.Verdict(verdict=verdict, reasons=reasons, broken="", exit_status=EXIT_STATUS[verdict]))
    evidence.close()
    return seal(folder) if ends else folder


def facts_on_the_page(record):
    return {each.name: each.cells[0].text for table in facts(record) for each in table.rows}

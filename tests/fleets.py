"""Fleets that are not here: a recorded machine many times over, each with another name, other serial numbers and the
noise of healthy machines."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

from msgspec import structs

from pytest_gpufleet.model.codec import Moment
from pytest_gpufleet.model.events import NodeFound
from pytest_gpufleet.model.place import Gpu
from pytest_gpufleet.verdict.fleet.host_runs import Common, HostRun, kept
from pytest_gpufleet.verdict.judgement import read
from pytest_gpufleet.verdict.verdict import settled

RECORDED = Path(__file__).parent / "recorded"
NOISE = 0.002  # half of the least tolerance that healthy H200 have among themselves is 0.25 %


@cache
def healthy(folder="h200x4-a"):
    """A recorded machine whose checks all passed: what failed there is left out."""
    record = read(RECORDED / folder / "evidence.jsonl")
    findings = [finding for finding in record.findings if finding.state != "missed"]
    checks = {name: replace(check, outcome="passed", failed_by="", message="") if check.outcome == "failed" else check
              for name, check in record.checks.items()}  # fmt: skip
    return replace(record, findings=findings, checks=checks, faults=[], verdict="ACCEPTED", reasons=[], telemetry=[])


KNOWN = {  # of hosts, which the recorded machines did not read
    "pci_devices": {"0000:18:00.0": {"kind": "gpu", "iommu": "identity"}},
    "gpudirect": {"peer_module": None, "open_modules": True},
}


def host_run(
    host, *, folder="h200x4-a", change=None, noise=NOISE, utc="", run=None, machine=None, facts=None, **record
):
    """The run of a host. `change`: what becomes of the value of a metric at a place; `run`, `machine`, `facts` (of the
    host) and `record`: what else is different."""
    base, dice, gpus = healthy(folder), random.Random(host), ()

    def measured(finding):
        of, found = finding.measurement, {}
        for place, value in of.values.items():
            found[place] = (change(of.metric, place, value) if change else value) * (1 - noise * dice.random())
        return replace(finding, measurement=replace(of, values=found))

    for gpu in base.topology.gpus:
        own = {"uuid": f"GPU-{host}-{gpu.index}", "serial": f"{dice.randrange(10**12):012}"}
        gpus += (Gpu(gpu.index, {"gsp_firmware": "580.159.04", **gpu.facts, **own}),)
    topology = replace(base.topology, gpus=gpus)
    node = NodeFound(0, host, f"SN-{host}", tuple(gpu.uuid for gpu in gpus))
    header = {"host": host, "nodes": (node,), **({"utc": Moment(utc)} if utc else {}), **(run or {})}
    made = replace(
        base,
        run=structs.replace(base.run, **header),
        topology=machine(topology) if machine else topology,
        machines={0: structs.replace(base.machine, host={**base.machine.host, **KNOWN, "name": host, **(facts or {})})},
        findings=[*map(measured, base.findings)],
        **record,
    )
    return HostRun(f"reports/{host}-20261122T000000Z", f"{dice.randrange(16**64):064x}", kept(made, Common()))


def measured_twice(run):
    """It missed at home, and was measured again: both are on record."""
    first = [replace(each, again="1 place misses the limit") for each in run.record.findings]
    return replace(run, record=replace(run.record, findings=[*first, *run.record.findings]))


def rejected(host):
    base = healthy()
    name = next(name for name in base.checks if "test_2_health" in name)
    checks = {**base.checks, name: replace(base.checks[name], outcome="failed", message="broken", failed_by="other")}
    run = host_run(host, checks=checks)
    return replace(run, record=settled(run.record, ""))


def fleet_of(count, **differing):
    """So many healthy hosts, node-001 and so on, but those that are given, as node_002=..."""
    names = [f"node-{number:03}" for number in range(1, count + 1)]
    given = {name.replace("_", "-"): run for name, run in differing.items()}
    return [given.get(name) or host_run(name) for name in names]


def slower(fraction, *gpus):
    """All figures of these GPUs are worse, of all if none is named: rates lower, times longer."""

    def change(metric, place, value):
        hit = not gpus or any(part.kind == "gpu" and part.index in gpus for part in place.parts)
        longer = "latency" in metric or "time" in metric
        return value * (1 + fraction if longer else 1 - fraction) if hit else value

    return change

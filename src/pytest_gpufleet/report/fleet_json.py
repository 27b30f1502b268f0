"""A fleet as one JSON document for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_gpufleet import __version__
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.report import comparison_data
from pytest_gpufleet.report.fleet_hosts import HostRow, host_rows
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.fleet.fleet_peers import OddHost, SlowPlaces
from pytest_gpufleet.verdict.fleet.fleet_verdict import Fleet
from pytest_gpufleet.verdict.fleet.host_runs import HostRun

SCHEMA = 1


def document(fleet: Fleet) -> dict[str, Any]:
    """Verdict, hosts, and what is wrong with the fleet beside what its hosts' own runs say.

    Places are those of the model: those of the host with `node` n begin with "node<n>/", of the first with nothing.
    """
    return {
        "schema": SCHEMA,
        "plugin": __version__,
        "verdict": fleet.verdict,
        "exit_status": fleet.exit_status,
        "reasons": list(fleet.reasons),
        "basis": {"lowest": fleet.lowest, "figures": dict(fleet.grades)},
        "expected": None if fleet.expected is None else list(fleet.expected),
        "hosts": [_host(row.run, row) for row in host_rows(fleet) if row.run],
        "gaps": [{"kind": gap.kind, "hosts": list(gap.hosts), "what": gap.what} for gap in fleet.gaps],
        "unusable": [{"folder": each.folder, "host": each.host, "why": each.why} for each in fleet.unusable],
        "differences": [comparison_data.difference(each) for each in fleet.differences],
        "slower_than_peers": [_slow(each, fleet.hosts) for each in fleet.slow],
        "odd_hosts": [_odd(each, fleet.hosts) for each in fleet.odd],
        "faults": [_fault(fault, fleet.hosts) for fault in fleet.faults],
        "notes": list(fleet.notes),
    }


def _host(run: HostRun, row: HostRow) -> dict[str, Any]:
    record = run.record
    return {
        "node": row.node,
        "host": run.host,
        "serial": run.serial,
        "gpus": [gpu.uuid for gpu in record.topology.gpus],
        "verdict": record.verdict,
        "basis": basis.lowest(record),
        "utc": str(record.run.utc),
        "folder": run.folder,
        "evidence_sha256": run.sha256,
        "groups": {title: state for title, state in row.cells.items() if state},
        "named": [gpu.identity for gpu in row.named],
    }


def _figure(found: SlowPlaces | OddHost, hosts: Sequence[HostRun]) -> dict[str, Any]:
    return {"host": hosts[found.node].host, **comparison_data.of_figure(found.figure)}


def _slow(slow: SlowPlaces, hosts: Sequence[HostRun]) -> dict[str, Any]:
    return {
        **_figure(slow, hosts),
        "values": {str(place): comparison_data.number(value) for place, value in slow.values.items()},
        "worse": {str(place): fraction for place, fraction in slow.worse.items()},
        "everywhere": slow.everywhere,
        "peers": slow.peers,
    }


def _odd(odd: OddHost, hosts: Sequence[HostRun]) -> dict[str, Any]:
    return {
        **_figure(odd, hosts),
        "value": comparison_data.number(odd.value),
        "reference": comparison_data.number(odd.reference),
        "worse": odd.worse,
    }


def _fault(fault: Fault, hosts: Sequence[HostRun]) -> dict[str, Any]:
    named = dict.fromkeys(hosts[part.node].host for subject in fault.subjects for part in subject.parts)
    return {"hosts": list(named), **fault.to_json(), "action": fault.kind.action, "next_step": fault.kind.next_step}

"""Folders of runs on many nodes that are not here, with those of their nodes in them, written as runs write them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pytest_gpufleet.model import events
from pytest_gpufleet.model.metric import GiB, Measurement
from pytest_gpufleet.model.place import joined
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import SuiteCheck
from pytest_gpufleet.run.folder import Evidence, RunFolder
from pytest_gpufleet.safe_files import sha256
from pytest_gpufleet.verdict import basis, profile
from pytest_gpufleet.verdict.basis import as_given
from pytest_gpufleet.verdict.fleet.fleet_verdict import judged
from pytest_gpufleet.verdict.judgement import judge, read
from tests import runs
from tests.edited_evidence import seal

NODES_CHECK = "test_n_nodes.py::test_all_reduce"
BETWEEN = "node_group_busbw"
HOSTS = ("gf1", "gf2", "gf10")
SUITE = replace(
    runs.SUITE,
    checks={
        **{name: check for name, check in runs.SUITE.checks.items() if not check.nodes},
        NODES_CHECK: SuiteCheck("standard", "Nodes reach each other", figures=(BETWEEN,), chapter="Nodes", nodes=2),
    },
)
UNDER = {**runs.RING, "ranks": 12, "nodes": 3, "bytes": 8 * GiB}


@dataclass(frozen=True)
class Ends:
    """How nodes end otherwise than healthy, by their numbers: `failed` checks of their own runs, by id; runs that died,
    that leave a file of the suite out, or whose evidence was not brought here; nodes that were lost, or left out."""

    failed: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    died: tuple[int, ...] = ()
    without: Mapping[int, str] = field(default_factory=dict)
    not_here: tuple[int, ...] = ()
    lost: Mapping[int, str] = field(default_factory=dict)
    left_out: Mapping[int, str] = field(default_factory=dict)


def limits(path, between=300.0, alone=6000.0):
    """A contract for the figures of each machine, and for the one between nodes."""
    of_nodes = runs.limit(BETWEEN, "min", between, "GB/s", "nodes = 3")
    return runs.written(path, runs.contract(solo_train_throughput=alone) + of_nodes)


def cluster(folder, limits, ends=None, *, hosts=HOSTS, wanted=3, values=None, other=None, more=()):
    """The folder of a run of level standard on nodes with 4 GPUs each. `values`: between nodes, by place; `other`: of a
    node's own run, as runs.record takes them; `more`: events before the verdict."""
    ends, found = ends or Ends(), nodes(hosts)
    own = {}
    for node in found:
        path = RunFolder(folder).of_node(node).path
        runs.record(
            path, node.host, (other or {}).get(node.index), limits,
            dict.fromkeys(ends.failed.get(node.index, ()), "other"), ends=node.index not in ends.died,
            without=ends.without.get(node.index, "no file"), suite=SUITE,
        )  # fmt: skip
        own[node.index] = read(path / "evidence.jsonl")
    evidence = Evidence(folder / "evidence.jsonl")
    given = profile.choose(limits, [runs.UNKNOWN])
    assert given is not None
    evidence.add(header(found, wanted, given.name))
    evidence.add(events.SuiteSeen(manifest=SUITE))
    evidence.add(events.TopologyFound(nodes=[runs.topology(node.host) for node in found]))
    evidence.add(events.ProfileGiven(profile=as_given(given, [runs.UNKNOWN])))
    for number, why in ends.lost.items():
        evidence.add(events.NodeLost(node=number, why=why))
    for number, why in ends.left_out.items():
        evidence.add(events.NodeLeftOut(node=number, why=why))
    for node in (node for node in found if node.index not in ends.lost):
        path = RunFolder(folder).of_node(node)
        digest = "" if node.index in ends.not_here else sha256(path.evidence)
        record = own[node.index]
        evidence.add(
            events.NodeFinished(
                node=node.index, run=path.name, verdict=record.verdict, reasons=tuple(record.reasons),
                basis=basis.lowest(record), exit_status=record.exit_status, sha256=digest,
            )
        )  # fmt: skip
    _between(evidence, given, values or {"world": 320.0})
    for event in more:
        evidence.add(event)
    ended, _ = judged(evidence.record, "", RunFolder(folder).own_runs(evidence.record))
    evidence.add(events.Verdict(verdict=ended.verdict, reasons=ended.reasons, broken="", exit_status=ended.exit_status))
    evidence.close()
    return seal(folder)


def header(nodes, wanted, profile_name):
    return events.RunHeader(
        host=nodes[0].host, nodes=nodes, utc="2026-11-21T01:40:06+00:00", gpus="4", ranks=4 * len(nodes),
        command=f"pytest acceptance/ --nodes {wanted} --gpus 4", profile=profile_name, python="3.12.3", pytest="9.2.0",
        plugin=SUITE.version, nodes_wanted=wanted, transport="ray 2.60.0", secured="token",
        interfaces=("eth0",) * len(nodes),
    )  # fmt: skip


def topology(*hosts):
    return joined(dict(enumerate(map(runs.topology, hosts))), dict(enumerate(hosts)))


def begun(hosts, wanted, profile_name, machines=()):
    """A run on nodes with 4 GPUs each that has just begun. `machines`: which they are, if not those of these names."""
    first = header(nodes(hosts), wanted, profile_name)
    return Record.of(first, events.TopologyFound(nodes=[runs.topology(name) for name in machines or hosts]))


def nodes(hosts):
    gpus = {host: tuple(gpu.uuid for gpu in runs.topology(host).gpus) for host in hosts}
    return tuple(events.NodeFound(number, host, f"SN-{host}", gpus[host]) for number, host in enumerate(hosts))


def _between(evidence, given, values):
    check_id = f"acceptance/{NODES_CHECK}"
    evidence.add(events.CheckStarted(check=check_id))
    finding = judge(
        Measurement(BETWEEN, dict(values), UNDER), given, evidence.record.topology, check_id, rehearsal=False
    )
    evidence.add(events.Judged(finding=finding))
    outcome, failed_by = ("failed", "limits") if finding.state == "missed" else ("passed", "")
    check = events.Check(check_id, outcome, 3.0, "Nodes reach each other", failed_by=failed_by)
    evidence.add(events.CheckFinished(check=check))

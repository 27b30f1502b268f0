"""What each node of a run is at, for the terminal."""

from __future__ import annotations

from pytest_gpufleet.nodes.messages import Pulse
from pytest_gpufleet.report.terminal.live_nodes import NodeNow, NodesNow
from pytest_gpufleet.run.cluster_run import ClusterRun


def nodes_now(run: ClusterRun) -> NodesNow:
    """May be called from any thread."""
    assert run.evidence is not None
    record, cluster = run.evidence.record, run.cluster
    latest = record.started[-1] if record.started else ""
    check = "" if latest in record.checks else latest
    late = {own.node for own in run.node_runs.at_work(check)} if check and run.alone else set()
    gone = {**dict.fromkeys(cluster.left_out, "left out"), **dict.fromkeys(cluster.lost, "lost")}
    pulses = cluster.pulses
    nodes = []
    for node, host in run.ground.hosts.items():
        pulse = pulses.get(node, Pulse())
        doing = "" if node in gone else pulse.check or _without_a_check(run, node)
        wrong = gone.get(node) or _failed(run, node)
        nodes.append(NodeNow(host, doing, wrong, node in late and node not in gone, pulse.hottest_c, pulse.watts))
    return NodesNow(check, nodes)


def _failed(run: ClusterRun, node: int) -> str:
    """How many checks of its own run have failed so far."""
    own = run.node_runs.all.get(node)
    count = sum(check.outcome == "failed" for check in list(own.record.checks.values())) if own else 0
    return f"{count} failed" if count else ""


def _without_a_check(run: ClusterRun, node: int) -> str:
    if not run.alone:
        return "works with the others"
    own = run.node_runs.all.get(node)
    return "starts" if own is None or own.at_work else "has done its own checks"

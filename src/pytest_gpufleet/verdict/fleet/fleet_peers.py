"""Each GPU of a fleet held against all others of it: a host that is slow everywhere has no peer at home to show it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_gpufleet.model.cluster_topology import joined
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.model.measurement import GpuState, Measurement
from pytest_gpufleet.model.place import Place, Where, on_node
from pytest_gpufleet.model.tolerance import Tolerance
from pytest_gpufleet.verdict.across_runs.recorded_figures import Figure, figure_of, held_to_limits
from pytest_gpufleet.verdict.across_runs.run_comparison import worse_ones
from pytest_gpufleet.verdict.fleet.host_runs import HostRun
from pytest_gpufleet.verdict.peers import slower_than_peers

LEAST_HOSTS = 3  # of two, nobody can say which one is off


@dataclass(frozen=True)
class SlowPlaces:
    """Places of a host that are worse than the fleet's peers: their values, and by what fraction. `everywhere`: all
    places of this host are that have the figure, and they are several. `peers`: how many places of the fleet it was
    measured at."""

    node: int
    figure: Figure
    values: Mapping[Where, float]
    worse: Mapping[Where, float]
    tolerances: tuple[Tolerance, ...]
    everywhere: bool
    peers: int

    @property
    def worst(self) -> float:
        return max(self.worse.values())

    @property
    def fault(self) -> Fault:
        subjects = (Place(self.node, "node"),) if self.everywhere else tuple(self.worse)
        what = (
            f"{self.figure.metric.title}: {self.worst:.1%} worse than its peers among {self.peers} places of the fleet"
        )
        return Fault("slower_than_peers", subjects, what)


@dataclass(frozen=True)
class OddHost:
    """A figure of a host, of all its places the worst, that stands out among those of all hosts, whose median is the
    reference."""

    node: int
    figure: Figure
    value: float
    reference: float
    worse: float


def slow_places(hosts: Sequence[HostRun]) -> tuple[list[SlowPlaces], list[str]]:
    """The places of each host that are worse than their peers of the whole fleet, figure by figure; by host, the worst
    first. And the hosts of which figures are held against no other host's: since none has them under these conditions,
    or too few. Figures are the same if metric and all conditions are; rehearsals have none."""
    found: list[SlowPlaces] = []
    without_peers: set[int] = set()
    whole = joined(
        {node: run.record.topology for node, run in enumerate(hosts)},
        {node: run.host for node, run in enumerate(hosts)},
    )
    for figure, by_node in _with_peers(hosts).items():
        slow = _slow(figure, by_node, whole) if len(by_node) > 1 else None
        if slow is None:
            without_peers |= by_node.keys()
        else:
            found += slow
    return sorted(found, key=lambda each: (each.node, -each.worst)), [
        hosts[node].host for node in sorted(without_peers)
    ]


def _with_peers(hosts: Sequence[HostRun]) -> dict[Figure, dict[int, Finding]]:
    """The figures whose places have peers, by host; of two the last, as in the run itself."""
    figures: dict[Figure, dict[int, Finding]] = defaultdict(dict)
    for node, run in enumerate(hosts):
        for finding in _that_count(run):
            if finding.tolerances:
                figures[figure_of(finding.measurement)][node] = finding
    return figures


def _that_count(run: HostRun) -> Iterator[Finding]:
    if not run.record.run.rehearsal:
        for finding in run.record.findings:
            if finding.measurement.metric != "spread" and not finding.again:
                yield finding


def _slow(figure: Figure, by_node: Mapping[int, Finding], topology: GpuTopology) -> list[SlowPlaces] | None:
    """None if no place has peers enough."""
    values: dict[Where, float] = {}
    states: dict[Where, GpuState] = {}
    tolerances: list[Tolerance] = []
    for node, finding in by_node.items():
        measured = finding.measurement
        values |= {on_node(place, node): value for place, value in measured.values.items()}
        states |= {on_node(place, node): state for place, state in measured.gpu_states.items()}
        tolerances += [each for each in map(_of_fleet, finding.tolerances) if each not in tolerances]
    whole = Measurement(figure.name, values, dict(figure.conditions), definition=figure.metric, gpu_states=states)
    slower = slower_than_peers(whole, tolerances, topology)
    if slower is None:
        return None
    by_host: dict[int, dict[Where, float]] = defaultdict(dict)
    for place, fraction in slower.items():
        by_host[place.parts[0].node][place] = fraction
    return [
        SlowPlaces(
            node,
            figure,
            {place: values[place] for place in worse},
            worse,
            tuple(tolerances),
            everywhere=len(worse) == len(by_node[node].measurement.values) > 1,
            peers=len(values),
        )
        for node, worse in by_host.items()
    ]


def _of_fleet(tolerance: Tolerance) -> Tolerance:
    """The best of thousands is whoever had the most luck, or a figure that is wrong: it speaks against nobody."""
    return replace(tolerance, reference="better half") if tolerance.reference == "best" else tolerance


def odd_hosts(hosts: Sequence[HostRun]) -> list[OddHost]:
    """What whole hosts reach, like the bandwidth of a collective over all of their GPUs, and the worst place of each in
    what else has no peers at home, where it stands out among all hosts as `gpufleet compare` has it. It is told and not
    judged: nobody has measured how much healthy hosts differ."""
    values: dict[Figure, dict[str, float]] = defaultdict(dict)
    nodes = {run.host: node for node, run in enumerate(hosts)}
    for run in hosts:
        for finding in held_to_limits(_that_count(run)):
            if finding.measurement.values and not finding.tolerances:
                figure = figure_of(finding.measurement)
                values[figure][run.host] = figure.worst(finding.measurement.values.values())
    return [
        OddHost(nodes[host], figure, of_hosts[host], reference, worse)
        for figure, of_hosts in values.items()
        if len(of_hosts) >= LEAST_HOSTS
        for host, (reference, worse) in worse_ones(of_hosts, figure).items()
    ]

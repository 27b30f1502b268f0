"""Each GPU of a fleet held against all others of it: a host that is slow everywhere has no peer at home to show it."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding, that_count
from pytest_gpufleet.model.gpu import SOFTWARE, GpuTopology, joined
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.measurement import GpuState, Measurement
from pytest_gpufleet.model.metric import Tolerance
from pytest_gpufleet.model.place import Place, Where, on_node
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict.across_runs.run_comparison import held_to_limits
from pytest_gpufleet.verdict.fleet import equality
from pytest_gpufleet.verdict.fleet.host_runs import NodeRuns
from pytest_gpufleet.verdict.outliers import Figure, Outlier, beside_most, figure_of
from pytest_gpufleet.verdict.peers import outliers_among_peers

LEAST_HOSTS = 3  # of two, nobody can say which one is off


@dataclass(frozen=True)
class SlowPlaces:
    """Places of a host that are worse than the fleet's peers. `everywhere`: all places of this host are that have the
    figure, and they are several. `peers`: how many places of the fleet it was measured at."""

    node: int
    figure: Figure
    places: tuple[Outlier, ...]
    tolerances: tuple[Tolerance, ...]
    everywhere: bool
    peers: int

    @property
    def worst(self) -> float:
        return max(each.worse for each in self.places)

    @property
    def fault(self) -> Fault:
        subjects = (Place(self.node, "node"),) if self.everywhere else tuple(each.place for each in self.places)
        what = (
            f"{self.figure.metric.title}: {self.worst:.1%} worse than its peers among {self.peers} places of the fleet"
        )
        return Fault("slower_than_peers", subjects, what)


def slow_places(runs: NodeRuns) -> tuple[list[SlowPlaces], list[str]]:
    """The places of each host that are worse than their peers of the whole fleet, figure by figure; by host, the worst
    first. And the hosts of which figures are held against no other host's: since none has them under these conditions,
    or too few. Figures are the same if metric and all conditions are; rehearsals have none."""
    found: list[SlowPlaces] = []
    without_peers: set[int] = set()
    topologies = {node: run.record.topology for node, run in runs.items()}
    whole = joined(topologies, {node: run.host for node, run in runs.items()})
    for figure, by_node in _with_peers(runs).items():
        slow = _slow(figure, by_node, whole) if len(by_node) > 1 else None
        if slow is None:
            without_peers |= by_node.keys()
        else:
            found += slow
    alone = [runs[node].host for node in sorted(without_peers)]
    return sorted(found, key=lambda each: (each.node, -each.worst)), alone


def _with_peers(runs: NodeRuns) -> dict[Figure, dict[int, Finding]]:
    """The figures whose places have peers, by host; of two the last, as in the run itself."""
    figures: dict[Figure, dict[int, Finding]] = defaultdict(dict)
    for node, run in runs.items():
        for finding in that_count(run.record.findings):
            if finding.tolerances and not run.record.run.rehearsal:
                figures[figure_of(finding.measurement)][node] = finding
    return figures


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
    slower = outliers_among_peers(whole, tolerances, topology)
    if slower is None:
        return None
    by_host = grouped((place.parts[0].node, each) for place, each in slower.items())
    return [
        SlowPlaces(
            node,
            figure,
            tuple(worse),
            tuple(tolerances),
            everywhere=len(worse) == len(by_node[node].measurement.values) > 1,
            peers=len(values),
        )
        for node, worse in by_host.items()
    ]


def _of_fleet(tolerance: Tolerance) -> Tolerance:
    """The best of thousands is whoever had the most luck, or a figure that is wrong: it speaks against nobody."""
    return replace(tolerance, reference="better half") if tolerance.reference == "best" else tolerance


def odd_hosts(runs: NodeRuns) -> list[Outlier]:
    """What whole hosts reach, like the bandwidth of a collective over all of their GPUs, and the worst place of each in
    what else has no peers at home, where it stands out among all hosts as `gpufleet compare` has it. It is shown,
    and not judged: nobody has measured by how much healthy hosts differ."""
    values: dict[Figure, dict[tuple[str, Where], float]] = defaultdict(dict)
    for node, run in runs.items():
        for finding in held_to_limits(that_count(run.record.findings)) if not run.record.run.rehearsal else ():
            if finding.measurement.values and not finding.tolerances:
                figure = figure_of(finding.measurement)
                values[figure][run.host, Place(node, "node")] = figure.worst(finding.measurement.values.values())
    return [
        each
        for figure, of_hosts in values.items()
        if len(of_hosts) >= LEAST_HOSTS
        for each in beside_most(figure, of_hosts)
    ]


# Logs of several nodes can be put in order, certificates hold and leases of file systems last. It is where the rule
# NodeClockSkewDetected of node_exporter begins.
CLOCKS_APART_SECONDS = 0.05

# What nodes have to have in common before they work together: in all else they are only unlike.
TO_WORK_TOGETHER = (*SOFTWARE.values(), "network plugin of NCCL", "VBIOS", "GSP firmware")


def nodes_unlike_others(runs: NodeRuns) -> list[Fault]:
    """In what nodes differ from most of them: driver, firmware, kernel, libraries, environment, limits."""
    return equality.faults(equality.unlike(_records(runs)), runs)


def nodes_compute_otherwise(runs: NodeRuns) -> list[Fault]:
    """Nodes whose GPUs agree on other bits than those of the same model on most nodes; of two, nobody can say which."""
    return equality.faults(equality.other_bits(_records(runs)), runs)


def fingerprints_in_common(runs: NodeRuns) -> bool:
    """Whether any two nodes have fingerprints of the same GPUs and libraries."""
    return any(len(of_nodes) > 1 for of_nodes in equality.by_work(_records(runs)).values())


def _records(runs: NodeRuns) -> dict[str, Record]:
    return {run.host: run.record for run in runs.values()}


def minority(runs: NodeRuns) -> dict[int, str]:
    """The nodes with other software or firmware than most, and which: together with them a failure would say nothing of
    the network. None where nobody can say who differs."""
    numbers = {run.host: node for node, run in runs.items()}
    found: dict[int, str] = {}
    for each in equality.unlike(_records(runs)):
        if each.usual is not None and each.fact in TO_WORK_TOGETHER:
            for value, hosts in each.others.items():
                for host in hosts:
                    found.setdefault(numbers[host], f"{each.fact} is {value} there, of most nodes {each.usual}")
    return found


def slower_than_other_nodes(runs: NodeRuns) -> list[Fault]:
    """The places that are worse than their peers on all nodes, by more than healthy ones differ."""
    return [each.fault for each in slow_places(runs)[0]]


def clocks_apart(ahead: Mapping[int, float]) -> list[Fault]:
    """Nodes whose clock is off from that of most by more than CLOCKS_APART_SECONDS; of two, both. `ahead`: by how many
    seconds the clock of each node is ahead of any one clock."""
    usual = median(ahead.values()) if ahead else 0.0
    allowed = CLOCKS_APART_SECONDS if len(ahead) > 2 else CLOCKS_APART_SECONDS / 2  # each is half of it from the middle
    off = {node: seconds - usual for node, seconds in ahead.items() if abs(seconds - usual) > allowed}
    skews = {
        node: f"{abs(by):.3g} s {'ahead of' if by > 0 else 'behind'} those of the others" for node, by in off.items()
    }
    return [Fault("clock_skew", (Place(node, "node"),), f"its clock is {what}") for node, what in skews.items()]

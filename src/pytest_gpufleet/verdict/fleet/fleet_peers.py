"""Each GPU of a fleet compared with all others of it: a host that is slow everywhere has no peer at home to show it."""

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding, that_count
from pytest_gpufleet.model.levels import check_name
from pytest_gpufleet.model.metric import GpuState, Measurement
from pytest_gpufleet.model.place import SOFTWARE, THIS_NODE, GpuTopology, Place, Where, grouped, on_node
from pytest_gpufleet.verdict import outliers
from pytest_gpufleet.verdict.across_runs.run_comparison import held_to_limits
from pytest_gpufleet.verdict.fleet import equality
from pytest_gpufleet.verdict.fleet.equality import Difference, Records
from pytest_gpufleet.verdict.fleet.host_runs import HostRun, NodeRuns
from pytest_gpufleet.verdict.outliers import BETWEEN_BOARDS, Figure, Outlier, beside_most, figure_of, healthy_spread

# Measurements of one family slow down together, by one cause: they are one witness. An author's own metric is one too.
FAMILIES = {
    "compute": ("gemm", "gemm_relative", "solo_train_throughput", "train_throughput", "solo_token_throughput",
        "token_throughput", "model_flops_utilization", "train_utilization", "product_retention", "soak_clock",
        "burn_retention", "step_retention", "corruption_bound"),
    "clock": ("gemm_full_clock",),
    "power": ("soak_power", "burn_power", "burn_peak_power", "step_power", "power_swing"),
    "temperature": ("soak_temperature", "soak_excess"),
    "memory": ("memory_bandwidth", "train_memory", "solo_decode_throughput"),
    "links": ("busbw", "collective_latency", "pair_bandwidth", "pair_latency", "ring_bandwidth", "scaling_efficiency",
        "communication_share", "reduction_retention", "step_skew", "decode_throughput", "collective_corruption_bound"),
    "host": ("host_bandwidth", "host_memory_bandwidth", "drive_bandwidth", "drive_iops", "launch_time",
        "loader_throughput"),
    "network": ("node_group_busbw", "rail_bandwidth", "rdma_bandwidth", "rdma_latency", "nic_bandwidth", "port_events"),
}  # fmt: skip
FAMILY = {metric: family for family, metrics in FAMILIES.items() for metric in metrics}
# What nodes have to have in common before they work together: in all else they are only unlike.
TO_WORK_TOGETHER = (*SOFTWARE.values(), "network plugin of NCCL", "VBIOS", "GSP firmware")
# Logs of several nodes can be put in order, certificates hold and leases of file systems last. It is where the rule
# NodeClockSkewDetected of node_exporter begins.
CLOCKS_APART_SECONDS = 0.05


@dataclass(frozen=True)
class SlowPlaces:
    """Places of a host that are worse than the fleet's peers in what `check` measured."""

    node: int
    figure: Figure
    check: str
    places: tuple[Outlier, ...]
    everywhere: bool  # the host as a whole is, by the median of its places
    peers: int  # how many places of the fleet it was measured at

    @property
    def worst(self) -> Outlier:
        return max(self.places, key=lambda each: each.worse)

    @property
    def fault(self) -> Fault:
        subjects = (Place(self.node, "node"),) if self.everywhere else tuple(each.place for each in self.places)
        what = (
            f"{self.figure.metric.title}: {self.worst.worse:.1%} worse than its peers among {self.peers} places of the "
            f"fleet, where {self.worst.allowed:.1%} may be"
        )
        return Fault("slower_than_peers", subjects, what)


class FleetPeers(NamedTuple):
    """All by host, the worst first."""

    slow: tuple[SlowPlaces, ...]  # by two measurements: another family of them, or the same one once more
    alone: tuple[SlowPlaces, ...]  # by one, which is no fault yet
    without_peers: tuple[str, ...]  # hosts of which figures are held against no other host's


@dataclass(frozen=True)
class _Alike:
    """The values of one figure at places that are alike: GPUs of one model and part number, pairs of them, or hosts of
    such GPUs. Those of all figures are in memory at once, so they are no dict here."""

    figure: Figure
    check: str
    places: Sequence[Where]
    values: "array[float]"
    topology: GpuTopology  # the machine of one of them
    lone: int | None = None  # the one host with its part number, beside the boards of others

    @property
    def by_node(self) -> dict[int, list[Where]]:
        return grouped((place.parts[0].node, place) for place in self.places)


def slow_places(runs: NodeRuns) -> FleetPeers:
    """The places of each host that are worse than their peers of the whole fleet, figure by figure. Figures are the
    same if metric and all conditions are; rehearsals have none. What a GPU, a pair or a host may be worse follows from
    how much those of its part number differ in this fleet, and from the number of all comparisons."""
    groups: list[_Alike] = []
    without_peers: set[int] = set()
    figures: dict[Figure, dict[int, Finding]] = defaultdict(dict)  # by host; of two the last, as in the run itself
    for node, run in runs.items():
        findings = [] if run.record.run.rehearsal else that_count(run.record.findings)
        judged = list(held_to_limits(findings))
        for finding in findings:  # those whose places have peers, and those that are held against limits
            if finding.measurement.values and (finding.tolerances or finding in judged):
                figures[figure_of(finding.measurement)][node] = finding
    comparisons = 0
    for figure, by_node in figures.items():
        left = {*by_node}
        for alike in _alike(figure, by_node, runs):
            if len(nodes := alike.by_node.keys()) > 1:
                groups.append(alike)
                comparisons += len(alike.values) + len(nodes)
                left -= nodes
        without_peers |= left
    found = [slow for each in groups for slow in _slow(each, comparisons)]
    found.sort(key=lambda each: (each.node, -each.worst.worse))
    sure = tuple(each for each in found if _confirmed(each, found, runs[each.node]))
    alone = tuple(each for each in found if not any(each is one for one in sure))
    return FleetPeers(sure, alone, tuple(runs[node].host for node in sorted(without_peers)))


def _alike(figure: Figure, by_node: Mapping[int, Finding], runs: NodeRuns) -> Iterator[_Alike]:
    """The places by model and part number, at one temperature. One with boards of its own comes beside all others."""
    values: dict[Where, float] = {}
    states: dict[Where, GpuState] = {}
    kinds: dict[Where, tuple[Hashable, Hashable]] = {}
    for node, finding in by_node.items():
        measured, topology = finding.measurement, runs[node].record.topology
        # What all GPUs do together, or what differs by design at home, is the host's: the worst of it.
        host = {THIS_NODE: figure.worst(measured.values.values())}
        for place, value in (measured.values if finding.tolerances else host).items():
            at = on_node(place, node)
            values[at], kinds[at] = value, _kind(topology, place, figure)
        states |= {on_node(place, node): state for place, state in measured.gpu_states.items()}
    whole = Measurement(figure.name, values, dict(figure.conditions), definition=figure.metric, gpu_states=states)
    slope = max((each.per_kelvin for finding in by_node.values() for each in finding.tolerances), default=0.0)
    check = check_name(next(iter(by_node.values())).check)
    for kind, places in grouped((kind, at) for at, kind in kinds.items()).items():
        nodes, lone = {at.parts[0].node for at in places}, None
        if len(nodes) == 1:
            (lone,) = nodes
            places = places + [at for at, other in kinds.items() if other[0] == kind[0] and at.parts[0].node != lone]
        at_one = outliers.at_one_temperature(whole, places, figure.metric.sign * slope)
        measured_at, numbers = tuple(at_one), array("d", at_one.values())
        yield _Alike(figure, check, measured_at, numbers, runs[places[0].parts[0].node].record.topology, lone)


def _kind(topology: GpuTopology, place: Where, figure: Figure) -> tuple[Hashable, Hashable]:
    """Model and link of a place; and its part number. What goes to the host's memory at once shares the way there with
    all GPUs near the same processors, behind the same PCIe switch."""
    key = (place, figure.name == "host_bandwidth")
    if key not in topology.known:
        gpus = topology.of(place) or topology.gpus
        boards = tuple(sorted(str(gpu.get("board_part_number") or "") for gpu in gpus))
        way = (topology.processors_near(place), topology.switch_neighbours(place)) if key[1] else ()
        topology.known[key] = (tuple(sorted(gpu.name for gpu in gpus)), topology.kind(place)[-1]), (boards, *way)
    return topology.known[key]  # type: ignore[no-any-return]


def _slow(alike: _Alike, comparisons: int) -> list[SlowPlaces]:
    """The places that are worse than their peers; and, by the median of its other places, a host that is as a whole."""
    figure, by_node, value_at = alike.figure, alike.by_node, dict(zip(alike.places, alike.values, strict=True))
    healthy = healthy_spread(figure, alike.topology)
    matters = healthy.matters
    found: dict[int, list[Outlier]] = {}
    if alike.lone is None:
        values = {("", place): value for place, value in value_at.items()}
        slow = beside_most(figure, values, healthy.sd(), comparisons, matters, independent=len(by_node))
        found = grouped((each.place.parts[0].node, each) for each in slow)
    else:
        matters = BETWEEN_BOARDS
    known = {each.place for slow in found.values() for each in slow}
    medians: dict[tuple[str, Where], float] = {
        ("", Place(node, "node")): median(value_at[place] for place in left)
        for node, places in by_node.items()
        if (left := [place for place in places if place not in known]) and (len(places) > 1 or alike.lone is not None)
    }
    for host in beside_most(figure, medians, healthy.sd(min(map(len, by_node.values()))), comparisons, matters):
        node = host.place.parts[0].node
        if alike.lone in (None, node):
            at_home = {("", place): value_at[place] for place in by_node[node]}
            every = outliers.outliers(figure, at_home, host.reference, -math.inf)
            found[node] = [replace(each, allowed=host.allowed) for each in every]
    return [
        SlowPlaces(node, figure, alike.check, tuple(slow), len(slow) == len(by_node[node]) > 1, len(alike.values))
        for node, slow in found.items()
    ]


def _confirmed(one: SlowPlaces, found: Iterable[SlowPlaces], run: HostRun) -> bool:
    """Whether another family of measurements says the same of each of these places, or the same measurement did once
    more: in that run, since it had missed there at first, or in an earlier run of the host, with places of its own."""
    figure, host = one.figure, Place(one.node, "node")
    family, *families = (FAMILY.get(each.figure.name, each.figure.name) for each in (one, *found))
    others = [each for each, of in zip(found, families, strict=True) if each.node == one.node and of != family]
    parts = {part for each in others for at in each.places for part in at.place.parts}
    if parts and all(parts & {*each.place.parts, host} or each.place == host for each in one.places):
        return True
    first = one.places[0]
    for values in run.measured_before(figure):
        again = [values[at] for each in one.places if (at := on_node(each.place, 0)) in values]
        if first.place == host and values:
            again = [figure.worst(values.values())]
        worse = [figure.share(figure.metric.sign * (first.reference - value), first.reference) for value in again]
        if worse and (median(worse) if one.everywhere else min(worse)) > first.allowed:
            return True
    return False


def nodes_differ(runs: NodeRuns, how: Callable[[Records], list[Difference]]) -> list[Fault]:
    """The nodes that differ from most of them: `how` is a function of `equality`."""
    differences = how({run.host: run.record for run in runs.values()})
    return equality.faults(differences, {run.host: node for node, run in runs.items()})


def minority(runs: NodeRuns) -> dict[int, str]:
    """The nodes with other software or firmware than most, and which: failures with them say nothing of the network."""

    def what_matters(records: Records) -> list[Difference]:
        return [each for each in equality.unlike(records) if each.usual and each.fact in TO_WORK_TOGETHER]

    return {node: fault.what for fault in reversed(nodes_differ(runs, what_matters)) for node in fault.nodes}


def fingerprints_in_common(runs: NodeRuns) -> bool:
    """Whether any two nodes have fingerprints of the same GPUs and libraries."""
    of_work = equality.by_work({run.host: run.record for run in runs.values()})
    return any(len(of_nodes) > 1 for of_nodes in of_work.values())


def clocks_apart(ahead: Mapping[int, float]) -> list[Fault]:
    """Nodes whose clock is off from that of most; of two, both. `ahead`: of any one clock, in seconds."""
    usual = median(ahead.values()) if ahead else 0.0
    allowed = CLOCKS_APART_SECONDS if len(ahead) > 2 else CLOCKS_APART_SECONDS / 2  # each is half of it from the middle
    off = {node: seconds - usual for node, seconds in ahead.items() if abs(seconds - usual) > allowed}
    what = "its clock is {:.3g} s {} those of the others"
    return [
        Fault("clock_skew", (Place(node, "node"),), what.format(abs(by), "ahead of" if by > 0 else "behind"))
        for node, by in off.items()
    ]

"""Measurements judged by limits and peers, which of them are measured a second time, and the record of a run with the
findings that follow from its evidence."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pytest_gpufleet.machine.network_ports import gigabits_for_each_gpu
from pytest_gpufleet.model import events
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import IN_WORDS, Finding, Limit, State, that_count
from pytest_gpufleet.model.language import rounded
from pytest_gpufleet.model.metric import METRICS, Measurement, Noise, Peers, Tolerance, fits, over_network, row_of
from pytest_gpufleet.model.place import GpuTopology, Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import Suite, shipped
from pytest_gpufleet.verdict.outliers import FEWEST, figure_of, slower_than_peers, usual_and_spread
from pytest_gpufleet.verdict.physical_limits import UNKNOWN_NETWORK, NoPeak, is_required, physical_limit
from pytest_gpufleet.verdict.profile import Profile, of_every_gpu

STEADINESS = "samples that differ so much make no measurement: something else uses the GPU, or it throttles"
MOST_LOST = 0.25
STALLS = "of the time is lost by samples slower than the usual one: this way stalls, beyond what others take of it"


class LimitMissed(AssertionError):
    """Measurements missed their limits, or a GPU is slower than its peers; `causes` come first in the message."""

    only = False  # and its test did all that it had to do

    def __init__(self, findings: Sequence[Finding], topology: GpuTopology, causes: Iterable[Fault] = ()) -> None:
        self.findings, self.causes = tuple(findings), tuple(causes)
        lines = [line for finding in findings for line in _lines(finding, topology)]
        super().__init__("\n".join([*(fault.described(topology.identity) for fault in self.causes), *lines]))


def network_of(record: Record) -> float | None:
    """Gbit/s that each GPU has of the network between nodes: by --fleet-network, else by the ports of the node that has
    most, which one that lost some should reach. 0: nobody knows; None: nothing is asked of it."""
    if record.run.network:
        return None if record.run.network == events.NO_NETWORK else float(record.run.network)
    here = record.machines.keys() - record.lost.keys() - record.left_out.keys() if record.of_cluster else ()
    each = (gigabits_for_each_gpu(record.topologies[node].gpus, record.machines[node].host) for node in here)
    return max(each, default=0.0)


def judge(
    measurement: Measurement, profile: Profile | None, topology: GpuTopology, check: str, *, rehearsal: bool,
    required: bool = True, measured: Sequence[Measurement] = (), network: float | None = 0.0, comparisons: int = 0,
) -> Finding:  # fmt: skip
    """Hold a measurement against the limit of the profile that fits it, and each GPU against its peers. `comparisons`:
    how many the run makes (`counted`); 0: those of the shipped suite on these GPUs. `network`: as `network_of` has it.

    `required`: where the profile has no limit, what the hardware can do makes one, by its facts and by all figures that
    were `measured` in the run; where that says nothing either, the finding is "not judged", which makes a verdict
    incomplete. Any other figure without a limit is "for information"."""
    between = not rehearsal and over_network(measurement.metric, measurement.conditions)
    if between and network:
        measurement = replace(measurement, conditions={"network": network, **measurement.conditions})
    # First, so that a metric that contradicts the profile fails in a rehearsal too.
    limit = profile.limit_for(measurement, topology.fabric, topology.part) if profile else None
    if rehearsal:
        why = "rehearsal: measurements of CPU ranks are not judged"
        return held(Finding(check, measurement, required=required), topology, why, rehearsal)
    limits, count = profile or of_every_gpu(), comparisons or _usual_comparisons(len(topology.gpus))
    limit = line_of(limit, measurement, limits, topology, count) if limit else None
    tolerances = tolerances_of(measurement, limits, topology, count)
    required = required or is_required(measurement, measured)
    if between and network is None:
        required, tolerances = False, ()
    models = " and ".join(sorted({gpu.name for gpu in topology.gpus})) or "this machine"
    no_limit = f"no profile knows {models}: give one with --fleet-profile"
    if profile and profile.match:
        no_limit = f"profile {profile.name} has no limit for these conditions: calibrate on a known-good machine"
    if limit is None and required and measurement.values:
        try:
            limit = physical_limit(measurement, topology, measured)
        except NoPeak as why:
            unknown = str(why) == UNKNOWN_NETWORK
            no_limit = str(why) if unknown else f"{no_limit}; nor do the facts of the hardware make one: {why}"
    return held(Finding(check, measurement, limit=limit, required=required, tolerances=tolerances), topology, no_limit)


def judged_by(
    record: Record, profile: Profile | None, now: Iterable[Measurement] = (), **other: Any
) -> Callable[..., Finding]:
    """`judge` with all that the record of a run, and what is measured `now`, say of it."""
    of_run = {"topology": record.topology, "rehearsal": record.run.rehearsal, "network": network_of(record), **other}
    measured = [*(finding.measurement for finding in that_count(record.findings)), *now]
    return partial(judge, profile=profile, measured=measured, comparisons=counted(record), **of_run)


def counted(record: Record) -> int:
    """How many comparisons a run makes; where nobody counted, as before 0.4, those of today's suite."""
    of_run = record.judging.comparisons
    return of_run or comparisons(shipped(), record.run.level, len(record.topology.gpus), len(record.hosts))


def line_of(limit: Limit, measurement: Measurement, limits: Profile, topology: GpuTopology, count: int) -> Limit:
    """A limit as it is on this machine: of a reference the line below it that the mean of the places, or each without
    peers, must not be worse than, by how much healthy machines differ, or by a fixed tolerance where nobody knows."""
    if limit.reference is None or not measurement.values:
        return limit
    known = limits.spread_for(measurement, topology.fabric, topology.part if "part" in limit.conditions else "")
    gpus = 1 if measurement.definition.peer_tolerance is None else len(measurement.values)
    worse = known.machine_line(limit.reference.machines, gpus, count).at
    between = known.seen and known.seen[1]
    noise = Noise(known.sd(gpus), between.gpus, between.machines, count) if between else None
    scale = 1.0 if limit.unit == "ratio" else limit.reference.value
    value = limit.reference.value - measurement.definition.sign * worse * scale
    return replace(limit, value=value, reference=replace(limit.reference, noise=noise))


def tolerances_of(
    measurement: Measurement, limits: Profile, topology: GpuTopology, count: int
) -> tuple[Tolerance, ...]:
    """By how much the places of a measurement may be worse than their peers: by how healthy ones differ, or by a fixed
    part where nobody knows that. Many nodes show themselves how much they differ. None where its places are no peers. A
    board that nobody else has is held against all others, by how machines differ too: its kind may be slower."""
    metric, row = measurement.definition, row_of(measurement.definition)
    if metric.peer_tolerance is None or not measurement.values:
        return ()
    under = {"fabric": topology.fabric, **measurement.conditions}
    if fixed := tuple(each for each in row.tolerances if fits(each, under, metric.name)):
        return fixed
    known = limits.spread_for(measurement, topology.fabric)
    if known.seen is None:
        return (Tolerance(metric.name, known.matters),)
    seen, within = known.seen[0], known.within

    def tolerance(peers: Peers, worse: float, sd: float) -> Tolerance:
        noise = Noise(sd, seen.gpus, seen.machines, count)
        return Tolerance(metric.name, worse, peers, row.per_kelvin, noise, seen.source, seen.conditions)

    if row.between_nodes(measurement.conditions):
        n = len(measurement.values)
        _, here = usual_and_spread(figure_of(measurement), measurement.values.values(), within, known.matters)
        if n >= FEWEST:
            seen = replace(seen, gpus=0, machines=len({part.node for at in measurement.values for part in at.parts}))
        return (tolerance("model", here.gpu_line(max(2, n), max(count, n)).at, here.within),)
    boards = Counter(map(topology.board, measurement.values))
    several = [size for size in boards.values() if size > 1]
    found = []
    if several:
        found.append(tolerance("part number", known.gpu_line(min(several), count).at, within))
    if len(boards) > 1 and min(boards.values()) == 1:
        apart = replace(known, between=math.sqrt(2) * known.between)
        found.append(tolerance("others of the model", apart.machine_line(math.inf, 1, count).at, apart.sd()))
    return tuple(found)


# Of `held`: findings of another version may follow otherwise.
FORMULA = 2


def held(finding: Finding, topology: GpuTopology, no_limit: str, rehearsal: bool = False) -> Finding:
    """The finding that follows from a measurement and what it is held against. `no_limit`: why it has none."""
    measurement, limit = finding.measurement, finding.limit
    unjudged = partial(replace, finding, state="not judged", missed=(), slower_than_peers=None)
    if rehearsal:
        return unjudged(reason=no_limit)
    if not measurement.values:  # which would meet every limit
        return unjudged(limit=None, tolerances=(), reason="nothing was measured")
    slower = slower_than_peers(measurement, finding.tolerances, topology)
    # Against a floor each place is held by its own value, and so is one without peers; against what follows from a
    # reference the mean of all that are possible and no slower than their peers, whose fault is none of the machine.
    values, unlike = dict(measurement.values), slower or {}
    alike = [at for at, value in values.items() if at not in unlike and _possible(value, measurement)]
    if limit and limit.reference and alike and slower is not None:
        mean = fmean(values[at] for at in alike)
        values = {at: mean if at in alike else value for at, value in values.items() if at not in unlike}
    impossible = {at for at, value in measurement.values.items() if not _possible(value, measurement)}
    missed = tuple(at for at, each in values.items() if at in impossible or (limit and not limit.met_by(each)))
    state: State = "met" if limit else "not judged" if finding.required else "for information"
    reason = no_limit if state == "not judged" else ""
    if missed or slower:
        state, reason = "missed", _missed_reason(len(missed), len(slower or ()))
    finding = replace(finding, state=state, missed=missed, slower_than_peers=slower, reason=reason)
    return measured_again(finding, finding.again) if finding.again else finding


@cache
def _usual_comparisons(gpus: int) -> int:
    return comparisons(shipped(), "standard", gpus, 1)


def comparisons(suite: Suite, level: str, gpus: int, nodes: int) -> int:
    """How many comparisons a run makes on so many GPUs, each of which a healthy machine may fail by chance: for each
    case of a check and each metric one of the machine with its reference, and one with the peers for each place that
    has some. Places are GPUs, or their pairs, one each way; one of what all ranks measure together. On several nodes
    those of the checks between them: what each checks by itself its own run counts."""
    count = 0
    for name in suite.required(level, nodes):
        check = suite.checks[name]
        for metric in check.metrics(gpus > 1) if (check.nodes > 0) == (nodes > 1) else ():
            known = METRICS.get(metric)
            if known and not row_of(known).by_chance:
                continue
            peers = known is not None and known.peer_tolerance is not None
            places = (gpus * (gpus - 1) if metric.startswith("pair_") else gpus) if peers else 1
            count += len(suite.cases(name)) * (1 + places * (places > 1))
    return count


def measured_again(finding: Finding, why: str) -> Finding:
    """A judged finding of something that was measured once more: it is reason and counts no longer."""
    reason = f"{why}: it was measured once more, and the next finding counts"
    return replace(finding, state="for information", again=why, reason=reason)


def _possible(value: float, measurement: Measurement) -> bool:
    """Nothing that is measured here can be infinite or negative, and NaN is no figure."""
    return math.isfinite(value) and (value > 0 or (value == 0 and row_of(measurement.definition).may_be_zero))


def shares_its_way(measurement: Measurement, topology: GpuTopology) -> bool:
    """Whether others than the GPUs of this machine may use what was measured."""
    under, shared = measurement.conditions, row_of(measurement.definition).shared
    between = shared == "between GPUs" and under.get("ranks") != 1 and topology.fabric not in ("nvswitch", "nvlink")
    return shared == "always" or "nodes" in under or under.get("link", "NVLink") != "NVLink" or between


def scattered(finding: Finding) -> dict[Where, float]:
    """The places of a judged figure whose samples differ by more than they may, and by how much."""
    of = finding.measurement
    if not of.definition.steady or finding.state not in ("met", "missed"):
        return {}
    allowed = row_of(of.definition).spread(of.conditions)
    return {at: spread for at, spread in of.spread.items() if spread > allowed}


def unsteady(finding: Finding, topology: GpuTopology) -> Finding | None:
    """A finding of its own for a judged figure whose samples differ by more than they may, or whose way stalls."""
    measurement, spread, why = finding.measurement, scattered(finding), STEADINESS
    allowed = row_of(measurement.definition).spread(measurement.conditions)
    if shares_its_way(measurement, topology):
        lost = {at: _lost(measurement, at) for at in spread}
        spread, allowed, why = {at: share for at, share in lost.items() if share > MOST_LOST}, MOST_LOST, STALLS
    if not spread:
        return None
    limit = Limit("spread", "max", allowed, "ratio", "project", why, {}, "")
    found = Measurement("spread", spread, {"metric": measurement.metric, **measurement.conditions})
    return Finding(finding.check, found, "missed", limit, tuple(spread), {}, _missed_reason(len(spread), 0))


def _lost(measurement: Measurement, at: Where) -> float:
    """The share of the time that samples of the same work took longer than each would have at their median."""
    seconds: Sequence[float] = measurement.samples[at]
    usual = median(seconds)
    if measurement.definition.better == "higher":
        seconds, usual = [1 / sample if sample else math.inf for sample in seconds], 1 / usual
    return 1 - usual / mean if (mean := fmean(seconds)) > 0 else 1.0  # of figures that cannot be, all


def _missed_reason(missed: int, slower: int) -> str:
    of_limit = f"{missed} {'place misses' if missed == 1 else 'places miss'} the limit"
    of_peers = f"{slower} {'place is' if slower == 1 else 'places are'} slower than the peers"
    return ", ".join([of_limit] * bool(missed) + [of_peers] * bool(slower))


def _lines(finding: Finding, topology: GpuTopology) -> list[str]:
    measurement, limit = finding.measurement, finding.limit
    what = f"{measurement.definition.title} ({', '.join(f'{k}={v}' for k, v in measurement.conditions.items())})"
    lines = [f"{what}: {finding.reason}"]
    values = {at: f"  {topology.identity(at)}: {rounded(v)} {measurement.unit}" for at, v in measurement.values.items()}
    for place in finding.missed:
        possible = _possible(measurement.values[place], measurement)
        lines.append(f"{values[place]}, {f'limit {limit}' if possible else 'which no measurement can give'}")
    most = " and ".join(each.text for each in finding.tolerances)
    for place, fraction in (finding.slower_than_peers or {}).items():
        lines.append(f"{values[place]}, {fraction:.1%} worse than its peers (at most {most})")
    lines += [f"  {each}" for each in dict.fromkeys(finding.why().values())]
    if limit is not None:
        whose = "the given profile" if limit.given else "profile"
        origin = f"{whose} {limit.profile}, " if limit.profile else ""
        lines.append(f"  limit from {origin}{IN_WORDS[limit.grade]}: {limit.full_source}")
    return lines


# What misses, or has samples that differ, is measured once more: a healthy GPU may have been hot from the checks
# before, or its host busy for a moment; a fault is there a second time. Both stay on record and the second counts, also
# of what had met its limit at first and was measured along with another: so nobody can choose between two. Full load is
# put on once more too, so that a GPU is found that is slow once it is hot; burn-in and power steps would take an hour.
ALONG = "what was measured with it had to be measured again"


def to_measure_again(findings: Sequence[Finding]) -> list[Finding]:
    """The figures among them, if one missed, or its samples did; else none."""
    figures = [finding for finding in findings if finding.measurement.metric != "spread"]
    return figures if any(finding.state == "missed" for finding in findings) else []


def set_aside(first: Sequence[Finding], second: Sequence[Finding]) -> list[Finding]:
    """The findings of a first measurement when the second is there: figures of both count no longer, and say why."""
    again, found = {figure_of(finding.measurement) for finding in second}, []
    for each in first:
        differed = "; ".join(f"the samples of {at} differed by {by:.1%}" for at, by in scattered(each).items())
        why = each.reason if each.state == "missed" else differed
        found.append(measured_again(each, why or ALONG) if figure_of(each.measurement) in again else each)
    return found


STORED = ("0.1.", "0.2.", "0.3.")  # versions that wrote down what follows from a measurement, by limits of their own


def add(record: Record, event: events.Event | None) -> None:
    """Take in one event as evidence has it. ValueError that says what is wrong with it."""
    record.add(event)
    if isinstance(event, events.Judged) and not record.run.plugin.startswith(STORED):
        record.findings[-1] = held(event.finding, record.topology, event.finding.reason, record.run.rehearsal)


def read(path: Path, quick: Callable[[bytes], events.Event | None] | None = None) -> Record:
    """The record of a run from its evidence.jsonl. A last line cut short by a dying machine is left out. `quick`: as
    `read_events` has it. OSError if it cannot be read; ValueError that names the line if one is no event; Refused if it
    has another schema."""
    record = Record()
    for line, event in events.read_events(path, quick):
        try:
            add(record, event)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {line}: not an event of a run ({error})") from None
    return record

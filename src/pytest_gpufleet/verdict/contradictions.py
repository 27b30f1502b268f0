"""What evidence says against itself: nothing that a run wrote does.

Whoever changes a value must change all that follows from it. Who does that leaves no trace here: that is what
signatures are for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from hashlib import sha256

from pytest_gpufleet import __version__
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.levels import check_name
from pytest_gpufleet.model.limit import GivenLimits, Limit
from pytest_gpufleet.model.metric import METRICS, metric_under
from pytest_gpufleet.model.place import Pair, Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import of_version
from pytest_gpufleet.model.tolerance import Tolerance
from pytest_gpufleet.verdict import node_contradictions
from pytest_gpufleet.verdict.fingerprint_rules import gpus_apart
from pytest_gpufleet.verdict.judgement import deciding, held, tolerances_of, unsteady
from pytest_gpufleet.verdict.orders import order_contradictions
from pytest_gpufleet.verdict.profiles import profile
from pytest_gpufleet.verdict.profiles.profile import Profile
from pytest_gpufleet.verdict.profiles.profile_file import SENSES
from pytest_gpufleet.verdict.second_measurement import ALONG, why_again
from pytest_gpufleet.verdict.verdict import CUT_SHORT, EXIT_STATUS, settled

COUNT = "test_1_inventory.py::test_gpu_count"


def contradictions(record: Record) -> list[str]:
    """A sentence for each thing that cannot be as the evidence says, if all else is."""
    rules = (
        _suite,
        _machine,
        order_contradictions.of_order,
        node_contradictions.of_itself,
        _fingerprints,
        _findings,
        _spreads,
        _places,
        _limits,
        _verdict,
    )
    return [*record.contradictions, *(told for rule in rules for told in rule(record))]


def _same_version(record: Record) -> bool:
    """Whether limits, metrics and wordings are those of this version; others may have had others."""
    return bool(record.run.plugin == __version__)


def _suite(record: Record) -> Iterator[str]:
    """Of versions that are known here, it is known what their suite consists of."""
    known = of_version(record.run.plugin)
    if known.checks and record.suite != known:
        ran = f", but of commit {record.run.commit[:12]}" if record.run.commit else ""
        yield f"its suite is not that of pytest-gpufleet {known.version} as it is here{ran}"


def _machine(record: Record) -> Iterator[str]:
    run, gpus = record.run, record.topology.gpus
    if not run.rehearsal and run.ranks not in (None, len(gpus)):
        yield f"it ran on {run.ranks} ranks, but has {len(gpus)} GPUs"
    asked, passed = run.gpus, [check for check in record.checks.values() if check.outcome == "passed"]
    if not run.rehearsal and any(check_name(check.id) == COUNT for check in passed):
        if not gpus:
            yield "no GPU is there, but the count of GPUs passed"
        there = (topology for node, topology in record.topologies.items() if node not in record.lost)
        counts = {len(topology.gpus) for topology in there}
        if gpus and asked.isdecimal() and counts != {int(asked)}:
            found = " or ".join(map(str, sorted(counts)))
            yield f"{asked} GPUs were asked for and {found} are there, but the count of GPUs passed"


def _fingerprints(record: Record) -> Iterator[str]:
    for check, taken in record.fingerprints.items():
        passed = check in record.checks and record.checks[check].outcome == "passed"
        if passed and gpus_apart(taken):
            yield f"{check} passed, but its GPUs computed different bits"


def _findings(record: Record) -> Iterator[str]:
    rehearsal = record.run.rehearsal
    carried = {check.id for check in record.checks.values() if check.run}
    begun = {*record.started, *carried}
    for finding in record.findings:
        if finding.check not in begun:
            yield f"{_told(finding)} was measured by a check that never started"
        yield from _definition(finding, _same_version(record), record.topology.fabric)
        if finding.limit is not None:
            yield from _limit(finding, finding.limit, record.topology.fabric)
        if finding.again and not _counts_later(finding, record):
            yield f"{_told(finding)} is said to have been measured again, but there was no reason, or it was not"
        compared = finding.measurement.definition.peer_tolerance is not None and finding.measurement.values
        if not rehearsal and bool(compared) != bool(finding.tolerances):
            yield f"{_told(finding)} has peers and is compared with none, or the other way round"
        bare = replace(finding, state="not judged", missed=(), slower_than_peers=None)
        again = bare if rehearsal else held(bare, record.topology, finding.reason)
        # What missed its limit had none that were slower, and not no peers, before version 0.3.
        if finding.state != "missed" and finding.slower_than_peers is not None and again.slower_than_peers is None:
            yield f"{_told(finding)} is said to be compared with peers that there are not"
        if _judged(finding) != _judged(again):
            _, *missed = _judged(again)
            places = dict.fromkeys(str(place) for each in missed for place in each)
            at = f" at {', '.join(places)}" if places else ""
            yield f"{_told(finding)} is {finding.state}, but by its values and its limit it is {again.state}{at}"


def _counts_later(finding: Finding, record: Record) -> bool:
    """Whether what was found was measured again for a reason, once."""
    later = record.findings[record.findings.index(finding) + 1 :]
    others = [each for each in later if not each.again and each.measurement.metric != "spread"]
    counts = [each for each in others if _key(each)[:2] == _key(finding)[:2]]
    bare = replace(finding, state="not judged", missed=(), slower_than_peers=None, again="")
    own = why_again(again := held(bare, record.topology, ""), record.topology)
    with_another = any(each.check == finding.check and each.again not in ("", ALONG) for each in record.findings)
    along = ALONG if with_another and again.state != "missed" else ""
    return len(counts) == 1 and finding.again == (own or along)


def _judged(finding: Finding) -> tuple[str, tuple[Where, ...], tuple[Where, ...]]:
    return finding.state, finding.missed, tuple(finding.slower_than_peers or ())


def _told(finding: Finding) -> str:
    return f"{finding.check}: {finding.measurement.definition.title}"


def _definition(finding: Finding, same_version: bool, fabric: str) -> Iterator[str]:
    measurement = finding.measurement
    given, known = measurement.definition, METRICS.get(measurement.metric)
    as_judged = metric_under(measurement.metric, defaultdict(str, measurement.conditions), fabric) if known else None
    if given.name != measurement.metric:
        yield f"{_told(finding)} is called {measurement.metric}, but defined as {given.name}"
    elif known and ((given.unit, given.better) != (known.unit, known.better) or (same_version and given != as_judged)):
        yield f"{_told(finding)} is not defined as {measurement.metric} is"


def _limit(finding: Finding, limit: Limit, fabric: str) -> Iterator[str]:
    definition, measurement = finding.measurement.definition, finding.measurement
    if (limit.unit, limit.sense) != (definition.unit, SENSES[definition.better][0]):
        yield f"{_told(finding)} is in {definition.unit} and better if {definition.better}, but its limit is {limit}"
    spread = measurement.metric == "spread"  # its limit holds under all conditions
    if limit.metric != measurement.metric or not (spread or profile.holds(limit, measurement, fabric)):
        yield f"{_told(finding)} is held against a limit for something else"


def _spreads(record: Record) -> Iterator[str]:
    """A judged figure whose samples differ leaves a finding of its own."""
    told = {_key(finding) for finding in record.findings if finding.measurement.metric == "spread"}
    for finding in record.findings:
        expected = unsteady(finding) if finding.state == "met" else None
        if expected and _key(expected) not in told:
            yield f"{_told(finding)} has samples that differ, of which there is no finding"


def _key(finding: Finding) -> tuple[object, ...]:
    return finding.check, tuple(sorted(finding.measurement.conditions.items())), finding.missed


def _places(record: Record) -> Iterator[str]:
    """Figures of GPUs and of pairs are there for all GPUs that are."""
    known = {gpu.place for gpu in record.topology.gpus}
    if record.run.rehearsal:
        return
    measured: dict[tuple[str, str], set[Where]] = defaultdict(set)
    for finding in record.findings:
        parts = {part for place in finding.measurement.values for part in place.parts}
        strangers = {part for part in parts if part.kind == "gpu"} - known
        strangers |= {part for part in parts if part.is_on_node and part.node not in record.hosts}
        if strangers:
            yield f"{_told(finding)} was measured on {min(strangers)}, which is not there"
        # What is only shown may be of one GPU alone.
        if record.of_cluster:
            yield from _nodes_left_out(finding, record)
        elif finding.state != "for information" and check_name(finding.check) in record.suite.checks:
            measured[finding.check, finding.measurement.metric] |= finding.measurement.values.keys()
    for (check, metric), places in measured.items():
        if metric != "spread" and places and all(place.parts[0].kind == "gpu" for place in places):
            pairs = {frozenset(place.parts) for place in places if isinstance(place, Pair)}
            all_pairs = len(known) * (len(known) - 1) // 2
            if (pairs and len(pairs) != all_pairs) or (not pairs and places != known):
                yield f"{check}: {metric} was not measured everywhere: it has figures of {len(places)} places"


def _nodes_left_out(finding: Finding, record: Record) -> Iterator[str]:
    """A figure that each node has one of is there for all that were in to the end, unless it is one of fewer nodes."""
    measurement = finding.measurement
    stayed = record.hosts.keys() - record.lost.keys() - record.left_out.keys()
    at = {part.node for place in measurement.values for part in place.parts}
    whole = measurement.conditions.get("nodes", len(stayed)) == len(stayed)
    of_each = not any(isinstance(place, Pair) or place.parts[0].kind == "world" for place in measurement.values)
    judged = finding.state != "for information" and measurement.metric != "spread" and measurement.values
    if judged and whole and of_each and (missing := stayed - at):
        yield f"{_told(finding)} was not measured on {record.hosts[min(missing)]}"


def _limits(record: Record) -> Iterator[str]:
    """Where it is known which limits there were, each figure was held against the one that decides."""
    names = {gpu.name for gpu in record.topology.gpus}
    used = _shipped().get(record.run.profile_sha256 or "")
    rehearsal, given = record.run.rehearsal, record.profile
    known = given is not None or _same_version(record)
    if known and not rehearsal and given is None and used != profile.choose(None, names):
        which = f"{used.name}, which is not the one for its GPUs" if used else f"none of pytest-gpufleet {__version__}"
        yield f"its profile of limits is {which}"
    elif known and not rehearsal:
        last = {finding.check: number for number, finding in enumerate(record.findings)}
        for finding in record.findings:
            measurement, fabric = finding.measurement, record.topology.fabric
            if measurement.metric == "spread" or not measurement.values:
                continue
            decides = used.limit_for(measurement, fabric) if used and not given else None
            if given:
                # One of the profile that it extends, if it does, where none of its own holds.
                base = finding.limit if finding.limit and _fingerprint(finding.limit) in _shipped_rules() else None
                fitting = (limit for limit in given.limits if profile.holds(limit, measurement, fabric))
                decides = profile.best(fitting, base)
            so_far = [each.measurement for each in record.findings[: last[finding.check] + 1]]
            decides, _ = deciding(replace(finding, limit=decides), record.topology, so_far)
            if finding.limit != decides:
                yield f"{_told(finding)} is not held against the limit of its profile: {decides or 'there is none'}"
            if finding.tolerances != _tolerances(finding, used, given):
                yield f"{_told(finding)} is compared with its peers by another tolerance than that of its profile"


def _tolerances(finding: Finding, used: Profile | None, given: GivenLimits | None) -> tuple[Tolerance, ...]:
    """By which tolerances the places of a finding are compared. What a given profile extends is not known: its base may
    have had the finding's own."""
    fitting = given.tolerances_for(finding.measurement) if given else ()
    base = bool(finding.tolerances) and set(map(_fingerprint, finding.tolerances)) <= _shipped_rules()
    if fitting or not (given and base):
        return tolerances_of(finding.measurement, fitting or (used.tolerances_for(finding.measurement) if used else ()))
    return finding.tolerances


@cache
def _shipped() -> dict[str, Profile]:
    every = (*profile.shipped(), profile.of_every_gpu())
    return {sha256(each.path.read_bytes()).hexdigest(): each for each in every}


@cache
def _shipped_rules() -> frozenset[str]:
    """Every limit and every tolerance of a shipped profile."""
    every = [each for one in profile.shipped() for each in (one, one.base) if each]
    limits = {_fingerprint(limit) for each in every for limit in each.limits}
    return frozenset(limits | {_fingerprint(tolerance) for each in every for tolerance in each.tolerances})


def _fingerprint(rule: Limit | Tolerance) -> str:
    return repr(asdict(rule))


def _verdict(record: Record) -> Iterator[str]:
    if record.verdict is None:
        return
    again = settled(record, record.broken)
    if record.verdict != again.verdict:
        because = next(iter(again.reasons), "")
        yield f"its verdict is {record.verdict}, but what stands before it amounts to {again.verdict}: {because}"
    elif _same_version(record) and record.reasons != again.reasons:
        other = next(iter([reason for reason in again.reasons if reason not in record.reasons]), again.reasons[0])
        yield f"the reasons of its verdict are others than those that it amounts to, like: {other}"
    # pytest's own status goes before ours where it did not come to its end, and where ours is 0.
    status = EXIT_STATUS.get(record.verdict, again.exit_status)
    if status and record.exit_status not in (None, status, *(CUT_SHORT if record.broken else ())):
        yield f"its exit status is {record.exit_status}, but {record.verdict} ends with {status}"

"""The profile that somebody gave for a run, as its evidence keeps it, and what is said of it beside a verdict."""

from collections.abc import Iterable
from dataclasses import replace

from pytest_gpufleet.model.finding import Change, GivenLimits, Limit, distinct, that_count
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.metric import METRICS
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict.judgement import judged_by
from pytest_gpufleet.verdict.profile import Profile, choose, for_gpu, holds

OWN_LIMITS = (
    "the limits come from this very machine: {file} was calibrated on {gpus}, so meeting them says nothing about it"
)


def as_given(profile: Profile, models: Iterable[str]) -> GivenLimits:
    """What evidence has to keep of a profile that was given for GPUs of these models."""
    file, facts = profile.path.name, profile.facts
    shipped = [model for name in sorted(set(models)) if (model := for_gpu(name))]
    changes = dict.fromkeys(
        Change(file, fact, value, facts.get(fact))
        for model in shipped or filter(None, [profile.base])
        for fact, value in model.facts.items()
        if facts.get(fact) != value
    )
    return GivenLimits(file, profile.limits, facts, tuple(changes), profile.calibrated_on, profile.spreads)


def instead(new: GivenLimits | None, before: GivenLimits | None) -> GivenLimits | None:
    """What to say beside figures held against a new profile: facts that the run's own one changed still hold."""
    if new is None or before is None:
        return new or (replace(before, limits=(), calibrated_on=(), spreads=()) if before else None)
    return replace(new, changes=tuple(dict.fromkeys((*new.changes, *before.changes))))


def _title(metric: str) -> str:
    return METRICS[metric].title if metric in METRICS else metric


def unused(record: Record) -> list[tuple[int, Limit]]:
    """The limits of the given profile that were never applied, with their numbers in it. Those between nodes hold for
    nothing in a run of one machine, nor those of one machine in a run on many nodes, each of which has its own run."""
    measured = [finding.measurement for finding in record.findings if finding.measurement.values]
    checks, here = record.suite.checks.values(), (record.topology.fabric, record.topology.part)
    of_one = {metric for check in checks if not check.nodes for metric in check.metrics(several=True)}
    of_several = {metric for check in checks if check.nodes for metric in check.metrics(several=True)}
    found = []
    for number, limit in enumerate(record.profile.limits if record.profile else (), 1):
        between = "nodes" in limit.conditions or limit.metric in of_several - of_one
        if between == record.of_cluster and not any(holds(limit, each, *here) for each in measured):
            found.append((number, limit))
    return found


def unused_limits(record: Record, grade: str = "") -> list[str]:
    """Those of this grade, or all but contract: "acme.toml: limit 3, bus bandwidth ≥ 460 GB/s with ranks=8"."""
    found = []
    for number, limit in unused(record):
        if limit.grade == grade if grade else limit.grade != "contract":
            when = ", ".join(f"{key}={value}" for key, value in limit.conditions.items())
            text = f"{limit.profile}: limit {number}, {_title(limit.metric)} {limit}"
            found.append(f"{text} with {when}" if when else text)
    return found


def own_limits(record: Record) -> str:
    """Whether a machine is held against what it did itself; empty if it is not."""
    if not record.profile or not (own := record.profile.calibrated_among(record.topology.gpus)):
        return ""
    gpus = ", ".join(f"GPU {gpu.index} (serial {gpu.serial or 'unknown'})" for gpu in own)
    return say(OWN_LIMITS, file=record.profile.file, gpus=gpus)


def remarks_on(record: Record) -> list[str]:
    """What a verdict has to tell of the given profile, and what changes nothing about it."""
    if record.profile is None:
        return []
    lines, whose = list(map(str, record.profile.changes)), f"the given profile {record.profile.file}"
    spreads = grouped(
        (f"{_title(row.metric)} {where}", 100 * sd)
        for row in record.profile.spreads
        for sd, where in ((row.within, "within a machine"), (row.between, "between machines"))
        if sd is not None
    )
    if spreads:
        most = ", ".join(f"{what} up to {max(sds):.4g} %" for what, sds in spreads.items())
        lines.append(f"{whose} says how much healthy GPUs differ: {most}")
    # What would miss its limits without the given profile, and does not by it.
    anew = judged_by(record, choose(None, (gpu.name for gpu in record.topology.gpus)))
    met = (finding for finding in that_count(distinct(record.findings)) if finding.state != "missed")
    judged = (anew(each.measurement, check=each.check, required=each.required) for each in met)
    if by_others := [finding for finding in judged if finding.state == "missed"]:
        figures = "1 measurement" if len(by_others) == 1 else f"{len(by_others)} measurements"
        named = ((_title(each.measurement.metric), each.limit) for each in by_others)
        what = ", ".join(dict.fromkeys(f"{title} {limit}" if limit else title for title, limit in named))
        lines.append(f"{figures} would miss the limits that hold without {whose}: {what}")
    if record.of_cluster:
        lines.append(f"what only {whose} lets pass on a node, its own report tells")
    if others := len(unused_limits(record)):
        lines.append(f"{'1 limit' if others == 1 else f'{others} limits'} of {whose} applied to no measurement")
    return lines

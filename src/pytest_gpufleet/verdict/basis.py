"""What a verdict stands on: how many measurements were judged by limits of which grade, whether that is as much as was
asked for, and what the profile says that somebody gave for the run."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from pytest_gpufleet.model import finding
from pytest_gpufleet.model.finding import GRADES, IN_WORDS, Finding, GivenLimits, Grade, Limit, distinct, that_count
from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.metric import METRICS
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict import judgement
from pytest_gpufleet.verdict.profile import Profile, choose, for_gpu, holds

# What a limit of the lowest grade is worth, said wherever one was used.
THEORETICAL = " (theoretical limits catch defects, not a 10 % slowdown)"
WITHIN = "{met} of {count} measurements within limits"
WITHIN_ONE = "{met} of 1 measurement within limits"
TOO_LOW = "judged by a {grade} limit, and --fleet-basis asks for a {wanted} one"
# Machines that the suite has run on at level standard or above, by model and number of GPUs: docs/results/README.md.
RAN = {
    ("NVIDIA H200", 1): 7,
    ("NVIDIA H200", 2): 6,
    ("NVIDIA H200", 4): 3,
    ("NVIDIA H100 80GB HBM3", 1): 7,
    ("NVIDIA H100 80GB HBM3", 2): 2,
}
HAS_RUN = "machines with {gpus} x {name} that ran this suite: {count}"
# How many numbers of a version say which release it is, and by how much one is so much older that figures may differ:
# NCCL 2.26 for 2.28, driver 560 for 580.
RELEASES = {"NCCL": (2, 2), "driver": (1, 20)}
OUTDATED = "{count} of the limits come from {software} {old}, and this run has {new}: they may be out of date"


def judged_by(finding: Finding) -> Grade | None:
    """The grade of the limit that a figure was held against, if any; a spread of samples counts for none."""
    judged = finding.state in ("met", "missed") and finding.measurement.metric != "spread"
    return finding.limit.grade if judged and finding.limit else None


def by_grade(*records: Record) -> dict[Grade, int]:
    """How many figures of these runs were held against limits of each grade, the best grade first."""
    counts = Counter(judged_by(finding) for record in records for finding in distinct(record.findings))
    return {grade: counts[grade] for grade in GRADES if counts[grade]}


def lowest(record: Record) -> Grade | None:
    """The lowest grade of all limits that figures were held against, on any of its nodes or between them."""
    used = {*map(judged_by, record.findings), *(end.basis for end in record.finished.values())}
    return next((grade for grade in reversed(GRADES) if grade in used), None)


def described(record: Record) -> str:
    """What the verdict of a run stands on, in words; of one on many nodes, how low the limits of any of them go."""
    missed = sum(each.state == "missed" for each in distinct(record.findings) if judged_by(each))
    words, worst = in_words(by_grade(record), missed), lowest(record)
    if not record.finished or worst is None:
        return say("; ").join(filter(None, [words, words and has_run(record)]))
    on_nodes = say("no limit of any node below a {grade} one", grade=say(IN_WORDS[worst]))
    on_nodes += say(THEORETICAL) if worst == "physical" else ""
    return say("; ").join([say("between nodes {words}", words=words), on_nodes]) if words else on_nodes


def has_run(record: Record) -> str:
    """On how many machines like this one the suite has run, in words; "" of one that has GPUs of several models."""
    names = [gpu.name for gpu in record.topology.gpus]
    if len(set(names)) != 1:
        return ""
    return say(HAS_RUN, gpus=len(names), name=names[0], count=RAN.get((names[0], len(names)), 0))


def outdated(record: Record) -> list[str]:
    """Of which limits the source ran a much older NCCL or driver than this run, in words."""
    here = {"NCCL": record.topology.nccl or "", "driver": record.topology.driver or ""}
    references = [each.limit.reference for each in distinct(record.findings) if each.limit and each.limit.reference]
    sources = Counter(pair for each in references for pair in (("NCCL", each.nccl), ("driver", each.driver)))
    lines = []
    for (software, old), count in sorted(sources.items()):
        numbers, apart = RELEASES[software]
        parts = (re.findall(r"\d+", version)[:numbers] for version in (old, here[software]))
        was, now = (int("".join(f"{part:0>3}" for part in each) or 0) for each in parts)
        if was and now - was >= apart:
            lines.append(say(OUTDATED, count=count, software=say(software), old=old, new=here[software]))
    return lines


def in_words(counts: Mapping[Grade, int], missed: int = 0) -> str:
    """ "42 of 42 measurements within limits: 19 calibrated, 23 theoretical (...)"; "" without any limit."""
    count = sum(counts.values())
    return say(": ").join(filter(None, [within(count - missed, count), grades(counts)]))


def within(met: int, count: int) -> str:
    """ "42 of 42 measurements within limits"; "" without any limit."""
    return say(WITHIN if count != 1 else WITHIN_ONE, met=met, count=count) if count else ""


def grades(counts: Mapping[Grade, int]) -> str:
    """ "19 calibrated, 23 theoretical (...)"; "" without any limit."""
    each = (say("{count} {grade}", count=number, grade=say(IN_WORDS[grade])) for grade, number in counts.items())
    return say(", ").join(each) + (say(THEORETICAL) if "physical" in counts else "")


def too_low(findings: Iterable[Finding], wanted: Grade) -> list[tuple[Finding, str]]:
    """What was held against a limit of a lower grade than --fleet-basis asks for, and that in words."""
    return [
        (each, say(TOO_LOW, grade=say(IN_WORDS[grade]), wanted=say(IN_WORDS[wanted])))
        for each, grade in ((each, judged_by(each)) for each in findings if each.required)
        if grade and GRADES.index(grade) > GRADES.index(wanted)
    ]


OWN_LIMITS = (
    "the limits come from this very machine: {file} was calibrated on {gpus}, so meeting them says nothing about it"
)


def as_given(profile: Profile, models: Iterable[str]) -> GivenLimits:
    """What evidence has to keep of a profile that was given for GPUs of these models."""
    file, facts = profile.path.name, profile.facts
    shipped = [model for name in sorted(set(models)) if (model := for_gpu(name))]
    changes = dict.fromkeys(
        finding.Change(file, fact, value, facts.get(fact))
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
    runs = record.profile.calibrated_on if record.profile else ()
    known = {name for run in runs for name in (*run.uuids, *run.serials)}
    own = [gpu for gpu in record.topology.gpus if gpu.uuid in known or gpu.serial in known]
    gpus = ", ".join(f"GPU {gpu.index} (serial {gpu.serial or 'unknown'})" for gpu in own)
    return say(OWN_LIMITS, file=record.profile.file, gpus=gpus) if record.profile and own else ""


def remarks_on(record: Record) -> list[str]:
    """What a verdict has to tell of the given profile, and what changes nothing about it."""
    if record.profile is None:
        return []
    lines, whose = list(map(str, record.profile.changes)), f"the given profile {record.profile.file}"
    # What would miss its limits without the given profile, and does not by it.
    anew = judgement.judged_by(record, choose(None, (gpu.name for gpu in record.topology.gpus)))
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

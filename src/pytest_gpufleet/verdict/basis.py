"""What a verdict stands on: how many measurements were judged by limits of which grade, and whether that is as much as
was asked for."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from pytest_gpufleet.model.finding import GRADES, IN_WORDS, Finding, Grade, distinct
from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.record import Record

# What a limit of the lowest grade is worth, said wherever one was used.
THEORETICAL = " (theoretical limits catch defects, not a 10 % slowdown)"
WITHIN = "{met} of {count} measurements within limits"
WITHIN_ONE = "{met} of 1 measurement within limits"
TOO_LOW = "judged by a {grade} limit, and --fleet-basis asks for a {wanted} one"
# Machines that the suite has run on at level standard or above, by model and number of GPUs: docs/results/README.md.
RAN = {
    ("NVIDIA H200", 1): 7,
    ("NVIDIA H200", 2): 5,
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
    words, worst = in_words(by_grade(record), missed(record)), lowest(record)
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


def missed(*records: Record) -> int:
    judged = (each for record in records for each in distinct(record.findings) if judged_by(each))
    return sum(each.state == "missed" for each in judged)


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
    found = []
    for finding in findings:
        grade = judged_by(finding) if finding.required else None
        if grade and GRADES.index(grade) > GRADES.index(wanted):
            found.append((finding, say(TOO_LOW, grade=say(IN_WORDS[grade]), wanted=say(IN_WORDS[wanted]))))
    return found

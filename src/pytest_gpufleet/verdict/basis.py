"""What a verdict stands on: how many figures were held against limits of which grade, and whether that is as much as
was asked for."""

from collections import Counter
from collections.abc import Iterable, Mapping

from pytest_gpufleet.model.finding import Finding, distinct
from pytest_gpufleet.model.language import say
from pytest_gpufleet.model.limit import GRADES, Grade
from pytest_gpufleet.model.record import Record

# What a limit of the lowest grade is worth, said wherever one was used.
PHYSICAL = ", which find what is broken and not what is a tenth slow"

ONE, SOME, MORE = "{count} figure by {grade} limits", "{count} figures by {grade} limits", "{count} by {grade} ones"
TOO_LOW = "held against a {grade} limit, and --fleet-basis asks for a {wanted} one"


def judged_by(finding: Finding) -> Grade | None:
    """The grade of the limit that a figure was held against; None if it was held against none. Of how far samples
    spread the limit is the suite's own, for every machine."""
    judged = finding.state in ("met", "missed") and finding.measurement.metric != "spread"
    return finding.limit.grade if judged and finding.limit else None


def by_grade(*records: Record) -> dict[Grade, int]:
    """How many figures of these runs were held against limits of each grade, the best grade first."""
    counts = Counter(judged_by(finding) for record in records for finding in distinct(record.findings))
    return {grade: counts[grade] for grade in GRADES if counts[grade]}


def lowest(record: Record) -> Grade | None:
    """The lowest grade of all limits that figures were held against, on any of its nodes or between them."""
    used = {*by_grade(record), *(end.basis for end in record.finished.values())}
    return next((grade for grade in reversed(GRADES) if grade in used), None)


def told(record: Record) -> str:
    """What the verdict of a run stands on, in words; of one on many nodes, how low the limits of any of them go."""
    words, worst = in_words(by_grade(record)), lowest(record)
    if not record.finished or worst is None:
        return words
    on_nodes = say("no limit of any node below a {grade} one", grade=say(worst))
    on_nodes += say(PHYSICAL) if worst == "physical" else ""
    return say("; ").join([say("{words} between nodes", words=words), on_nodes]) if words else on_nodes


def in_words(counts: Mapping[Grade, int]) -> str:
    """ "19 figures by calibrated limits, 23 by physical ones, which find what is broken and not what is a tenth slow";
    "" if none was held against a limit."""
    parts: list[str] = []
    for grade, count in counts.items():
        first = SOME if count != 1 else ONE
        text = say(MORE if parts else first, count=count, grade=say(grade))
        parts.append(text + (say(PHYSICAL) if grade == "physical" else ""))
    return say(", ").join(parts)


def too_low(findings: Iterable[Finding], wanted: Grade) -> list[tuple[Finding, str]]:
    """The figures that need a limit and were held against one of a lower grade than --fleet-basis asks for, and that
    in words."""
    grades = ((finding, judged_by(finding)) for finding in findings if finding.required)
    return [
        (finding, say(TOO_LOW, grade=say(grade), wanted=say(wanted)))
        for finding, grade in grades
        if grade and GRADES.index(grade) > GRADES.index(wanted)
    ]

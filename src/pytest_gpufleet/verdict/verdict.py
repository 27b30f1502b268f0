"""What the evidence of a run amounts to."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from pytest_gpufleet.verdict import levels
from pytest_gpufleet.verdict.evidence import Check, Record

DIED = "the run did not come to its end"
# 0 and 1 as pytest means them; pytest does not use 10.
EXIT_STATUS = {"ACCEPTED": 0, "REJECTED": 1, "INCOMPLETE": 10}


def conclude(record: Record, broken: str = "") -> tuple[str, list[str]]:
    """The verdict and the reasons for it, most important first. `broken` says why a run did not come to its end.

    REJECTED if any check failed; else REHEARSAL without GPUs; else INCOMPLETE if a check that the level requires was
    not run, skipped or not judged; else ACCEPTED.
    """
    level, rehearsal = record.run.get("level", "standard"), record.run.get("rehearsal", False)
    failed = [check for check in record.checks.values() if check.outcome == "failed"]
    cut_short = ([broken] if broken else []) + _unfinished(record)
    if rehearsal:
        reasons = ["CPU ranks stood in for GPUs: this says nothing about any GPU"]
        return "REHEARSAL", reasons + _failures(failed) + cut_short
    # A check may have swallowed LimitMissed; the finding is recorded all the same.
    swallowed = {finding.check for finding in record.findings if finding.state == "missed"} - {c.id for c in failed}
    if failed or swallowed:
        missed = [f"{check} missed a limit" for check in sorted(swallowed)]
        return "REJECTED", _failures(failed) + missed + cut_short
    gaps = cut_short + _gaps(record, level)
    if gaps:
        return "INCOMPLETE", gaps
    return "ACCEPTED", [f"all {len(levels.required(level))} checks of level {level} ran and met their limits"]


def settled(record: Record, broken: str) -> Record:
    """The record with the verdict, its reasons and the exit status that follow from all else in it."""
    verdict, reasons = conclude(record, broken)
    failed = any(check.outcome == "failed" for check in record.checks.values())
    rehearsed = EXIT_STATUS["REJECTED"] if failed else EXIT_STATUS["INCOMPLETE"] if broken else 0
    status = EXIT_STATUS.get(verdict, rehearsed)
    return replace(record, verdict=verdict, reasons=reasons, broken=broken, exit_status=status)


def _failures(failed: list[Check]) -> list[str]:
    return [f"{check.title} ({check.id})" if check.title else check.id for check in failed]


def _gaps(record: Record, level: str) -> list[str]:
    ran: dict[str, list[Check]] = defaultdict(list)
    for check in record.checks.values():
        ran[levels.check_name(check.id)].append(check)
    deselected = {levels.check_name(check) for check in record.deselected}
    begun = {levels.check_name(check) for check in record.started}  # and not finished: that has been said
    gaps = []
    for name in levels.required(level):
        if name not in ran and name in begun:
            continue
        if name not in ran:
            gaps.append(f"{name} was {'deselected' if name in deselected else 'not run'}")
        elif name in deselected:
            gaps.append(f"{name} was deselected in part")
        elif len(ran[name]) < (cases := levels.CASES.get(name, 1)):
            gaps.append(f"only {len(ran[name])} of the {cases} cases of {name} ran")
        gaps += [f"{check.id} was skipped: {check.message}" for check in ran[name] if check.outcome == "skipped"]
    unjudged = Counter(
        (levels.check_name(finding.check), finding.reason)
        for finding in record.findings
        if finding.state == "not judged"
    )
    for (name, reason), count in unjudged.items():
        gaps.append(f"{name}: {count} {'figure was' if count == 1 else 'figures were'} not judged: {reason}")
    if level == "burnin" and (seconds := record.run.get("burn_in_seconds", 0)) < levels.BURN_IN_SECONDS:
        gaps.append(f"the burn-in was {seconds:g} s long, level burnin asks for {levels.BURN_IN_SECONDS:g} s")
    return gaps


def _unfinished(record: Record) -> list[str]:
    """Checks that began and did not end, with how far they came if they told."""
    lines = []
    for check in record.started:
        if check not in record.checks:
            done, whole = record.progress.get(check, (0, 0))
            came_to = f": it came to {done:.0f} s of {whole:.0f} s without a fault" if whole else ""
            lines.append(f"{check} did not finish{came_to}")
    return lines

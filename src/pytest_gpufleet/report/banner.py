"""The top of a report: the verdict, why, and what to do next."""

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

from pytest_gpufleet.model.events import Check
from pytest_gpufleet.model.language import say, some
from pytest_gpufleet.model.levels import BURN_IN_SECONDS
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.failures import Accused, accused, explanations, times_named
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.accusations import searched
from pytest_gpufleet.verdict.fleet import fleet_verdict
from pytest_gpufleet.verdict.fleet.host_runs import rejected
from pytest_gpufleet.verdict.gaps import counted, gaps
from pytest_gpufleet.verdict.verdict import RESUMABLE, concluded, failure, remarks

MOST_REASONS = 10


class Stamp(NamedTuple):
    """A verdict as the reader meets it."""

    word: str
    symbol: str
    colour: str
    meaning: str

    @property
    def markup(self) -> dict[str, bool]:
        """pytest's for the terminal."""
        return {self.colour: True, "bold": True}


NO_ACCEPTANCE = "No fault of the machine was found, but not all that is required was judged: this is no acceptance."
ON_CPU = "The suite ran on CPU ranks, without GPUs. Measurements were not judged: a rehearsal never accepts a machine."
ACCEPTED = Stamp("ACCEPTED", "✓", "green", "Every required check ran, was judged and met its limit.")
REJECTED = Stamp("REJECTED", "✗", "red", "A check failed, or a fault was found.")
INCOMPLETE = Stamp("INCOMPLETE", "○", "yellow", NO_ACCEPTANCE)
REHEARSAL = Stamp("REHEARSAL", "◇", "cyan", ON_CPU)
STAMPS = {stamp.word: stamp for stamp in (ACCEPTED, REJECTED, INCOMPLETE, REHEARSAL)}


def stamp(record: Record) -> Stamp:
    """The stamp of a run. A rehearsal stays one whatever was recorded, and no verdict is INCOMPLETE."""
    return REHEARSAL if record.run.rehearsal else STAMPS.get(record.verdict or "", INCOMPLETE)


def headline(record: Record) -> str:
    """The verdict in a line, with what one of ACCEPTED stands on: who is rejected, is so by what failed."""
    word = stamp(record).word
    return say("; ").join(filter(None, (say(word), basis.described(record) if word == "ACCEPTED" else "")))


def reasons(
    record: Record, where_more: str = "which the report lists", with_checks: bool = False, of_fleet: Iterable[str] = ()
) -> list[str]:
    """Why the verdict is what it is, beyond the headline and the paragraph below; `where_more`: where all are. Cases of
    one check are one reason. `with_checks`: also which failed. `of_fleet`: of many nodes, as their fleet says them."""
    if record.verdict is None:
        return [say("No verdict was recorded: the run did not reach its end.")]
    if record.verdict == "ACCEPTED":
        return []
    failed: list[Check] = []
    if record.of_cluster:
        names = {failure(check, record): failure(check, record, with_case=False) for check in record.checks.values()}
        names = names if with_checks else dict.fromkeys(names, "")
        beside = {fleet_verdict.REHEARSED, say(fleet_verdict.REHEARSED), record.judged_again}
        beside |= {*remarks(record)} if record.verdict == "INCOMPLETE" else set()
        given = [say(each) for each in of_fleet] or record.reasons
        others = [*filter(None, (names.get(each, each) for each in given if each not in beside))]
    else:
        word, failed, others = concluded(record)
        if word != record.verdict:  # of another version: its own words, but for checks that are named elsewhere
            ids = [check.id for check in record.checks.values() if check.outcome == "failed" and not with_checks]
            failed, others = [], [each for each in record.reasons if not any(name in each for name in ids)]
    cases = Counter([*(failure(check, record, with_case=False) for check in failed if with_checks), *others])
    several = "{reason}, {count} cases"
    found = [say(several, reason=each, count=count) if count > 1 else say(each) for each, count in cases.items()]
    more = len(found) - MOST_REASONS
    left = [say("... and {count} more, {where}", count=more, where=say(where_more))] if more > 0 else []
    return found[:MOST_REASONS] + left


MOST_GPUS = 3
ALL_RAN = "Every check that level {level} requires ran on {gpus} GPUs, and none failed."
ALL_RAN_ON_ONE = ALL_RAN.replace("{gpus} GPUs", "1 GPU")
OF_NODES = "Every check that level {level} requires ran on {nodes} nodes and between them, and met its limits."
OF_RETURN = "Every check that the return from repair requires at level {level} ran, and none failed."
NO_SINGLE_GPU = "No single GPU is named: look at what all GPUs share (switches, host, software, settings)."


def why(record: Record) -> str:
    """The paragraph for the top of the report, in the language of `say`."""
    note = record.judged_again
    again = say("Not the verdict of the run itself: {note}.", note=say(note)) if note else ""
    absent = not record.topology.gpus and not record.run.rehearsal
    problems = "; ".join(record.topology.problems)
    no_gpu = say("No GPU is here: {reason}.", reason=problems.rstrip(".")) if absent and problems else ""
    return wording.sentences(again, no_gpu, _why(record, bool(no_gpu)))


def _why(record: Record, no_gpu: bool) -> str:
    """`no_gpu`: where none is here nothing else needs to be explained."""
    word, level, gpus = stamp(record).word, say(record.run.level), len(record.topology.gpus)
    meaning = say(STAMPS[word].meaning)
    if word == "REHEARSAL":
        because = record.run.rehearsal_because.rstrip(".")
        why_none = say("Why it is a rehearsal: {because}.", because=say(because)) if because else ""
        outcomes = Counter[str](check.outcome for check in record.checks.values() if check.asked)
        passed, failed = outcomes["passed"], outcomes["failed"]
        others = {"skipped": "{count} skipped", "not applicable": "{count} not applicable"}
        parts = [
            say("{count} checks passed" if passed != 1 else "1 check passed", count=passed),
            say("{count} failed", count=failed) if failed else say("none failed"),
            *(say(text, count=outcomes[name]) for name, text in others.items() if outcomes[name]),
        ]
        return wording.sentences(f"{say(', ').join(parts)}{say('.')}", meaning, why_none)
    texts = counted(gaps(record))
    left_open = say("Open: {points}.", points=say(", ").join(texts)) if texts else ""
    if record.verdict is None:
        return wording.sentences(say("The run did not reach its end, so there is no verdict."), left_open)
    beside = [f"{wording.capitalised(text)}{say('.')}" for text in remarks(record)]
    if word == "ACCEPTED":
        text = OF_RETURN if record.before else ALL_RAN if gpus != 1 else ALL_RAN_ON_ONE
        text = say(OF_NODES if record.of_cluster else text, level=level, gpus=gpus, nodes=len(record.hosts))
        judged = record.of_cluster or any(basis.judged_by(finding) for finding in record.findings)
        return wording.sentences(text, "" if judged else say("No measurement was judged."), *beside)
    if record.of_cluster and word == "REJECTED":  # which nodes to look at first; what is wrong is told beside each
        named = [say("{node} ({why})", node=record.hosts[at], why=say(why)) for at, why in to_look_at(record).items()]
        if not named:
            return say("No node is named: look at what all nodes share (switches, network, software, settings).")
        one, several = "1 of {nodes} nodes needs a look: {first}.", "{count} of {nodes} nodes need a look: {first}."
        text, first = one if len(named) == 1 else several, say(some(named, MOST_GPUS, say(", ")))
        return say(text, count=len(named), nodes=len(record.hosts), first=first)
    said = {} if record.of_cluster else accused(record)
    if word == "REJECTED" and said:
        return _rejected(record, said, no_gpu)
    own = "" if record.of_cluster else basis.own_limits(record)
    own = f"{wording.capitalised(own)}{say('.')}" if own else ""
    return wording.sentences(meaning, _first(record, said, {}), own, left_open, *beside)


def to_look_at(record: Record) -> dict[int, str]:
    """The nodes to look at, by number, and why in a word: those that reject the run, then those that checks name."""
    found: dict[int, str] = dict.fromkeys(record.lost, "lost")
    for node, end in record.finished.items():
        if rejected(end):
            found.setdefault(node, "rejected")
    for where, _ in times_named(accused(record, nodes=True).values()).most_common():
        found.setdefault(where.node, "left out" if where.node in record.left_out else "named by checks")
    return found


def _rejected(record: Record, said: Mapping[str, Accused], no_gpu: bool) -> str:
    """ "3 of 56 checks failed. Named: GPU 5 (serial 1654124046124) in 2 checks." """
    ended = said.keys() & {*record.failed}
    of_all = "{failed} of {checks} checks failed." if len(record.checks) != 1 else "{failed} of 1 check failed."
    failed = say(of_all, failed=len(ended), checks=len(record.checks))
    if len(ended) < len(said):  # while a check ran that passed, or beside all of them
        beside = say("Faults were found beside them." if ended else "No check failed, but a fault was found.")
        failed = wording.sentences(failed if ended else "", beside)
    if no_gpu:
        return failed
    unexplained = {check_id: each for check_id, each in said.items() if not each.is_explained}
    first = _first(record, said, unexplained)
    if first and not unexplained:
        return wording.sentences(failed, first)
    cause = ""  # what a search found out about the first figure that missed
    for fault in [fault for check_id in unexplained for fault in searched(record, check_id)][:1]:
        text = fault.described(partial(wording.place, hosts=record.hosts)).splitlines()[0].rstrip(".") + "."
        cause = text if fault.subjects else wording.capitalised(text)  # a host is called as it is called
    if not (times := times_named(unexplained.values()).most_common()):
        return wording.sentences(failed, first, say(NO_SINGLE_GPU), cause)
    gpus = record.topology.gpus
    serials = {of.place: say("serial {serial}", serial=of.serial) if of.serial else of.pci_bus_id for of in gpus}
    texts = []
    for where, count in times[:MOST_GPUS]:
        gpu, checks = wording.place(where, record.hosts), wording.count(count, "check")
        text = "{gpu} ({serial}) in {count}" if ended else "{gpu} ({serial})"
        texts.append(say(text, gpu=gpu, serial=serials[where], count=checks))
    if (more := len(times) - MOST_GPUS) > 0:
        texts.append(say("{count} more GPUs in some" if more != 1 else "1 more GPU in some", count=more))
    nobody = sum(not unexplained[check].named for check in ended & unexplained.keys())
    text = "Named: {gpus}; {count} checks name no single GPU." if nobody else "Named: {gpus}."
    text = "Named: {gpus}; 1 check names no single GPU." if nobody == 1 else text
    return wording.sentences(failed, first, say(text, gpus=say(", ").join(texts), count=nobody), cause)


def _first(record: Record, said: Mapping[str, Accused], unexplained: Mapping[str, Accused]) -> str:
    """What has to be mended first: it is the cause of what it explains, and not the GPU below it."""
    texts = explanations(said.values(), record.hosts)
    named = times_named(unexplained.values())
    clear = dict.fromkeys(where for each in said.values() for where in each.explained if where not in named)
    if clear:
        places = say(" or ").join(wording.place(where, record.hosts) for where in sorted(clear))
        texts.append(say("No evidence of a fault in {places}.", places=places))
    return wording.sentences(*texts)


NOTHING_LEFT_OUT = "with no check left out"
LIMITS = "with these limits"
# What has to be otherwise in the next run, by what this one left open (verdict/gaps.py).
OTHERWISE = {
    **dict.fromkeys(("deselected", "not run"), NOTHING_LEFT_OUT),
    "too short": "with a burn-in that is long enough",
    **dict.fromkeys(("not judged", "below the basis", "calibrated here"), LIMITS),
    "disturbed": "once no other process uses the GPUs",
    "skipped": "once the causes of the skipped checks are fixed",
    "without telemetry": "once the driver gives telemetry of the GPUs",
    "changed": "with the suite as it was shipped",
}
WHOLE = {NOTHING_LEFT_OUT, OTHERWISE["too short"]}


def next_steps(record: Record, folder: str = "FOLDER") -> list[tuple[str, str]]:
    """Why, and the command, in the order in which to type them; none for what is accepted, rejected or a rehearsal that
    came to its end. `folder`: the one that the run is in, which no record knows, nor DIR, that of good machines."""
    run, start = record.run, record.run.command_line
    if record.began and (record.verdict is None or record.broken in RESUMABLE):
        return [(say("go on where this run stopped"), start.typed(f"--fleet-resume {shlex.quote(folder)}"))]
    if stamp(record).word != "INCOMPLETE":
        return []
    states: dict[str, None] = dict.fromkeys(gap.kind for gap in gaps(record))
    if not any(finding.required and finding.state == "not judged" for finding in record.findings):
        states.pop("not judged", None)
    found = dict.fromkeys(OTHERWISE[state] for state in states if state in OTHERWISE)
    steps, limits = [], ""
    if LIMITS in found:
        steps.append((say("make limits from known-good machines"), "gpufleet calibrate DIR -o my.toml"))
        limits = "--fleet-profile my.toml"
    command = start.typed(limits)
    if WHOLE & found.keys():
        nodes = f"--nodes {run.nodes_wanted or 'all'} " if record.of_cluster else ""
        # The burn-in where a longer one was asked for than the level's own.
        longer = run.burn_in_seconds > BURN_IN_SECONDS
        how_long = f"--fleet-burn-in {run.burn_in_seconds:g}s" if longer else f"--fleet-level {run.level}"
        if (returns := record.returns) is not None:
            parts = f" --fleet-replaced {','.join(returns.replaced)}" if returns.replaced else ""
            nodes, how_long = "", f"--fleet-returns {shlex.quote(returns.run)}{parts}"
        command = start.typed(f"{nodes}--gpus {run.gpus} {how_long}", limits, whole_suite=True)
    return [*steps, (say(", ").join([say("run it again"), *map(say, found)]), command)]

"""One paragraph that says why a verdict is what it is, to somebody who knows none of the checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial

from pytest_gpufleet.model.finding import distinct
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.accused import Accused, accused, times_named
from pytest_gpufleet.report.banner import STAMPS, stamp
from pytest_gpufleet.report.failures import explanations
from pytest_gpufleet.report.node_standings import to_look_at
from pytest_gpufleet.report.open_points import counted, gaps
from pytest_gpufleet.verdict.accusations import searched
from pytest_gpufleet.verdict.given_limits import own_limits
from pytest_gpufleet.verdict.verdict import remarks

MOST_GPUS = 3


def why(record: Record) -> str:
    """The paragraph for the top of the report."""
    return " ".join(filter(None, (_again(record), _no_gpu(record), _why(record))))


def _again(record: Record) -> str:
    """That this is no verdict of a run."""
    note = record.judged_again
    return f"Judged again, and not the verdict of the run itself: {note}." if note else ""


def _no_gpu(record: Record) -> str:
    """Where no GPU is here nothing else needs to be explained."""
    absent = not record.topology.gpus and not record.run.rehearsal
    reason = "; ".join(record.topology.problems)
    return f"No GPU is here: {reason.rstrip('.')}." if absent and reason else ""


def _why(record: Record) -> str:
    if record.run.drill:
        return stamp(record).meaning
    word = stamp(record).word
    if word == "REHEARSAL":
        because = record.run.rehearsal_because.rstrip(".")
        why_none = f"Why it is a rehearsal: {because}." if because else ""
        return " ".join(filter(None, (f"{_rehearsed(record)}.", STAMPS[word].meaning, why_none)))
    if record.verdict is None:
        return f"The run did not reach its end, so there is no verdict. {_open(record)}".rstrip()
    if record.of_cluster:
        return _of_nodes(record, word)
    said = accused(record)
    if word == "REJECTED" and said:
        failed = f"{len(said)} of {wording.count(len(record.checks), 'check')} failed."
        if _no_gpu(record):
            return failed
        unexplained = {check_id: each for check_id, each in said.items() if not each.is_explained}
        first = _first(record, said, unexplained)
        if first and not unexplained:
            return f"{failed} {first}"
        return " ".join(filter(None, (failed, first, _named(record, unexplained), _first_cause(record, unexplained))))
    told = [f"{wording.capitalised(remark)}." for remark in remarks(record)]
    if word == "ACCEPTED":
        return " ".join(filter(None, (_judged(record), *told, _tightest(record))))
    own = f"{wording.capitalised(text)}." if (text := own_limits(record)) else ""
    return " ".join(filter(None, (STAMPS[word].meaning, own, _open(record), *told)))


def _of_nodes(record: Record, word: str) -> str:
    """Which nodes to look at first. What is wrong with each is told beside it."""
    told = [f"{wording.capitalised(remark)}." for remark in remarks(record)]
    if word == "INCOMPLETE":
        return " ".join(filter(None, (STAMPS[word].meaning, _open(record), *told)))
    level, nodes = record.run.level, wording.count(len(record.hosts), "node")
    if word == "ACCEPTED":
        all_of_them = f"Every check that level {level} requires ran on {nodes} and between them, and met its limits."
        return " ".join([all_of_them, *told])
    found = to_look_at(record)
    if not found:
        return "No node is named: look at what all nodes share (switches, network, software, settings)."
    first = ", ".join(f"{record.hosts[node]} ({why})" for node, why in list(found.items())[:MOST_GPUS])
    more = f" and {len(found) - MOST_GPUS} more" if len(found) > MOST_GPUS else ""
    return f"{len(found)} of {nodes} {'needs' if len(found) == 1 else 'need'} a look: {first}{more}."


def _rehearsed(record: Record) -> str:
    outcomes = Counter(check.outcome for check in record.checks.values())
    told = [f"{wording.count(outcomes['passed'], 'check')} passed", f"{outcomes['failed'] or 'none'} failed"]
    if outcomes["not applicable"]:
        told.append(f"{outcomes['not applicable']} {_s('need', outcomes['not applicable'])} a GPU")
    return ", ".join(told)


def _first(record: Record, said: Mapping[str, Accused], unexplained: Mapping[str, Accused]) -> str:
    """What has to be mended first: it is the cause of what it explains, and not the GPU below it."""
    told = explanations(said.values(), record.hosts)
    named = times_named(unexplained.values())
    clear = dict.fromkeys(where for each in said.values() for where in each.explained if where not in named)
    if clear:
        told.append(
            f"Nothing here speaks against {' or '.join(wording.place(where, record.hosts) for where in sorted(clear))}."
        )
    return " ".join(told)


def _named(record: Record, unexplained: Mapping[str, Accused]) -> str:
    """ "GPU 5 (serial 1654124046124) is named in 2 of them." """
    times = times_named(unexplained.values()).most_common()
    if not times:
        return "None of them points to a single GPU: look at what all GPUs share (switches, host, software, settings)."
    serials = {gpu.place: f"serial {gpu.serial}" if gpu.serial else gpu.pci_bus_id for gpu in record.topology.gpus}
    told = [
        f"{wording.place(where, record.hosts)} ({serials[where]}) is named in {count}"
        for where, count in times[:MOST_GPUS]
    ]
    more = len(times) - MOST_GPUS
    text = ", ".join(told) + (f", {wording.count(more, 'more GPU')} in some" if more > 0 else "")
    nobody = sum(not each.named for each in unexplained.values())
    return f"{text} of them" + (f"; {nobody} {_s('point', nobody)} to no single GPU." if nobody else ".")


def _s(verb: str, count: int) -> str:
    return f"{verb}s" if count == 1 else verb


def _first_cause(record: Record, accused: Iterable[str]) -> str:
    """What a search found out about the first figure that missed."""
    found = (fault for check_id in accused for fault in searched(record, check_id))
    for fault in found:
        return fault.told(partial(wording.place, hosts=record.hosts)).splitlines()[0].rstrip(".") + "."
    return ""


def _judged(record: Record) -> str:
    gpus, level = wording.count(len(record.topology.gpus), "GPU"), record.run.level
    figures = sum(finding.state == "met" for finding in distinct(record.findings))
    return f"Every check that level {level} requires ran on {gpus}, and all {figures} judged figures met their limits."


def _tightest(record: Record) -> str:
    """The figure that came nearest to its limit."""
    judged = [finding for finding in record.findings if finding.state == "met" and finding.limit]
    nearest = min(judged, key=wording.margin, default=None)
    worst = wording.worst(nearest) if nearest else None
    if nearest is None or nearest.limit is None or worst is None:
        return ""
    value, limit = wording.value_and_limit(worst[1], nearest.limit)
    what = ", ".join([wording.title(nearest), *wording.conditions(nearest)])
    inside = wording.percent(wording.margin(nearest), 2)
    return f"Nearest to its limit came {what}: {value} against {limit}, {inside} inside."


def _open(record: Record) -> str:
    told = counted(gaps(record))
    return f"Open: {', '.join(told)}." if told else ""

"""What the evidence of a run amounts to."""

from collections import Counter, defaultdict
from dataclasses import replace
from datetime import datetime
from itertools import combinations

from pytest_gpufleet.model import levels
from pytest_gpufleet.model.conditions import c_number
from pytest_gpufleet.model.events import NO_NETWORK, Check
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import NVLS_SINCE
from pytest_gpufleet.model.language import say, some
from pytest_gpufleet.model.place import Pair, Place, Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import shipped, titled
from pytest_gpufleet.verdict import accusations, basis, node_verdicts
from pytest_gpufleet.verdict.given_limits import NOT_APPLIED, own_limits, remarks_on, unused_limits
from pytest_gpufleet.verdict.health_rules import without_telemetry
from pytest_gpufleet.verdict.host_rules import log_rules
from pytest_gpufleet.verdict.judgement import scattered, shares_its_way

DIED = "the run did not come to its end"
ALTERED = "not as it was shipped with this version, so it may check something else"
REHEARSED = "CPU ranks stood in for GPUs: this says nothing about any GPU"
SINCE = "{count} checks did not exist in {version} and are not held against it"
SINCE_ONE = "{count} check did not exist in {version} and is not held against it"
MOST_CASES = 3  # of one check, named in a reason
# 0 and 1 as pytest means them; pytest does not use 10.
EXIT_STATUS = {"ACCEPTED": 0, "REJECTED": 1, "INCOMPLETE": 10}
INTERRUPTED = "the run was interrupted"
ENDED_BY = {name: f"the run was ended by {name}" for name in ("SIGTERM", "SIGHUP")}
DEADLINE = "the run came to its --fleet-deadline"
RESUMABLE = (INTERRUPTED, *ENDED_BY.values(), DEADLINE)
# Exit statuses with which pytest says that a session did not come to its end.
CUT_SHORT = {
    2: INTERRUPTED,
    3: "pytest itself failed",
    4: "pytest was called in a wrong way, so nothing was tested",
    5: "no test was selected",
}


def conclude(record: Record, broken: str = "") -> tuple[str, list[str]]:
    """The verdict and the reasons for it, most important first. `broken` says why a run did not come to its end.

    REHEARSAL without GPUs; else REJECTED if any check failed or the health of a
    GPU got worse; else INCOMPLETE if a check that the level requires was not run, skipped or not judged; else ACCEPTED.
    What a process of somebody else explains could not be tested, which is INCOMPLETE.
    A run on many nodes is REJECTED too if a node is, was lost or is missing, and no more than INCOMPLETE if a node is.
    """
    level, rehearsal = record.run.level, record.run.rehearsal
    failed = [check for check in record.checks.values() if check.outcome == "failed"]
    cut_short = ([broken] if broken else []) + record.spoiled + _unfinished(record)
    failures = [failure(check, record) for check in failed]
    nodes = node_verdicts.unaccepted(record)
    against = [each for each in (node_verdicts.not_as_many(record),) if each]
    against += [str(each.told) for each in nodes if each.rejects]
    cut_short += [str(each.told) for each in nodes if not each.rejects]
    if rehearsal:
        return "REHEARSAL", [REHEARSED, *failures, *against, *cut_short]
    # A check may have swallowed what it found; it is recorded all the same.
    told, disturbed = {check.id for check in failed}, accusations.disturbed(record)
    swallowed = {finding.check for finding in record.findings if finding.state == "missed"} - told - disturbed
    left = (fault for fault in record.faults if fault.check not in told | swallowed | disturbed)
    standing = [_standing(fault, record) for fault in left if not node_verdicts.tells(record, fault)]
    if told - disturbed or swallowed or standing or against:
        missed = [f"{check} missed a limit" for check in sorted(swallowed)]
        return "REJECTED", failures + against + standing + missed + cut_short
    gaps = [*_not_tested(record), *cut_short, *_gaps(record, broken)]
    if gaps:
        return "INCOMPLETE", gaps + remarks(record)
    where = f" on {len(record.hosts)} nodes" if record.of_cluster else ""
    whole = f"all {len(record.required)} checks of level {level} ran and met their limits{where}"
    return "ACCEPTED", [whole, *filter(None, [basis.told(record)]), *remarks(record)]


def _standing(fault: Fault, record: Record) -> str:
    """A fault for which no check failed."""
    when = f"while {fault.check} ran" if fault.watched and fault.check else fault.check
    return ": ".join(filter(None, (when, fault.told(record.topology.identity))))


def _not_tested(record: Record) -> list[str]:
    """Who else used GPUs, if checks say nothing for it."""
    neighbours = [cause for cause in accusations.causes(record) if cause.name == accusations.NEIGHBOUR]
    who = "; ".join(cause.told(record.topology.identity) for cause in neighbours)
    count = len(accusations.disturbed(record))
    checks = f"{count} checks" if count != 1 else "1 check"
    return [f"{checks} could not be tested, since somebody else's process used a GPU: {who}"] if count else []


def remarks(record: Record) -> list[str]:
    """What a verdict does not cover, or did not see happen: GPUs that were left out, checks of earlier runs."""
    tested, present = len(record.topology.gpus), record.run.gpus_present
    told = []
    if present > tested:
        told.append(say("{tested} of the machine's {present} GPUs were tested", tested=tested, present=present))
    if (bound := _bound_to_the_driver(record)) > present > 0:
        text = (
            "{bound} GPUs are bound to the NVIDIA driver, which shows {present}: the others are hidden from here, or "
            "did not start (RmInitAdapter in the kernel log)"
        )
        told.append(say(text, bound=bound, present=present))
    if _nvls_is_off(record):
        told.append(say("NCCL_NVLS_ENABLE=0: reductions in the NVSwitches (NVLS) were switched off and not tested"))
    if record.run.network == NO_NETWORK:
        told.append(say("nothing was asked of the network, as --fleet-network none says"))
    elif record.run.network and record.of_cluster:
        text = "the network between nodes is held against {rate} Gbit/s of each GPU, as --fleet-network says"
        told.append(say(text, rate=record.run.network))
    told += _of_several_boards(record)
    told += _shared_ways(record)
    told += remarks_on(record)
    told += log_rules.remarks(record.noticed)
    if since := since_then(record):
        told.append(say(SINCE if len(since) != 1 else SINCE_ONE, count=len(since), version=record.run.plugin))
    outcomes = {record.suite.known_as(check.id): check.outcome for check in record.checks.values()}
    for earlier in record.run.resumed:
        carried = sum(check.run == earlier.run for check in record.checks.values())
        when = datetime.fromisoformat(earlier.utc).strftime("%Y-%m-%d %H:%M UTC")
        of = {"carried": carried, "checks": len(record.checks), "run": earlier.run, "when": when}
        told.append(say("{carried} of {checks} checks carried over from {run} of {when}", **of))
        for check in earlier.failed:
            now = outcomes.get(record.suite.known_as(check), "not run")
            title = titled(check)
            told.append(say("{check}: failed in {run}, {now} in this run", check=title, run=earlier.run, now=say(now)))
    return told


def _bound_to_the_driver(record: Record) -> int:
    """How many GPUs the kernel lists as the driver's, whatever the driver says of them; 0 where that is not known."""
    devices = None if record.of_cluster else record.machine.get("pci_devices")
    found = devices.values() if isinstance(devices, dict) else ()
    return sum(isinstance(each, dict) and each.get("kind") == "gpu" for each in found)


def _of_several_boards(record: Record) -> list[str]:
    """That a GPU was exchanged shows in its board's part number. It is no fault: two H200 with numbers as unlike as
    692-2G520-0282-001 and 965-2G520-0041-000 were equally fast in everything. Who bought them may want to know."""
    if record.of_cluster:  # the reports of the nodes tell it
        return []
    boards = {gpu.index: board for gpu in record.topology.gpus if (board := gpu.get("board_part_number"))}
    usual = max(boards.values(), key=list(boards.values()).count, default="")
    others = [f"GPU {index} has {board}" for index, board in boards.items() if board != usual]
    return [f"not all boards have one part number: {usual}, but {', '.join(others)}"] if others else []


def _shared_ways(record: Record) -> list[str]:
    """Figures that count and whose samples differ by more than those of one GPU's own work may."""
    widest: dict[str, tuple[float, str]] = {}
    for finding in record.findings:
        for at, spread in scattered(finding).items() if shares_its_way(finding.measurement, record.topology) else ():
            title = finding.measurement.definition.title
            widest[title] = max(widest.get(title, (0.0, "")), (spread, str(at)))
    text = (
        "{metric}: samples differ by up to {spread} at {place}, as where others use the host or the network "
        "too; their median counts"
    )
    return [
        say(text, metric=say(title), spread=f"{spread:.0%}", place=place) for title, (spread, place) in widest.items()
    ]


def _nvls_is_off(record: Record) -> bool:
    """Whether the environment switches off what such GPUs can do behind an NVSwitch."""
    able = all((gpu.compute_capability or (0, 0)) >= NVLS_SINCE for gpu in record.topology.gpus)
    off = c_number(record.run.environment.get("NCCL_NVLS_ENABLE") or "2") == 0
    return off and able and record.topology.fabric == "nvswitch"


def settled(record: Record, broken: str) -> Record:
    """The record with the verdict, its reasons and the exit status that follow from all else in it.

    A rehearsal ends with 1 if a check or a node failed, else with 10 if it is broken or spoiled or a node is, else with
    0.
    """
    verdict, reasons = conclude(record, broken)
    nodes = node_verdicts.unaccepted(record)
    failed = any(check.outcome == "failed" for check in record.checks.values())
    rejected = failed or any(each.rejects for each in nodes) or bool(node_verdicts.not_as_many(record))
    open_points = bool(broken or record.spoiled or nodes)
    rehearsed = EXIT_STATUS["REJECTED"] if rejected else EXIT_STATUS["INCOMPLETE"] if open_points else 0
    status = EXIT_STATUS.get(verdict, rehearsed)
    return replace(record, verdict=verdict, reasons=reasons, broken=broken, exit_status=status)


def ended(record: Record) -> Record:
    """The record of a run that died with what it amounts to as its verdict; that of any other as it is."""
    return settled(record, DIED) if record.verdict is None else record


def failure(check: Check, record: Record, with_case: bool = True) -> str:
    """A check that failed, as a reason; of a run on many nodes, at which of them."""
    name = check.id if with_case else check.id.partition("[")[0]
    told = f"{say(check.title)} ({name})" if check.title else name
    hosts = node_verdicts.hosts_blamed(record, check.id)
    return f"{told}{say(': ')}{say(node_verdicts.several(hosts))}" if hosts else told


def left_out(record: Record) -> dict[str, tuple[list[str], list[str]]]:
    """The checks that the level requires and of which cases did not begin: the names of those that were deselected, and
    of those that were not even collected."""
    begun = set(map(levels.case_name, {*record.started, *record.checks}))
    deselected = set(map(levels.case_name, record.deselected))
    absent = {}
    for name in record.required:
        missing = [case for case in record.suite.cases(name) if case not in begun]
        if missing:
            wanted = [case for case in missing if case not in deselected]
            absent[name] = [case for case in missing if case in deselected], wanted
    return absent


def named(cases: list[str]) -> str:
    """ "[fp16], [bf16] and 3 more": which cases of a check, for a person."""
    return some([f"[{case.partition('[')[2]}" for case in cases], MOST_CASES)


def short_burn_in(record: Record) -> str:
    """How much shorter the burn-in was than the level asks for; empty if it was not."""
    seconds = record.run.burn_in_seconds
    if record.run.level != "burnin" or seconds >= levels.BURN_IN_SECONDS:
        return ""
    wanted = f"{levels.BURN_IN_SECONDS:g}"
    return say(
        "the burn-in was {seconds} s long, level burnin asks for {wanted} s", seconds=f"{seconds:g}", wanted=wanted
    )


def since_then(record: Record) -> list[str]:
    """The checks that this version requires at the level of the run, and that did not exist in the version that ran."""
    required = shipped().required(record.run.level, len(record.hosts))
    return [name for name in required if name not in record.suite.checks]


def without_figures(record: Record) -> dict[str, dict[str, list[str]]]:
    """The checks of the suite that passed and did not leave what they are there for: by name and metric, the cases. Of
    many nodes, those between them: each node's own run has the figures of the others."""
    several, suite = len(record.topology.gpus) > 1, record.suite
    left = {(levels.case_name(finding.check), finding.measurement.metric) for finding in record.findings}
    without: dict[str, dict[str, list[str]]] = {}
    for check in record.checks.values():
        name, case = levels.check_name(check.id), levels.case_name(check.id)
        elsewhere = record.of_cluster and not suite.between_nodes(name)
        if check.outcome == "passed" and name in suite.checks and not elsewhere:
            for metric in suite.checks[name].metrics(several):
                if (case, metric) not in left:
                    without.setdefault(name, {}).setdefault(metric, []).append(case)
    return without


def missing_places(record: Record) -> list[tuple[str, str, str]]:
    """Where a figure that a check is there for was measured on a part of the GPUs, of their pairs or of the nodes: the
    check, the metric and the places without it. What is only shown may be of one GPU alone."""
    known, gpus = record.suite.checks, {gpu.place for gpu in record.topology.gpus}
    nodes = {Place(node, "node") for node in record.hosts.keys() - record.lost.keys() - record.left_out.keys()}
    measured: dict[tuple[str, str], set[Where]] = defaultdict(set)
    for finding in record.findings:
        metric, name = finding.measurement.metric, levels.check_name(finding.check)
        of_all = finding.measurement.conditions.get("nodes", len(nodes)) == len(nodes)
        if of_all and finding.state != "for information" and name in known and metric in known[name].metrics(True):
            measured[finding.check, metric] |= finding.measurement.values.keys()
    found = []
    for (check, metric), places in measured.items():
        parts, missing = {part for place in places for part in place.parts}, set[Where]()
        if record.of_cluster and all(part.is_on_node for part in parts):
            missing |= nodes - {Place(part.node, "node") for part in parts}
        elif {part.kind for part in parts} == {"gpu"} and any(isinstance(place, Pair) for place in places):
            missing |= {Pair(*two) for two in combinations(sorted(gpus), 2)}
            missing -= {Pair(*sorted(place.parts)) for place in places}
        elif {part.kind for part in parts} == {"gpu"}:
            missing |= gpus - places
        if places and missing:
            found.append((levels.case_name(check), metric, some(list(map(str, sorted(missing))), MOST_CASES)))
    return found


def _gaps(record: Record, broken: str) -> list[str]:
    not_run = "not run because of the deadline" if broken == DEADLINE else "not run"
    suite = record.suite
    own = {levels.check_name(check.id): check.title for check in record.checks.values()}
    required = set(record.required)
    gaps = []
    for name, (deselected, absent) in left_out(record).items():
        missing, all_cases = deselected + absent, len(suite.cases(name))
        if len(missing) == all_cases:
            what = "deselected" if deselected else not_run
        elif deselected:
            what = f"deselected in part, without {named(missing)}"
        else:
            what = f"only {all_cases - len(missing)} of its {all_cases} cases ran, without {named(missing)}"
        gaps.append(f"{titled(name)}: {what}")
    for name, metrics in without_figures(record).items():
        for metric, cases in metrics.items():
            which = f" in {named(cases)}" if len(suite.cases(name)) > 1 else ""
            gaps.append(f"{titled(name)}: passed and left no figure of {metric}{which}")
    gaps += [f"{titled(case)}: no figure of {metric} at {places}" for case, metric, places in missing_places(record)]
    skipped = Counter(
        (levels.check_name(check.id), check.message) for check in record.checks.values() if check.outcome == "skipped"
    )
    for (name, message), count in skipped.items():
        if name in required:
            gaps.append(f"{titled(name)}: {f'{count} cases skipped' if count > 1 else 'skipped'}: {message}")
    unjudged = [each for each in record.findings if each.state == "not judged"]
    without = [(each, "was", "were", f"not judged: {each.reason}") for each in unjudged]
    without += [(each, "is", "are", why) for each, why in basis.too_low(record.findings, record.run.basis)]
    alike = Counter((levels.check_name(each.check), *words) for each, *words in without)
    for (name, one, several, why), count in alike.items():
        what = f"1 figure {one}" if count == 1 else f"{count} figures {several}"
        gaps.append(f"{titled(name, own.get(name, ''))}: {what} {why}")
    gaps += [f"{name}: {ALTERED}" for name in record.altered]
    gaps += [f"{gpu}: {missing}" for gpu, missing in without_telemetry(record)]
    gaps += [f"{NOT_APPLIED}: {limit}" for limit in unused_limits(record, "contract")]
    return [*gaps, *filter(None, [own_limits(record), short_burn_in(record)])]


def _unfinished(record: Record) -> list[str]:
    """Checks that began and did not end, with how far they came if they told."""
    lines = []
    for check in record.started:
        if check not in record.checks:
            done, whole = record.progress.get(check, (0, 0))
            came_to = f": it came to {done:.0f} s of {whole:.0f} s without a fault" if whole else ""
            lines.append(f"{titled(check)}: did not finish{came_to}")
    return lines

"""The begin of a run that was asked for, where all is checked that can be, and its end, where it gets its verdict."""

import os
import platform
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn, cast

import msgspec

from pytest_gpufleet import __version__, safe_files
from pytest_gpufleet.machine import kernel_log
from pytest_gpufleet.machine.host import own_name
from pytest_gpufleet.machine.software import of_this_process, relevant
from pytest_gpufleet.machine.tools import RunTool, Unreadable, output
from pytest_gpufleet.model import codec, events
from pytest_gpufleet.model.codec import Moment
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.events import MachineRead, RunHeader, TopologyFound, Verdict
from pytest_gpufleet.model.finding import Grade
from pytest_gpufleet.model.language import some
from pytest_gpufleet.model.levels import Level
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import CONFTEST, PACKAGED, code, shipped
from pytest_gpufleet.redaction import aliased, command
from pytest_gpufleet.run import integrity, resume, summary
from pytest_gpufleet.run.folder import SUMMARY, Evidence, RunFolder, prune
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.run.settings import SHORTEST_DEADLINE_SECONDS, naming
from pytest_gpufleet.safe_files import STREAMS, open_regular, sha256
from pytest_gpufleet.verdict import requirements
from pytest_gpufleet.verdict.basis import as_given
from pytest_gpufleet.verdict.fleet.fleet_verdict import judged
from pytest_gpufleet.verdict.gaps import DEADLINE
from pytest_gpufleet.verdict.verdict import CUT_SHORT, ENDED_BY, EXIT_STATUS

PACKAGE = Path(__file__).parents[1]
# Who says so in events.STARTED_BY, and the variable of make in which arguments are typed.
CALLERS = {"gpufleet accept": "", "make accept": "ARGS"}
OF_A_PACKAGE = "--pyargs"
# The photographs that the suite has decoded take 23 MB; evidence and report of six hours on 8 GPUs 64 MB (327 to 409
# bytes a GPU and second on the recorded machines, and 2 MB).
ROOM_BYTES = 64 << 20
TEXTFILE = b"# HELP gpufleet_"  # how a textfile of ours begins


def of_checkout(package: Path = PACKAGE, run: RunTool = output) -> str:
    """The commit of the checkout that `package` stands in, with "-dirty" where tracked files differ from it; "" if it
    stands in none, or git is not there to tell, or does not trust who owns the repository."""
    root = package.parents[1]
    git = root / ".git"  # of whoever has the package: its settings name programs that git runs
    there = root / "src" / package.name == package and git.exists() and (root / "acceptance").exists()
    with suppress(Unreadable):
        if there and git.lstat().st_uid == package.lstat().st_uid:
            own = ("env", "-u", "GIT_DIR", "-u", "GIT_WORK_TREE", "-u", "GIT_INDEX_FILE")  # as hooks of another one set
            describe = ("describe", "--always", "--exclude=*", "--abbrev=64", "--dirty")
            return run(*own, "git", "-C", str(root), *describe, seconds=5).strip()
    return ""


def command_line(arguments: Sequence[str]) -> events.CommandLine:
    """`arguments`: pytest's. Values that promise a secret are hidden."""
    caller = os.environ.get(events.STARTED_BY, "")
    if caller in CALLERS:
        first = 2 if OF_A_PACKAGE in arguments[:1] else 1  # after the suite
        return events.CommandLine(caller, command(arguments[first:]), variable=CALLERS[caller])
    if OF_A_PACKAGE in arguments:
        return events.CommandLine("pytest", command(arguments), f"{OF_A_PACKAGE} {PACKAGED}")
    paths = (Path(argument.partition("::")[0]) for argument in arguments)
    suites = (f for path in paths for f in (path, *path.parents) if f.name == "acceptance" and (f / CONFTEST).is_file())
    named = next((command([f"{folder}/"]) for folder in suites), "acceptance/")  # as these arguments name it
    return events.CommandLine("pytest", command(arguments), named)


def check_room(folder: Path) -> None:
    """Refused if there is no room for temporary files, without which checks would fail that say nothing of a GPU, or in
    a folder, which need not be there yet, for evidence and report."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    for what, option, where in (("temporary files", "TMPDIR", ""), ("evidence and report", "--fleet-dir", str(there))):
        try:
            with tempfile.TemporaryFile(dir=where or tempfile.gettempdir()) as file:
                os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)
        except OSError as error:
            raise Refused(
                f"{what} cannot be written to {where or os.environ.get('TMPDIR', '/tmp')}: {error.strerror}; make "
                f"{ROOM_BYTES >> 20} MiB free there, or name another folder by {option}"
            ) from None


def check_deadline(run: Run) -> None:
    """Refused if the burn-in would not be over by then."""
    seconds, deadline, least = run.burn_in_seconds, run.options.deadline, SHORTEST_DEADLINE_SECONDS
    if run.options.level == "burnin" and deadline is not None and seconds + least > deadline:
        raise Refused(
            f"a burn-in of {seconds:g} s (--fleet-burn-in, --fleet-corruption-bound) does not fit into "
            f"--fleet-deadline {deadline:g}s, of which {least:g} s are for start and report"
        )


def check_copy(option: str, path: Path, make_folder: bool = True) -> None:
    """Refused if what an option asks for could not be put in its place when the run is over."""
    try:
        problem = "it is a folder" if path.is_dir() else ""
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent not in STREAMS:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        problem = str(error.strerror)
    if problem:
        raise Refused(f"{option} {path} cannot be written: {problem}")


def check_textfile(path: Path) -> None:
    """Refused if Prometheus' textfile could not be written, or would replace something else."""
    if os.path.lexists(path) and not path.is_dir():
        begin = b"-"
        with suppress(OSError), open_regular(path) as file:
            begin = file.read(len(TEXTFILE))
        if begin not in (TEXTFILE, b""):
            why = "it is there and is no textfile of an earlier run; give another name, or remove it"
            raise Refused(f"--fleet-prometheus {path} cannot be written: {why}")
    check_copy("--fleet-prometheus", path, make_folder=False)


def open_run(run: Run, arguments: Sequence[str]) -> None:
    """Give `run` a folder and evidence. Refused before anything expensive starts. `arguments`: pytest's."""
    check_room(run.options.folder)
    if run.options.prometheus:
        check_textfile(run.options.prometheus)
    before = integrity.check(RunFolder(back), nodes=False).record if (back := run.options.returns) else None
    if before:
        run.options = replace(run.options, level=before.run.level, burn_in=before.run.burn_in_seconds or None)
    check_deadline(run)
    order = events.OrderGiven(order=run.order) if run.order else None
    limits, required = None, None
    if run.options.requirements:
        with naming("--fleet-requirements"):
            required = events.RequirementsGiven(requirements=requirements.load(run.options.requirements))
    if run.profile and run.options.profile:
        limits = events.ProfileGiven(profile=as_given(run.profile, (gpu.name for gpu in run.target.topology.gpus)))
    run.ranks.environment = of_this_process()
    if run.options.nodes is None:  # else each node's own run does it
        run.lock()
    header, topology, machine = first = _first_events(run, arguments)
    returned = resume.returned(back, run.options.replaced, before, Record.of(*first)) if back and before else None
    carried: list[events.Event] = []
    if run.options.resume is not None:
        earlier = RunFolder(run.options.resume)
        then = resume.load(earlier)
        resume.check_same(earlier, then, Record.of(*first, *filter(None, [returned])))
        run.earlier = resume.whole_nodes(earlier, then)
        header = msgspec.structs.replace(header, resumed=resume.history(earlier, then))
        carried = resume.carried(earlier, then)
    noticed: list[events.Event] = []
    if run.options.nodes is None:
        own = run.own_machine.machine  # what its kernel log has from before the run is shown
        noticed = [events.Noticed(fault=fault) for fault in kernel_log.judged(own.logged.host, own.gpus, "before")[1]]
    folder = RunFolder.make(run.options.folder, f"{header.host}-{run.started:%Y%m%dT%H%M%SZ}")
    run.folder, run.evidence = folder, Evidence(folder.evidence)
    given: list[events.Event | None] = [header, topology, limits, order, required, machine, returned]
    for event in (*filter(None, given), *noticed, events.SuiteSeen(manifest=shipped()), *carried):
        run.record(event)
        if isinstance(event, events.HostFactRead):
            run.host_before.setdefault(event.fact, event.value)
    run.carried = set(map(shipped().known_as, run.evidence.record.checks))
    _never_end_with_0(run)


def _never_end_with_0(run: Run) -> None:
    """os._exit(0) would look like an acceptance. A forked child ends as it likes; what is no Python goes past it."""
    end, controller = os._exit, os.getpid()

    def end_now(status: int) -> NoReturn:
        if status & 0xFF == 0 and os.getpid() == controller:
            status = run.exit_status or INCOMPLETE
            run.tell(f"os._exit(0) was called: the run ends here, with exit status {status}")
        end(status)

    os._exit = end_now
    run.last_things.callback(setattr, os, "_exit", end)


def _first_events(run: Run, arguments: Sequence[str]) -> tuple[RunHeader, TopologyFound, MachineRead]:
    """What evidence says first, with aliases if these are wanted: what one of them names has its alias in all."""
    options, target, profile, order = run.options, run.target, run.profile, run.order
    nodes, machines, topologies = map(list, zip(*target.node_facts, strict=True))
    started_by = command_line(arguments)
    header = RunHeader(
        host=own_name(), nodes=tuple(nodes), utc=Moment(run.started.isoformat(timespec="seconds")),
        command=started_by.typed(), command_line=started_by,
        level=cast(Level, options.level), burn_in_seconds=run.burn_in_seconds if options.level == "burnin" else 0,
        deadline_seconds=options.deadline or 0, basis=cast(Grade, options.basis),
        network=options.network, without=options.without, used=options.used,
        gpus=str(options.gpus), gpus_present=target.gpus_present, ranks=target.size,
        rehearsal=bool(target.rehearsal_ranks), rehearsal_because=target.why if target.rehearsal_ranks else "",
        profile=profile.name if profile else None, profile_sha256=sha256(profile.path) if profile else None,
        order=order.file if order else None, order_sha256=order.sha256 if order else None,
        environment=relevant(), python=platform.python_version(), pytest=version("pytest"), plugin=__version__,
        commit=of_checkout(), code=code(), notes=dict(options.notes), language=options.language,
    )  # fmt: skip
    first = run.cluster_header(header), TopologyFound(nodes=topologies), MachineRead(nodes=machines)
    if options.nodes is not None and not options.alias:
        return first  # what nodes have sent is as evidence has it, and in memory once
    return codec.typed(aliased(codec.plain(first)), tuple[RunHeader, TopologyFound, MachineRead])


INCOMPLETE = EXIT_STATUS["INCOMPLETE"]
TESTS_FAILED, INTERRUPTED, NOTHING_COLLECTED = 1, 2, 5  # as pytest.ExitCode has them


def conclude(run: Run, status: int) -> int:
    """Record the verdict, if that was not done; its exit status. `status`: pytest's; if cut short, it stays."""
    evidence = run.written
    if evidence.record.verdict is None:
        status = _end(run, evidence, status)
    else:
        evidence.seal()
        status = evidence.record.exit_status or 0
    return status or (INCOMPLETE if run.unwritten else 0)


def summarize(run: Run) -> None:
    """Write the summary, the last file: it has the SHA-256 of the others. Then remove what --fleet-keep does not."""
    record, digest, page = run.written.record, run.written.sha256, run.folder.report
    made = []

    def write(path: Path) -> None:
        report_digest = safe_files.sha256(page) if page.is_file() else ""
        made.append(summary.text(record, digest, report_digest, run.fleet))
        safe_files.write_text(path, made[0])

    run.write(run.folder / SUMMARY, write)
    if run.options.webhook and made and not run.never_began:
        from pytest_gpufleet.run import webhook  # urllib.request takes long to import

        in_haste = run.interruption.heard or run.interruption.overdue
        why = webhook.post(run.options.webhook, made[0], digest, 1 if in_haste else webhook.TRIES)
        said = f"was not posted ({why}); the verdict stays" if why else "was posted"
        run.tell(f"--fleet-webhook: the summary {said}")
    if run.options.keep and not run.never_began:
        run.pruned = prune(run.folder, record.run.host, run.options.keep)


def _end(run: Run, evidence: Evidence, status: int) -> int:
    if status == NOTHING_COLLECTED and (run.carried or run.of_nodes):
        status = 0
    run.note_lost_samples()
    if status == TESTS_FAILED and not any(check.outcome == "failed" for check in evidence.record.checks.values()):
        evidence.spoil("pytest counts a failure of which there is no check")
    evidence.compare()
    broken = _cut_short(run, status)
    runs = run.runs_of_nodes() or run.folder.own_runs(evidence.record)
    ended, run.fleet = judged(evidence.record, broken, runs)
    if status not in CUT_SHORT or broken == DEADLINE:
        status = ended.exit_status or status  # never 0 where pytest's own is not
    lasted = round(time.monotonic() - run.began, 1)
    last = Verdict(verdict=ended.word, reasons=tuple(ended.reasons), broken=broken, exit_status=status, lasted=lasted)
    run.record(last)
    if late := evidence.seal():
        # The file says what was the verdict before; all else tells this one.
        spoiled = replace(evidence.record, spoiled=[*evidence.record.spoiled, late])
        ended, run.fleet = judged(spoiled, broken, runs)
        status = status or ended.exit_status or 0
        evidence.record = replace(ended, exit_status=status)
    return status


def _cut_short(run: Run, status: int) -> str:
    """Why the session did not end; pytest has one exit status for all signals and for a file that is not imported."""
    if run.not_imported and not run.interruption.heard:
        return f"a test file could not be imported, so its checks are missing: {some(run.not_imported, 3)}"
    if status == INTERRUPTED and run.interruption.overdue:
        return DEADLINE
    if status == INTERRUPTED and run.interruption.deadly:
        return ENDED_BY[run.interruption.deadly.name]
    return CUT_SHORT.get(status) or run.exited

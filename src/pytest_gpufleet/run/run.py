"""One fleet run inside a pytest session: hardware, world, judgement and evidence, each made at its first use."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import pytest

from pytest_gpufleet import safe_files
from pytest_gpufleet.model import levels
from pytest_gpufleet.plugin.options import Options
from pytest_gpufleet.run import early_exit, files
from pytest_gpufleet.run.interruption import Interruption

# Everything below imports at its first use: this module is loaded in every pytest run.
if TYPE_CHECKING:
    from pytest_gpufleet.hardware.telemetry import Sample, Sampler
    from pytest_gpufleet.model.finding import Finding
    from pytest_gpufleet.model.machine import Machine
    from pytest_gpufleet.model.measurement import Measurement
    from pytest_gpufleet.report.terminal.live_table import Live
    from pytest_gpufleet.run.devices import Ground
    from pytest_gpufleet.run.evidence import Evidence
    from pytest_gpufleet.run.health_watch import Guard
    from pytest_gpufleet.verdict.profiles.profile import Profile
    from pytest_gpufleet.world.pool import Pool
    from pytest_gpufleet.world.world import World


UNSEEN_FAILURE = "pytest counts a failure of which there is no check"
MOST_FILES = 3
REHEARSED_BURN_IN_SECONDS = 10.0


class Fleet:
    """Holds what tests of one session share. Nothing here touches a GPU before a test does."""

    def __init__(self, options: Options, arguments: tuple[str, ...]) -> None:
        self.options = options
        self._arguments = arguments
        self.evidence: Evidence | None = None  # this and the folder only in a run that was asked for
        self.folder = options.folder
        self.carried: set[str] = set()  # checks that an earlier run has done, by the names by which they are known
        self.test_deadline: float | None = None  # monotonic time, where pytest-timeout sets one
        self.foreign_test = ""  # the running test, if it is none of the suite
        self._environment: dict[str, str] = {}  # what of it steers drivers and libraries, when the run began
        self._locks: ExitStack | None = None
        self._open = ExitStack()
        self._after = ExitStack()  # what is undone when all else is closed
        self.sampler: Sampler | None = None
        self._terminal: TextIO = sys.stdout
        self._live: Live | None = None  # the table of all GPUs on the terminal
        self._latest_sample: Sample | None = None
        self._telemetry_lost = False
        self.not_imported: list[str] = []  # test files of which nothing could be collected
        self.interruption = Interruption(self._tell_interruption)
        self.exited = ""  # by pytest.exit(), and why
        self.exit_status: int | None = None  # that of the verdict
        self.no_report = False  # there is no room for it
        self.unwritten: list[str] = []  # files that could not be written in the end, and why

    @cached_property
    def ground(self) -> Ground:
        from pytest_gpufleet.run import devices

        return devices.find(self.options, self._open)

    @cached_property
    def machine(self) -> Machine:
        """Everything about the GPUs of this run and their host."""
        from pytest_gpufleet.hardware import host
        from pytest_gpufleet.model import machine

        source, topology = self.ground.source, self.ground.topology
        if source is None:
            return machine.Machine((), host.read())
        return machine.take(source, tuple(gpu.index for gpu in topology.gpus))

    @cached_property
    def gpus_present(self) -> int:
        """How many GPUs the machine has, with those that are left out of this run; 0 in a rehearsal."""
        from pytest_gpufleet.hardware import facts

        return facts.gpus_present() if self.ground.source is not None else 0

    def watch(self, terminal: TextIO) -> None:
        """Heed signals from here on. With GPUs, start telemetry, and with --fleet-monitor show it on the terminal."""
        from pytest_gpufleet.hardware.telemetry import Activity, Sampler
        from pytest_gpufleet.report.terminal.live_table import Live, RunningCheck

        self._terminal = terminal = self._uncaptured(terminal)
        self._after.enter_context(self.interruption.heed())
        self.tell_prometheus()
        devices, guard = self.ground, self.guard
        if devices.source is None or guard is None:
            return
        activity = self._activity = Activity()
        # A burn-in is long: whoever waits for it sees how far it is, and how hot.
        if self.options.monitor or self.options.level == "burnin":
            self._live = self._open.enter_context(Live(devices.topology, terminal, RunningCheck(self.options.folder)))

        def take_in(sample: Sample) -> None:
            self._note_lost_telemetry()
            self.record_event("telemetry", sample=sample.to_json())
            guard.note(sample)
            activity.add(sample)
            self._latest_sample = sample
            if self._live is not None:
                self._live.show(sample)

        self.sampler = Sampler(devices.source, self.options.interval, take_in)
        self._open.callback(self.sampler.stop)
        self.sampler.start()

    def _uncaptured(self, terminal: TextIO) -> TextIO:
        """The same terminal by a file descriptor of its own, since pytest redirects its own while tests run."""
        try:
            descriptor = os.dup(terminal.fileno())
        except (OSError, ValueError):
            return terminal
        encoding = getattr(terminal, "encoding", None) or "utf-8"
        return self._open.enter_context(os.fdopen(descriptor, "w", encoding=encoding, errors="replace"))

    def _tell_interruption(self, what: str) -> None:
        self._tell(f"{what}: writing the report to {self.folder}, a few seconds ...")

    def _tell(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the terminal is closed, or no file
            # Past the buffers of the stream, in the middle of which a signal may come.
            os.write(self._terminal.fileno(), f"\n{text}\n".encode(errors="replace"))

    def activity(self) -> dict[str, Any]:
        """What the GPUs did during a check that ends now: minimum, mean and maximum of every reading of telemetry."""
        return {"telemetry": self._activity.end()} if self.sampler is not None else {}

    def begin_check_of_the_suite(self) -> None:
        """No test before it, and no import of its file, has changed what its ranks find in their environment."""
        from pytest_gpufleet.hardware.environment import put_back

        self.foreign_test = ""
        put_back(self._environment)

    def read_now(self, fact: str) -> list[Any]:
        """A fact of every GPU at this moment."""
        from pytest_gpufleet.hardware import facts

        facts.check_name(fact)
        source = self.ground.source
        return [values[fact] for values in facts.read_all(source, {fact: None})] if source else []

    @cached_property
    def guard(self) -> Guard | None:
        """Watches the health of the GPUs from its first use on; None without GPUs."""
        from pytest_gpufleet.hardware.kernel_log import KernelLog
        from pytest_gpufleet.run.health_watch import Guard

        if self.ground.source is None:
            return None
        log = KernelLog()
        log.new()  # what is there already is for the health checks to judge
        return Guard(self.ground.source, self.machine, log)

    @cached_property
    def profile(self) -> Profile | None:
        """The profile for this run's GPUs, None if there is none. UsageError if a given one is bad or does not fit."""
        from pytest_gpufleet.verdict.profiles import profile

        try:
            return profile.choose(self.options.profile, (gpu.name for gpu in self.ground.topology.gpus))
        except profile.ProfileError as error:
            raise pytest.UsageError(f"--fleet-profile: {error}") from None

    def check_health(self, check: str) -> list[str]:
        """What got worse on any GPU since the last time; it is on record as having happened in this check."""
        if self.evidence is None or self.guard is None:
            return []
        if problems := self.guard.check():
            self.record_event("health", check=check, problems=problems)
        if self.guard.unread:
            self.evidence.spoil(f"an XID may have gone unseen: {self.guard.unread}")
        return problems

    @property
    def burn_in_seconds(self) -> float:
        if self.options.burn_in:
            return self.options.burn_in
        return REHEARSED_BURN_IN_SECONDS if self.ground.rehearsal_ranks else levels.BURN_IN_SECONDS

    def burn_in(self, check: str, world: World) -> list[Measurement]:
        """Keep `world` under full load for the time that was asked for. Raises at the first fault."""
        from pytest_gpufleet.probes import burn_in
        from pytest_gpufleet.report.terminal import progress_lines
        from pytest_gpufleet.run.health_watch import HealthWorsened

        seconds = self.burn_in_seconds
        tell = progress_lines.lines(self._terminal, seconds, lambda: self._live is not None and self._live.drawn)

        def after_turn(doing: str, done: float, resident: list[int]) -> None:
            self.record_event("progress", check=check, done=round(done), of=seconds, doing=doing, resident=resident)
            tell(done, self._latest_sample)
            if problems := self.check_health(check):
                raise HealthWorsened("\n".join(problems))

        measurements = burn_in.burn_in(world, seconds, after_turn)
        if self.sampler is not None:
            measurements.append(burn_in.peak_power(world, self._activity.highest("power_watts")))
        return measurements

    def judged(self, check: str, measurements: Iterable[Measurement], required: bool) -> list[Finding]:
        """Measurements of a check, held against this run's limits, and what is unsteady among them."""
        from pytest_gpufleet.verdict.judgement import judge, unsteady

        profile, topology, rehearsal = self.profile, self.ground.topology, bool(self.ground.rehearsal_ranks)
        findings = [
            judge(each, profile, topology, check, rehearsal=rehearsal, required=required) for each in measurements
        ]
        return findings + [finding for each in findings if (finding := unsteady(each))]

    @cached_property
    def pool(self) -> Pool:
        from pytest_gpufleet.redaction import throughout
        from pytest_gpufleet.world.engines.local import LocalEngine
        from pytest_gpufleet.world.pool import Pool
        from pytest_gpufleet.world.rank import RankSpec

        devices = self.ground
        size = devices.rehearsal_ranks or len(devices.topology.gpus)
        if not size:
            pytest.fail(f"there is no GPU to run on: {devices.why}", pytrace=False)
        self._lock()
        threads = max(1, (os.cpu_count() or 1) // size) if devices.rehearsal_ranks else None
        specs = [
            RankSpec(
                index=index,
                size=size,
                device="cpu" if devices.rehearsal_ranks else f"cuda:{index}",
                gpu=None if devices.rehearsal_ranks else devices.topology.gpus[index],
                scratch=Path(),
                environment={},
                cpu_threads=threads,
            )
            for index in range(size)
        ]
        return Pool(
            LocalEngine(),
            specs,
            self.options.timeout,
            test_deadline=lambda: self.test_deadline,
            foreign_test=lambda: self.foreign_test,
            on_event=lambda name, **content: self.record_event(name, **throughout(content)),
        )

    def world(self, with_group: bool) -> World:
        from pytest_gpufleet.world.world import World

        return World(self.pool, with_group)

    @property
    def pool_in_use(self) -> Pool | None:
        """The pool if a test has used it, else None."""
        return self.__dict__.get("pool")

    def open(self) -> None:
        """Check everything that can be checked and start the evidence. UsageError before anything expensive starts."""
        from pytest_gpufleet.hardware.environment import of_this_process, relevant
        from pytest_gpufleet.model import machine
        from pytest_gpufleet.model.record import SCHEMA
        from pytest_gpufleet.model.suite import shipped
        from pytest_gpufleet.redaction import command
        from pytest_gpufleet.run.evidence import Evidence
        from pytest_gpufleet.verdict.given_limits import as_given

        files.check_temporary()
        files.check_textfile(self.options.prometheus)
        profile, devices, host = self.profile, self.ground, socket.gethostname()
        started, self._environment = datetime.now(timezone.utc), of_this_process()
        run = {
            "schema": SCHEMA,
            "host": host,
            "utc": started.isoformat(timespec="seconds"),
            "command": command(["pytest", *self._arguments]),
            "level": self.options.level,
            "burn_in_seconds": self.burn_in_seconds if self.options.level == "burnin" else 0,
            "gpus": str(self.options.gpus),
            "gpus_present": self.gpus_present,
            "rehearsal": bool(devices.rehearsal_ranks),
            "rehearsal_because": devices.why if devices.rehearsal_ranks else "",
            "ranks": devices.rehearsal_ranks or len(devices.topology.gpus),
            "profile": profile.name if profile else None,
            "profile_sha256": hashlib.sha256(profile.path.read_bytes()).hexdigest() if profile else None,
            "environment": relevant(),
            "python": platform.python_version(),
            "pytest": pytest.__version__,
            "plugin": version("pytest-gpufleet"),
        }
        run["resumed"], carried = self._resumed(run)
        self._lock()
        self.folder = files.new_folder(self.options.folder, f"{host}-{started:%Y%m%dT%H%M%SZ}")
        self.evidence = Evidence(self.folder / "evidence.jsonl")
        self.record_event("run", **run)
        self.record_event("topology", topology=asdict(devices.topology))
        if profile and self.options.profile:
            given = as_given(profile, (gpu.name for gpu in devices.topology.gpus))
            self.record_event("profile", profile=asdict(given))
        self.record_event("machine", machine=machine.to_json(self.machine))
        self.record_event("suite", manifest=shipped().to_json())
        for name, content in carried:
            self.record_event(name, **content)
        self.carried = set(map(shipped().known_as, self.evidence.record.checks))

        self._after.enter_context(early_exit.noticed(self._exited_early))

    def _exited_early(self) -> int:
        """The exit status of a process that ends before the run does."""
        from pytest_gpufleet.verdict.verdict import EXIT_STATUS

        status = self.exit_status or EXIT_STATUS["INCOMPLETE"]
        self._tell(f"os._exit(0) was called: the run ends here, with exit status {status}")
        return status

    def final_status(self, status: int) -> int:
        """The exit status of this process, whatever others have made of the verdict's."""
        if status or self.evidence is None:
            return status
        from pytest_gpufleet.verdict.verdict import EXIT_STATUS

        return EXIT_STATUS["INCOMPLETE"] if self.exit_status is None else self.exit_status

    def _resumed(self, run: dict[str, Any]) -> tuple[list[dict[str, Any]], list[tuple[str, dict[str, Any]]]]:
        """The runs that this one goes on with, and the events that it takes over from them."""
        folder = self.options.resume
        if folder is None:
            return [], []
        from pytest_gpufleet.run import resume

        then = resume.load(folder)
        resume.check_same(folder, then, run, self.ground.topology)
        return resume.history(folder, then), resume.events(folder, then)

    def _lock(self) -> None:
        """Make the GPUs of this run its own, until this process is gone."""
        from pytest_gpufleet.hardware import gpu_lock

        if self._locks is None:
            try:
                self._locks = gpu_lock.lock(() if self.ground.rehearsal_ranks else self.ground.topology.gpus)
            except gpu_lock.GpuTaken as taken:
                raise pytest.UsageError(str(taken)) from None

    def record_event(self, name: str, **content: Any) -> None:
        if self.evidence is not None:
            with self.interruption.deferred():  # half of a line would be taken for damage
                self.evidence.add(name, **content)

    def headline(self) -> str:
        """One line on what this run stands on."""
        devices = self.ground
        if devices.rehearsal_ranks:
            return f"REHEARSAL on {devices.rehearsal_ranks} CPU ranks, no GPU is tested ({devices.why})"
        if not devices.topology.gpus:
            return f"no GPU: {devices.why}"
        models, count = {gpu.name for gpu in devices.topology.gpus}, len(devices.topology.gpus)
        part = f" of the machine's {self.gpus_present} GPUs" if self.gpus_present > count else ""
        return f"{count}x {' / '.join(sorted(models))}{part}, level {self.options.level}"

    def conclude(self, exitstatus: int) -> int:
        """Record the verdict; the exit status that goes with it. A run that pytest cut short keeps pytest's own."""
        from pytest_gpufleet.run import summary
        from pytest_gpufleet.verdict.contradictions import contradictions
        from pytest_gpufleet.verdict.verdict import CUT_SHORT, EXIT_STATUS, settled

        assert self.evidence is not None
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.carried:
            exitstatus = 0
        evidence = self.evidence
        self._note_lost_telemetry()
        failed = any(check.outcome == "failed" for check in evidence.record.checks.values())
        if exitstatus == pytest.ExitCode.TESTS_FAILED and not failed:
            evidence.spoil(UNSEEN_FAILURE)
        if found := contradictions(evidence.record):
            evidence.spoil(f"the evidence contradicts itself: {found[0]}")
        evidence.compare()
        broken = self._not_imported() or self._cut_short(exitstatus) or evidence.trouble
        ended = settled(evidence.record, broken)
        if exitstatus not in CUT_SHORT:
            exitstatus = ended.exit_status or exitstatus  # never 0 where pytest's own is not
        self.record_event(
            "verdict", verdict=ended.verdict, reasons=ended.reasons, broken=broken, exit_status=exitstatus
        )
        if late := evidence.seal():
            # The file says what was the verdict before; all else tells this one.
            ended = settled(replace(evidence.record, spoiled=[*evidence.record.spoiled, late]), broken)
            exitstatus = exitstatus or ended.exit_status or 0
            evidence.record = replace(ended, exit_status=exitstatus)
        document = summary.text(evidence.record, evidence.sha256)
        self.write(self.folder / summary.FILE, lambda path: safe_files.write_text(path, document))
        incomplete = EXIT_STATUS["INCOMPLETE"]
        exitstatus = exitstatus or (incomplete if evidence.trouble or self.unwritten else 0)
        self.tell_prometheus(exitstatus)
        return exitstatus or (incomplete if self.unwritten else 0)

    def tell_prometheus(self, exitstatus: int | None = None) -> None:
        """Replace Prometheus' textfile, if one was asked for. No exit status: the run goes on."""
        if self.options.prometheus is not None and self.evidence is not None:
            from pytest_gpufleet.report import prometheus

            record = replace(self.evidence.record, exit_status=exitstatus)
            self.write(self.options.prometheus, lambda path: prometheus.write(path, record))

    def write(self, path: Path, write: Callable[[Path], None]) -> None:
        """Write one of the files that a run leaves. If that fails, it is told, and the others are written all the
        same."""
        try:
            write(path)
        except OSError as error:
            self.unwritten.append(f"{path} could not be written: {error.strerror}")

    def _note_lost_telemetry(self) -> None:
        """Nobody sees a GPU slow down between two tests without it."""
        lost = self.sampler.trouble if self.sampler is not None else ""
        if lost and self.evidence is not None and not self._telemetry_lost:
            self._telemetry_lost = True
            self.evidence.spoil(f"telemetry lost samples: {lost}")

    def _cut_short(self, exitstatus: int) -> str:
        """Why the session did not come to its end, for which pytest has one exit status whatever signal it was."""
        from pytest_gpufleet.verdict.verdict import CUT_SHORT, ENDED_BY

        if exitstatus == pytest.ExitCode.INTERRUPTED and self.interruption.deadly:
            return ENDED_BY[self.interruption.deadly.name]
        return CUT_SHORT.get(exitstatus) or self.exited

    def _not_imported(self) -> str:
        """Which test files could not be imported, for which pytest has the same exit status as for Ctrl-C."""
        if self.interruption.heard or not self.not_imported:
            return ""
        files, more = self.not_imported[:MOST_FILES], len(self.not_imported) - MOST_FILES
        which = ", ".join(files) + (f" and {more} more" if more > 0 else "")
        return f"a test file could not be imported, so its checks are missing: {which}"

    def report_can_be_written(self) -> bool:
        """Whether there is room for the report in the run's folder, which is made again if it is gone."""
        assert self.evidence is not None
        problem = files.no_room(self.folder)
        self.evidence.trouble = problem or self.evidence.trouble
        self.no_report = bool(problem)
        return not problem

    def close(self) -> None:
        with self._after:
            if self.pool_in_use is not None:
                self.pool_in_use.close()
            self._open.close()
            if self._locks is not None:
                self._locks.close()
            if self.evidence is not None:
                self.evidence.close()

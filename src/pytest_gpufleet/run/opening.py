"""The begin of a run that was asked for: what can be checked is checked, and its evidence starts."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from pytest_gpufleet import __version__
from pytest_gpufleet.hardware.software import of_this_process, relevant
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.events import SCHEMA
from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.run import commit, conclusion, disk_space, resume
from pytest_gpufleet.run.evidence import Evidence
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.run.started_by import command_line
from pytest_gpufleet.verdict.given_limits import as_given
from pytest_gpufleet.verdict.host_rules import log_rules

Carried = list[tuple[str, dict[str, Any]]]


def open_run(run: Run, arguments: Sequence[str]) -> None:
    """Give `run` a folder and evidence. Refused before anything expensive starts. `arguments`: pytest's."""
    disk_space.check_temporary()
    disk_space.check_textfile(run.options.prometheus)
    order, profile, ground = run.order, run.profile, run.ground
    _check_room(run)
    run.ranks.environment = of_this_process()
    header = _header(run, arguments)
    header["resumed"], carried = _resumed(run, header)
    if run.options.nodes is None:  # else each node's own run does it
        run.lock()
    standing = ground.standing
    folder = RunFolder.make(run.options.folder, f"{header['host']}-{run.started:%Y%m%dT%H%M%SZ}")
    run.folder, run.evidence = folder, Evidence(folder.evidence)
    run.record_event("run", **header)
    run.record_event("topology", nodes=[codec.plain(node.topology) for node in standing])
    if profile and run.options.profile:
        given = as_given(profile, (gpu.name for gpu in ground.topology.gpus))
        run.record_event("profile", profile=asdict(given))
    if order:
        run.record_event("order", order=codec.plain(order))
    found = [{"taken": node.taken, "host": codec.plain(dict(node.facts))} for node in standing]
    run.record_event("machine", nodes=found)
    if run.options.nodes is None:
        _notice(run)
    run.record_event("suite", manifest=shipped().to_json())
    for name, content in carried:
        run.record_event(name, **content)
        if name == "host_fact":
            run.host_before.setdefault(content["fact"], content["value"])
    run.carried = set(map(shipped().known_as, run.evidence.record.checks))
    _never_end_with_0(run)


def _never_end_with_0(run: Run) -> None:
    """os._exit(0) ends a process at once, whatever is left to do, and would look like an acceptance: not here. A child
    that was forked ends as it likes, and code that is not Python goes past this."""
    end, controller = os._exit, os.getpid()
    os._exit = lambda status: end(status & 0xFF or (conclusion.exited_early(run) if os.getpid() == controller else 0))
    run.last_things.callback(setattr, os, "_exit", end)


def _check_room(run: Run) -> None:
    """Refused if its evidence would fill the disk."""
    options, ground = run.options, run.ground
    burning = run.burn_in_seconds if options.level == "burnin" else 0.0
    wanted = disk_space.needed(len(ground.topology.gpus), ground.nodes, burning, options.interval)
    disk_space.check_evidence(options.folder, wanted)


def _notice(run: Run) -> None:
    """What the kernel log has from before the run and is shown."""
    machine = run.own_machine.machine
    run.notice(log_rules.shown_before(machine.logged.host, machine.gpus))


def _header(run: Run, arguments: Sequence[str]) -> dict[str, Any]:
    """What evidence says of its run first."""
    options, ground, profile, order = run.options, run.ground, run.profile, run.order
    started_by = command_line(arguments)
    return {
        "schema": SCHEMA,
        "host": socket.gethostname(),
        "nodes": codec.plain([node.found for node in ground.standing]),
        "utc": run.started.isoformat(timespec="seconds"),
        "command": started_by.typed,
        "command_line": codec.plain(started_by),
        "level": options.level,
        "burn_in_seconds": run.burn_in_seconds if options.level == "burnin" else 0,
        "deadline_seconds": options.deadline or 0,
        "basis": options.basis,
        "gpus": str(options.gpus),
        "gpus_present": ground.gpus_present,
        "rehearsal": bool(ground.rehearsal_ranks),
        "rehearsal_because": ground.why if ground.rehearsal_ranks else "",
        "ranks": ground.size,
        "profile": profile.name if profile else None,
        "profile_sha256": hashlib.sha256(profile.path.read_bytes()).hexdigest() if profile else None,
        "order": order.file if order else None,
        "order_sha256": order.sha256 if order else None,
        "environment": relevant(),
        "python": platform.python_version(),
        "pytest": version("pytest"),
        "plugin": __version__,
        "commit": commit.of_checkout(),
        "notes": dict(options.notes),
        "language": options.language,
        **run.cluster_header(),
    }


def _resumed(run: Run, header: dict[str, Any]) -> tuple[list[dict[str, Any]], Carried]:
    """The runs that this one goes on with, and the events that it takes over from them."""
    if run.options.resume is None:
        return [], []
    folder = RunFolder(run.options.resume)
    then = resume.load(folder)
    resume.check_same(folder, then, header, run.ground.topology)
    run.take_up(folder, then)
    return resume.history(folder, then), resume.events(folder, then)

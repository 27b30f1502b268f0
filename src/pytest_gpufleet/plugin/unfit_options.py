"""Options of a run that do not go together, or with what started it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from pytest_gpufleet.model.levels import BURN_IN_SECONDS
from pytest_gpufleet.plugin import launchers
from pytest_gpufleet.run.settings import SHORTEST_DEADLINE_SECONDS, Options


def check_launcher(options: Options) -> None:
    """UsageError if others of the same launcher do what this process is about to do."""
    if launcher := launchers.started_by(os.environ, options.nodes is not None):
        raise pytest.UsageError(
            f"{launcher} starts pytest several times, and each would take the same GPUs: start it once a node with "
            "--gpus, or once with --nodes; it starts a process for each GPU itself"
        )


def check_nodes(given: dict[str, Any]) -> None:
    """UsageError for what does not go together. GPUs of many nodes are not chosen by each for itself."""
    if given["nodes"] is None:
        for name, flag in (("address", "--fleet-address"), ("insecure", "--fleet-insecure")):
            if given[name] is not None:
                raise pytest.UsageError(f"{flag} is about many nodes: say how many, --nodes N or --nodes all")
    elif given["rehearse"] and given["nodes"] == "all" and given["address"] is None:
        raise pytest.UsageError("--nodes all is for a Ray cluster; a rehearsal of this machine has --nodes N")
    elif not given["rehearse"] and given["gpus"] in (None, "auto"):
        given["gpus"] = "all"


def check_deadline(options: Options, deadline: float) -> None:
    """UsageError if a run could not do by then what it was asked for."""
    if deadline < SHORTEST_DEADLINE_SECONDS:
        raise pytest.UsageError(
            f"--fleet-deadline {deadline:g}s is too short to start and to write a report: give "
            f"{SHORTEST_DEADLINE_SECONDS:g}s or more"
        )
    usual = BURN_IN_SECONDS if options.level == "burnin" and not options.rehearse else 0
    burning = options.burn_in or usual
    if burning + SHORTEST_DEADLINE_SECONDS > deadline:
        raise pytest.UsageError(
            f"a burn-in of {burning:g} s does not fit into --fleet-deadline {deadline:g}s, of which "
            f"{SHORTEST_DEADLINE_SECONDS:g} s are for start and report"
        )


def check_disk_folder(options: Options) -> None:
    """UsageError if the folder that a drive is to be tested in is none: half an hour later that would be a check that
    does not apply. In a run on many nodes it is just that: not all of them need to have what one has. A site's ini file
    names it for all levels, of which one uses it."""
    from pytest_gpufleet.nodes.suite_process import ONE_OF_MANY

    used = options.disk_folder is not None and options.level == "burnin"
    if not used or options.nodes is not None or ONE_OF_MANY in os.environ:
        return
    if not os.path.isdir(str(options.disk_folder)):  # pathlib's raises for what may not be looked into
        raise pytest.UsageError(f"--fleet-disk-folder: {options.disk_folder} is no folder: make it, or name another")

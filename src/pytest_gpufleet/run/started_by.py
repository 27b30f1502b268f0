"""What was typed to start this run: pytest itself, or what calls pytest for somebody."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pytest_gpufleet.model.command_line import STARTED_BY, CommandLine
from pytest_gpufleet.model.suite import CONFTEST, PACKAGED
from pytest_gpufleet.redaction import command

# Who says so in STARTED_BY, and the variable of make in which arguments are typed.
CALLERS = {"gpufleet accept": "", "make accept": "ARGS"}
OF_A_PACKAGE = "--pyargs"


def command_line(arguments: Sequence[str]) -> CommandLine:
    """`arguments`: pytest's. Values that promise a secret are hidden."""
    caller = os.environ.get(STARTED_BY, "")
    if caller in CALLERS:
        first = 2 if OF_A_PACKAGE in arguments[:1] else 1  # after the suite
        return CommandLine(caller, command(arguments[first:]), variable=CALLERS[caller])
    return CommandLine("pytest", command(arguments), _suite(arguments))


def _suite(arguments: Sequence[str]) -> str:
    """How the whole suite is named where these arguments name it or a part of it."""
    if OF_A_PACKAGE in arguments:
        return f"{OF_A_PACKAGE} {PACKAGED}"
    for argument in arguments:
        path = Path(argument.partition("::")[0])
        for folder in (path, *path.parents):
            if folder.name == "acceptance" and (folder / CONFTEST).is_file():
                return command([f"{folder}/"])
    return "acceptance/"

"""What a subcommand of `gpufleet` is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


class CommandFailed(Exception):
    """What the user has to know, in one sentence."""


@dataclass(frozen=True)
class Command:
    """A subcommand: what its help says, its arguments, and what it does; `run` gives the exit status.

    `details` goes on where `help` ends; `statuses` says what its exit statuses mean beyond those of all commands.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    details: str = ""
    statuses: str = ""

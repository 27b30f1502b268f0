"""Programs of the system that tell what no file does: ipmitool, smartctl, fio and the like."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

# Words of other languages, decimal commas and colours are not for programs.
ENVIRONMENT = {"LC_ALL": "C", "TERM": "dumb"}


class Untold(Exception):
    """Nothing can be told of a part of this machine: the text says why in one sentence, and what would help."""


def output(*command: str, seconds: float = 20, statuses: tuple[int, ...] = (0,)) -> str:
    """What a program writes to its standard output. It is ended after these seconds. Untold if it is not installed, did
    not end in time, or ended with another status."""
    name = command[0]
    try:
        ended = subprocess.run(
            command,
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except FileNotFoundError:
        raise Untold(f"{name} is not installed") from None
    except subprocess.TimeoutExpired:
        raise Untold(f"{name} did not answer within {seconds:g} s") from None
    except OSError as error:
        raise Untold(f"{name} cannot be started: {error.strerror}") from None
    if ended.returncode not in statuses:
        said = (ended.stderr or ended.stdout).decode(errors="replace").strip().splitlines()
        raise Untold(f"{name} failed with status {ended.returncode}{f': {said[-1]}' if said else ''}")
    return ended.stdout.decode(errors="replace")


Run = Callable[..., str]  # as `output`, for what reads a part of the machine by programs

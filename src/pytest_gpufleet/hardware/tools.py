"""Programs of the system that tell what no file does: ipmitool, smartctl, fio and the like."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import suppress

# Words of other languages, decimal commas and colours are not for programs.
ENVIRONMENT = {"LC_ALL": "C", "TERM": "dumb"}
# For a program that is to end: dcgmi waits 25 s until its host engine has ended a diagnostic (dcgmi/Diag.cpp).
LAST_SECONDS = 30
# For one that was killed: the kernel keeps it as long as it waits for a broken device, which may be for ever.
KILLED_SECONDS = 1.0


class Untold(Exception):
    """Nothing can be told of a part of this machine: the text says why in one sentence, and what would help."""


class NoAnswer(Untold):
    """A program did not come to its end in time: what it asked hangs, or nobody knows whether it does."""


def output(*command: str, seconds: float = 20, statuses: tuple[int, ...] = (0,)) -> str:
    """What a program writes to its standard output. It is ended after these seconds. Untold if it is not installed, did
    not end in time (NoAnswer), or ended with another status."""
    status, out, errors = ended(*command, seconds=seconds)
    if status not in statuses:
        said = (errors or out).strip().splitlines()
        raise Untold(f"{command[0]} failed with status {status}{f': {said[-1]}' if said else ''}")
    return out


def ended(*command: str, seconds: float = 20) -> tuple[int, str, str]:
    """The exit status of a program, and what it writes to its standard output and to that of errors. After these
    seconds, and whatever else ends the waiting, it is asked to end and then killed: what it has begun elsewhere can be
    taken back by itself alone. Untold if it is not installed, NoAnswer if it did not end in time."""
    name = command[0]
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except FileNotFoundError:
        raise Untold(f"{name} is not installed") from None
    except OSError as error:
        raise Untold(f"{name} cannot be started: {error.strerror}") from None
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{name} did not answer within {seconds:g} s") from None
    finally:
        _end(process)
    return process.returncode, out.decode(errors="replace"), errors.decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its own children may still hold the other ends of its pipes, which are not waited for."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(LAST_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_SECONDS)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


Run = Callable[..., str]  # as `output`, for what reads a part of the machine by programs
Ended = Callable[..., tuple[int, str, str]]  # as `ended`

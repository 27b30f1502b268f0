"""One at a time on a host: a lock on the driver's control device, held until the process that took it is gone.

Whoever has GPUs of a host opens that device, so it is what runs on one host share, as the GPUs' own device files are
(gpu_lock.py). Containers share it where their runtime mounts the host's (libnvidia-container does).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager

from pytest_gpufleet.hardware import gpu_lock
from pytest_gpufleet.hardware.nvml import in_thread

CONTROL = "nvidiactl"


@contextmanager
def taken(wait: Callable[[str], None], most_seconds: float) -> Iterator[str]:
    """Have the host to oneself among all that take turns there. If somebody else has it, `wait` is told who, once.

    Gives "", or who has it still after so many seconds: anybody who may open the device can keep it for ever. Where
    there is no such device, as in WSL 2, nobody takes turns.
    """
    try:
        descriptor = os.open(gpu_lock.DEVICES / CONTROL, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # what that means for the machine is for the checks to find
        yield ""
        return
    try:
        yield _after_others(descriptor, wait, most_seconds)
    finally:
        os.close(descriptor)


def _after_others(descriptor: int, wait: Callable[[str], None], most_seconds: float) -> str:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        wait(gpu_lock.holder(descriptor))
        # Not by asking again and again: whoever has many turns would begin the next between two questions.
        got = in_thread(_lock, os.dup(descriptor))
        try:
            got.result(most_seconds)
        except FutureTimeout:
            return gpu_lock.holder(descriptor)
    return ""


def _lock(descriptor: int) -> None:
    """Wait for the lock and close the descriptor, after which it is held as long as others of the same file are open:
    not at all, where nobody waits any more."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)

"""One at a time on a host: a lock on the driver's control device, held until the process that took it is gone.

Whoever has GPUs of a host opens that device, so it is what runs on one host share, as the GPUs' own device files are
(gpu_lock.py). Containers share it where their runtime mounts the host's (libnvidia-container does).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pytest_gpufleet.hardware import gpu_lock

CONTROL = "nvidiactl"


@contextmanager
def taken(wait: Callable[[str], None]) -> Iterator[None]:
    """Have the host to oneself among all that take turns there. If somebody else has it, `wait` is told who, once, and
    it is waited for, however long: what that one does has deadlines of its own. Where there is no such device, as in
    WSL 2, nobody takes turns."""
    try:
        descriptor = os.open(gpu_lock.DEVICES / CONTROL, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # what that means for the machine is for the checks to find
        yield
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            wait(gpu_lock.holder(descriptor))
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

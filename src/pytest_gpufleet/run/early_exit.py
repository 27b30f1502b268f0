"""os._exit ends a process at once, whatever is left to do: with status 0 it would look like an acceptance."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def noticed(status_owed: Callable[[], int]) -> Iterator[None]:
    """While this lasts, os._exit(0) in this process ends it with the status that `status_owed` gives. A child that was
    forked ends as it likes. Code that is not Python, or that has taken os._exit before, goes past this."""
    genuine, controller = os._exit, os.getpid()

    def _exit(status: int) -> NoReturn:
        if os.getpid() == controller and status & 0xFF == 0:  # all that a parent sees of it
            status = status_owed()
        genuine(status)

    os._exit = _exit
    try:
        yield
    finally:
        os._exit = genuine

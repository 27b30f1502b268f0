"""Waiting for what other processes do, on a machine that may be busy."""

import time

PATIENCE_SECONDS = 600.0  # what is waited for hangs for an hour if it is not ended
TURN_SECONDS = 0.01  # between two looks


def comes_true(condition):
    """Whether it does in time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(TURN_SECONDS)
    return True

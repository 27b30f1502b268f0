"""Threads for what may take its time, or may never come back, beside one that must not wait."""

from __future__ import annotations

import os
import queue
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Aside:
    """Work by the name of its thread: in its order there, beside all other threads. What is to follow it is done by
    whoever calls `take_in`, for which a selector wakes when there is something."""

    def __init__(self) -> None:
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._unfinished: Counter[str] = Counter()
        self._finished: queue.SimpleQueue[tuple[str, Future[Any], Callable[[Any], None]]] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._bell

    def idle(self, thread: str) -> bool:
        return not self._unfinished[thread]

    def do(self, thread: str, work: Callable[[], Any], then: Callable[[Any], None] = lambda result: None) -> None:
        self._threads.setdefault(thread, ThreadPoolExecutor(1, thread_name_prefix=f"gpufleet {thread}"))
        self._unfinished[thread] += 1

        def tell(future: Future[Any]) -> None:
            self._finished.put((thread, future, then))
            os.eventfd_write(self._bell, 1)

        self._threads[thread].submit(work).add_done_callback(tell)

    def take_in(self) -> None:
        """Raises what work has raised."""
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return
        while not self._finished.empty():
            thread, future, then = self._finished.get()
            self._unfinished[thread] -= 1
            then(future.result())

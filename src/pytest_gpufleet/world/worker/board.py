"""How far a rank has come, in memory shared with its engine: readable even while the rank hangs or is dead."""

import mmap
import struct
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from pytest_gpufleet.world.engines.protocol import Trace

_SLOT = struct.Struct("=dIH")  # monotonic time, a count, length of the text that follows
_SLOT_BYTES = 512
_PHASE, _COLLECTIVE = 0, _SLOT_BYTES

# What torch.distributed offers under its own name. Those that go past it (DDP's reducer) are in NCCL's flight recorder.
# Not send and receive: of those each rank may call another number.
COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier",
)  # fmt: skip


class Progress:
    """A rank's current phase (`now`) and the last collective it called in the current call."""

    now = ""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.truncate(2 * _SLOT_BYTES)
            self._memory = mmap.mmap(file.fileno(), 2 * _SLOT_BYTES)
        self._collectives = 0

    def begin(self, call: str) -> None:
        """A new call. Collectives count from 0 again, since a rank that was not in the last call has called fewer."""
        self._collectives = 0
        self._write(_COLLECTIVE, 0, "")
        self.phase(call)

    def phase(self, name: str) -> None:
        self.now = name
        self._write(_PHASE, 0, name)

    def call_collectives(self, module: Any) -> None:
        """Have the collectives of `module` (torch.distributed) note that they were called."""
        for name in COLLECTIVES:
            setattr(module, name, self._noting(name, getattr(module, name)))

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            self._collectives += 1
            self._write(_COLLECTIVE, self._collectives, name)
            return function(*args, **kwargs)

        return noting

    def _write(self, slot: int, count: int, text: str) -> None:
        data = text.encode(errors="replace")[: _SLOT_BYTES - _SLOT.size]
        self._memory[slot : slot + _SLOT.size + len(data)] = _SLOT.pack(time.monotonic(), count, len(data)) + data


def read(path: Path) -> Trace:
    """Phase and collective of the rank that writes this file, on the machine that it runs on."""
    try:
        memory = path.read_bytes()
    except OSError:
        return Trace()
    phase, _, seconds = _slot(memory, _PHASE)
    collective, number, _ = _slot(memory, _COLLECTIVE)
    return Trace(phase, seconds, collective, number)


def _slot(memory: bytes, at: int) -> tuple[str, int, float]:
    if len(memory) < at + _SLOT_BYTES:
        return "", 0, 0.0
    since, count, length = _SLOT.unpack_from(memory, at)
    text = memory[at + _SLOT.size :][:length].decode(errors="replace")
    return text, count, time.monotonic() - since if length else 0.0

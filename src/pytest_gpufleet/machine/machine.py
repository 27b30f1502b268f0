"""A machine at one moment: every fact of its GPUs and its host, to be checked now."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_gpufleet.machine.kernel_log import Logged
from pytest_gpufleet.model.gpu import Gpu


@dataclass(frozen=True)
class Machine:
    """Its GPUs, in the order of the run, and its host. `logged`: the errors that the kernel's log held. `present`: the
    PCI bus ids of all its GPUs, also of those hidden from the run; "" for one that does not answer. `node`: its number
    in the run."""

    gpus: tuple[Gpu, ...]
    host: Mapping[str, Any] = field(default_factory=dict)
    taken: str = ""
    logged: Logged = field(default_factory=Logged)
    present: tuple[str, ...] = ()
    node: int = 0
    _read_at: float = field(default_factory=time.monotonic, compare=False)

    @property
    def seconds_ago(self) -> float:
        """How long ago it was read, whatever was done to the clock since."""
        return time.monotonic() - self._read_at

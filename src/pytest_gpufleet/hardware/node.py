"""What a run asks of one node: its GPUs, in the order of the run, and the host around them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from typing import Any, Protocol

from pytest_gpufleet.model.gpu import COUNTERS, SLOW_COUNTERS, Gpu, GpuTopology
from pytest_gpufleet.model.log_catalogue import Logged
from pytest_gpufleet.model.machine import Machine
from pytest_gpufleet.model.measurement import Sample


class NoGpus(Exception):
    """A node has no GPU to run on; the text says why in one sentence. `signs`: what speaks for NVIDIA hardware all the
    same, in a few words each."""

    def __init__(self, why: str, signs: Sequence[str] = ()) -> None:
        super().__init__(why)
        self.signs = signs


class GpuTaken(Exception):
    """Another process holds a GPU; the text says which GPU, and who."""


class Node(Protocol):
    """One machine. All that it gives is data, and none of it needs a GPU context."""

    @property
    def topology(self) -> GpuTopology:
        """The GPUs with what does not change about them (facts.CONSTANTS), as they were when the run began."""

    def facts(self, names: Sequence[str]) -> tuple[Gpu, ...]:
        """The GPUs as the topology has them, and these facts as they are now."""

    def host(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """These facts of the host, by default all that cost little (host.FACTS); None where the system does not tell,
        Unavailable where it is known why."""

    def sample(self, slow: bool = True) -> Sample:
        """The readings of all GPUs now. `slow`: also facts.SLOW_READINGS, which are None otherwise."""

    def kernel_log(self) -> Logged:
        """The errors that driver and kernel have told since the last call; the first one gives what was told before."""

    def present(self) -> tuple[str, ...]:
        """The PCI bus id of every GPU that the driver lists, also of those hidden from this run; "" for one that does
        not answer."""

    def lock(self) -> ExitStack:
        """Make the GPUs this run's own without waiting, until what is returned is closed or its process is gone.
        Raises GpuTaken."""


def take(node: Node) -> Machine:
    """Everything about a node at the begin of a run."""
    gpus = node.facts((*COUNTERS, *SLOW_COUNTERS))
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Machine(gpus, node.host(), now, node.kernel_log(), node.present())

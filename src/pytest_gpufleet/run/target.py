"""What a run was given: GPUs, or CPU ranks in their place."""

from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property

from pytest_gpufleet.machine import host, local_node
from pytest_gpufleet.machine.local_node import LocalNode, Machine, take
from pytest_gpufleet.machine.nvml import NoGpus
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.events import HostFound, NodeFound
from pytest_gpufleet.model.place import GpuTopology
from pytest_gpufleet.run.settings import REHEARSAL_RANKS, Options

NodeFacts = tuple[NodeFound, HostFound, GpuTopology]  # on record of a node, as if it were the only one


def node_facts(index: int, name: str, serial: str | None, machine: HostFound, topology: GpuTopology) -> NodeFacts:
    return NodeFound(index, name, serial, tuple(gpu.uuid for gpu in topology.gpus)), machine, topology


class Target:
    """`rehearsal_ranks`: on all nodes; 0: a real run. `nodes`: there at its begin. `gpus_present`: also those that are
    left out; 0 in a rehearsal. `where`: what stands behind a number of GPUs or ranks if there are several nodes."""

    rehearsal_ranks: int
    nodes: int = 1
    topology: GpuTopology
    gpus_present: int
    where: str = ""

    @property
    def node_facts(self) -> list[NodeFacts]:
        """Every node, in the order of their numbers."""
        raise NotImplementedError

    @property
    def why(self) -> str:
        return self.topology.absent

    @property
    def size(self) -> int:
        return self.rehearsal_ranks or len(self.topology.gpus)

    def headline(self, level: str, basis: str) -> str:
        """One line on what a run of this level was given, and what it asks of limits if that is not the least."""
        if self.rehearsal_ranks:
            ranks = "1 CPU rank" if self.rehearsal_ranks == 1 else f"{self.rehearsal_ranks} CPU ranks"
            return f"REHEARSAL on {ranks}{self.where}, no GPU is tested ({self.why})"
        if not self.topology.gpus:
            return f"no GPU: {self.why}"
        models, count = {gpu.name for gpu in self.topology.gpus}, len(self.topology.gpus)
        which = f", which have {self.gpus_present}" if self.where else f" of the machine's {self.gpus_present} GPUs"
        part = which if self.gpus_present > count else ""
        asked = f", by {basis} limits at least" if basis != "physical" else ""
        return f"{count}x {' / '.join(sorted(models))}{self.where}{part}, level {level}{asked}"


class OwnMachine(Target):
    """The machine of this process."""

    def __init__(self, node: LocalNode, rehearsal_ranks: int = 0) -> None:
        self.node = node
        self.rehearsal_ranks = rehearsal_ranks
        self.topology = node.topology
        self.gpus_present = len(node.present())

    @cached_property
    def machine(self) -> Machine:
        return take(self.node)

    @property
    def node_facts(self) -> list[NodeFacts]:
        found, topology = self.machine, replace(self.topology, gpus=self.machine.gpus)
        return [node_facts(0, host.own_name(), host.serial(), HostFound(found.taken, found.host), topology)]

    @classmethod
    def without_gpus(cls, *why: str, ranks: int = 0) -> "OwnMachine":
        return cls(local_node.without_gpus("; ".join(why), *(() if ranks else why)), ranks)


def find(options: Options, stack: ExitStack) -> OwnMachine:
    """What the options ask for; NVML stays open until `stack` is closed. Refused for --gpus all without any."""
    if options.rehearse:
        return OwnMachine.without_gpus("--rehearse was given", ranks=options.rehearse)
    wanted = options.gpus if isinstance(options.gpus, int) else None
    try:
        return OwnMachine(stack.enter_context(local_node.opened(wanted)))
    except NoGpus as reason:
        if options.gpus == "all":
            raise Refused(f"--gpus all: {reason}") from None
        if options.gpus != "auto":
            return OwnMachine.without_gpus(str(reason))
        # A server whose driver is dead must not pass for a machine without GPUs.
        if not reason.signs:
            return OwnMachine.without_gpus(str(reason), ranks=REHEARSAL_RANKS)
        seen = "; ".join(reason.signs)
        found = f"this machine shows NVIDIA hardware ({seen}), so it is no rehearsal: --rehearse makes one"
        return OwnMachine.without_gpus(str(reason), found)

"""Whether the file from which NCCL takes the topology of the machine makes a collective slow.

Images of clouds set NCCL_TOPO_FILE, since a virtual machine does not show what it consists of. Left over from another
machine, or from another size of it, it sends NCCL the wrong way over all links alike.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from pytest_gpufleet.hardware import software
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import THIS_NODE
from pytest_gpufleet.probes.collectives.speed import bus_bandwidth
from pytest_gpufleet.probes.search.deadline import Deadline
from pytest_gpufleet.world.process_group import TIMEOUT
from pytest_gpufleet.world.rank import Rank
from pytest_gpufleet.world.world import World

VARIABLE = "NCCL_TOPO_FILE"
FASTER = 1.05  # what a search for the slow names anybody from; large messages differ by 1 % from one time to the next


def without_topology_file(world: World, collective: str, nbytes: int, deadline: Deadline) -> list[Fault]:
    """What a collective over all ranks reaches when NCCL_TOPO_FILE is left out, once; nothing where it is not set."""
    file = software.steering().get(VARIABLE)
    if not file:
        return []
    rates = deadline.run(world, _with_and_without, file, collective, nbytes)
    given, own = (min(ways) for ways in zip(*rates, strict=True))
    what = f"without {VARIABLE}={file} {collective} reaches {own:,.4g} GB/s, with it {given:,.4g}"
    if own > FASTER * given:
        return [Fault("harmful_variable", (THIS_NODE,), what)]
    return [Fault("cause_unclear", (), what)]


def _with_and_without(rank: Rank, file: str, collective: str, nbytes: int) -> tuple[float, float]:
    """GB/s of this rank's group, and of a group of the same ranks for which NCCL has no file: it reads the variable
    again for each communicator (ncclTopoGetSystem), where the C library has it, from nccl.conf too."""
    given = bus_bandwidth(rank, collective, nbytes).value
    os.unsetenv(VARIABLE)
    group = dist.new_group(dist.get_process_group_ranks(rank.group), timeout=TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    own = bus_bandwidth(rank.within(group), collective, nbytes).value
    os.putenv(VARIABLE, file)
    dist.destroy_process_group(group)
    return given, own

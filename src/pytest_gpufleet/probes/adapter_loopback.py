"""What NCCL makes of a network adapter between two GPUs of one machine.

Two ranks to which only one adapter is left exchange data through it, as in SuperBench (ib-loopback) and Azure's health
checks (azure_nccl_allreduce_ib_loopback.nhc). That NCCL took this way is read from the port's own counters."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from tempfile import TemporaryDirectory

from pytest_gpufleet.machine import network_ports
from pytest_gpufleet.machine.network_ports import Port
from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.metric import Measurement, MiB, Reading, Size
from pytest_gpufleet.model.place import Place, Where
from pytest_gpufleet.probes.collectives.speed import bus_bandwidth
from pytest_gpufleet.world.failure import RankFailure
from pytest_gpufleet.world.world import Rank, World, alone

LOOPBACK_BYTES = Size(256 * MiB, rehearsal=1 * MiB)  # at 25 GB/s 256 MiB take 10 ms
SECONDS = 60.0  # for one turn, with the start of NCCL
# What leaves the network alone to NCCL (its manual, "Environment Variables"). Ranks that seem to be on different hosts
# need no more to take the network, also where a machine's settings forbid it within one (NCCL_NET_DISABLE_INTRA).
THROUGH_THE_NETWORK = {
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0",
    "NCCL_COLLNET_ENABLE": "0", "NCCL_NET_DISABLE_INTRA": "0", "NCCL_IB_DISABLE": "0", "NCCL_NET": "IB",
}  # fmt: skip
# In a rehearsal ranks talk over this interface, and no adapter.
LOOPBACK_INTERFACE = Port("lo")
Turn = dict[int, str]  # which pair of ranks takes which port


@dataclass
class Loopback:
    """GB/s of ports that sent to themselves, samples by name: `alone`, one port after the other, and `at_once`, those
    with ranks of their own. `failed`: ports that could not, with why. `unseen`: whose counters did not grow by it."""

    alone: dict[str, tuple[float, ...]] = field(default_factory=dict)
    at_once: dict[str, tuple[float, ...]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)


def adapters_in_loopback(world: World, ports: Sequence[Port]) -> Loopback:
    """Send through each of these ports, on ranks started for it: NCCL reads once which adapter it may use."""
    found = Loopback()
    for turn in turns(world, ports):
        with world.restarted(environments(world.size, turn)):
            for pair, name in turn.items():
                _send(world, {pair: name}, found.alone, found)
            here = {pair: name for pair, name in turn.items() if name in found.alone}
            if len(here) > 1:
                _send(world, here, found.at_once, found)
    return found


def turns(world: World, ports: Sequence[Port]) -> list[Turn]:
    """Each port once, by pairs of ranks: the pair of the GPU that is next to it, or as ports follow each other."""
    pairs, near = world.size // 2, [gpu.get("network_adapters") or () for gpu in world.gpus]
    of_pair: list[list[str]] = [[] for _ in range(pairs)]
    for number, port in enumerate(ports):
        next_to = [index // 2 for index, adapters in enumerate(near[: 2 * pairs]) if port.device in adapters]
        of_pair[next_to[0] if next_to else number * pairs // len(ports)].append(port.port)
    return [{pair: name for pair, name in enumerate(column) if name} for column in itertools.zip_longest(*of_pair)]


def environments(size: int, turn: Turn) -> list[dict[str, str]]:
    """The variables of each rank. "=" takes a name for the whole of it, not for the begin of names."""
    found: list[dict[str, str]] = [{} for _ in range(size)]
    for pair, name in turn.items():
        for index in (2 * pair, 2 * pair + 1) if name != LOOPBACK_INTERFACE.port else ():
            adapter = {"NCCL_IB_HCA": f"={name.replace('/', ':')}", "NCCL_HOSTID": f"gpufleet-{index}"}
            found[index] = {**THROUGH_THE_NETWORK, **adapter}
    return found


def adapter_bandwidth(
    figures: Mapping[str, Sequence[float]], every: Sequence[Port], method: str, nbytes: int
) -> Measurement:
    """GB/s of ports by their names; places are their numbers in `every`, and the details have the names."""
    numbers = {port.port: number for number, port in enumerate(every)}
    by_place = {Place(0, "nic", numbers.get(name, number)): name for number, name in enumerate(figures)}
    samples: dict[Where, tuple[float, ...]] = {place: tuple(figures[name]) for place, name in by_place.items()}
    rate = network_ports.line_rate([port for port in every if port.port in figures])
    conditions: dict[str, Condition] = {"method": method, "bytes": nbytes, "port_rate": rate}
    values = {place: median(each) for place, each in samples.items()}
    return Measurement("nic_bandwidth", values, conditions, samples, {str(at): name for at, name in by_place.items()})


def _send(world: World, turn: Turn, into: dict[str, tuple[float, ...]], found: Loopback) -> None:
    """Have the pairs of this turn send at the same time, and keep what is proven."""
    before, nbytes = {name: network_ports.carried(name) for name in turn.values()}, LOOPBACK_BYTES.on(world)
    try:
        with TemporaryDirectory() as folder:
            answers = world.each([(2 * pair, 2 * pair + 1) for pair in turn], exchange, folder, nbytes, timeout=SECONDS)
    except RankFailure as failure:
        found.failed.update(dict.fromkeys(turn.values(), str(failure).partition("\n")[0]))
        return
    for name, readings in zip(turn.values(), answers, strict=True):
        slowest = min(readings, key=lambda reading: reading.value)
        if carried(before[name], network_ports.carried(name), slowest, nbytes):
            into[name] = tuple(2 * sample for sample in slowest.samples)  # both ranks send as much through it
        else:
            found.unseen.append(name)


def carried(before: tuple[int, int] | None, now: tuple[int, int] | None, reading: Reading, nbytes: int) -> bool:
    """Whether a port has sent and received what both ranks sent in the timed operations: in an all_reduce each all."""
    least = 2 * nbytes * int(reading.details["iterations"]) * int(reading.details["runs"]) * len(reading.samples)
    return before is not None and now is not None and all(b - a >= least for a, b in zip(before, now, strict=True))


def exchange(rank: Rank, folder: str, nbytes: int) -> Reading:
    """Between two ranks which know no others: the adapters of others may have no way to theirs."""
    return bus_bandwidth(alone(rank, f"file://{folder}/pair{int(os.environ['RANK']) // 2}"), "all_reduce", nbytes)

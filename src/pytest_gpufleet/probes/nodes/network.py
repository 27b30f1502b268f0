"""What figures between nodes depend on, as the ranks see it: the conditions that they are measured under."""

from __future__ import annotations

import torch

from pytest_gpufleet.hardware import network_ports
from pytest_gpufleet.hardware.software import steering
from pytest_gpufleet.model.conditions import ALGORITHMS
from pytest_gpufleet.model.metric import Condition
from pytest_gpufleet.probes.timing.all_ranks import everyones
from pytest_gpufleet.world.rank import Rank

# Gb/s of a GPU's part of the network, as nodes are sold: 8x 400, 16x 200 and 32x 100 for 8 GPUs are all 400 for each.
# Ports for storage come on top, and by themselves make no other kind of node.
RATES = (25, 50, 100, 200, 400, 800, 1600)


def conditions(rank: Rank) -> dict[str, Condition]:
    """Network, version and algorithm of NCCL, the same on all ranks of the group, which all call it: of the network the
    most that any node has, since one that has lost a port is held against what it should reach; of the others what all
    have in common. None of CPU ranks."""
    if rank.device.type != "cuda":
        return {}
    asked = steering().get("NCCL_ALGO", "").lower()
    mine = [gigabits_for_each_gpu(), nccl_version(), ALGORITHMS.index(asked) if asked in ALGORITHMS else -1]
    networks, versions, algorithms = zip(*everyones(rank, mine), strict=True)
    found: dict[str, Condition] = {}
    if max(networks):
        found["network"] = int(max(networks))
    if len({*versions}) == 1:
        found["nccl"] = int(versions[0])
    if len({*algorithms}) == 1 and algorithms[0] >= 0:
        found["algorithm"] = ALGORITHMS[int(algorithms[0])]
    return found


def gigabits_for_each_gpu() -> int:
    """Of all active InfiniBand, RoCE and EFA ports of this node, one of RATES; 0 without any."""
    total = sum(map(network_ports.gigabits, network_ports.active(network_ports.read())))
    return max((rate for rate in RATES if rate * torch.cuda.device_count() <= total), default=0)


def nccl_version() -> int:
    """As nccl.h writes it: 22809 is 2.28.9."""
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return int(10_000 * major + 100 * minor + patch)

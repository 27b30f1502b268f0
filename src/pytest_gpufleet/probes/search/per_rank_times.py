"""What each rank and each pair of ranks does to a collective: figures from which one can tell who slows the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from pytest_gpufleet.model.gpu import GpuTopology
from pytest_gpufleet.probes.collectives.table import COLLECTIVES
from pytest_gpufleet.probes.links.pairs import turns
from pytest_gpufleet.probes.pairing import Pair
from pytest_gpufleet.probes.timing.all_ranks import agree, line_up, seconds, timing, wait
from pytest_gpufleet.world.rank import Rank

LAUNCHES = 10
SAMPLES = 3
LONGEST = 0.5  # seconds of a sample, about: the search is to be over soon on a broken machine too


def pair_seconds(rank: Rank, topology: GpuTopology, nbytes: int) -> dict[Pair, float]:
    """The seconds in which this rank and each other one send each other `nbytes`, both ways at the same time; where
    pairs share no way, others do so meanwhile. The best of some samples: a bad link is never fast."""
    return {pair: min(taken) for pair, taken in swaps(rank, turns(rank.size, topology), nbytes, LONGEST).items()}


def swaps(rank: Rank, rounds: Sequence[Sequence[Pair]], nbytes: int, longest: float) -> dict[Pair, tuple[float, ...]]:
    """The seconds in which this rank and its partner of each round send each other `nbytes`, both ways at the same
    time: one figure a sample, of about `longest` seconds. All pairs of a round do so at once; every rank calls it."""
    sent, received = (torch.zeros(nbytes, dtype=torch.uint8, device=rank.device) for _ in range(2))

    def swap(partner: int) -> None:
        peer = dist.get_global_rank(rank.group, partner)
        there, back = dist.P2POp(dist.isend, sent, peer, rank.group), dist.P2POp(dist.irecv, received, peer, rank.group)
        wait([dist.batch_isend_irecv([there, back])])

    took = {}
    for pairs in rounds:
        mine = next((pair for pair in pairs if rank.index in pair), None)
        if mine is None:
            timing(rank, list, SAMPLES, longest=longest)  # keeps step with the others
            continue
        partner = sum(mine) - rank.index
        with rank.phase(f"pair with rank {partner} of {nbytes:,} bytes"):
            took[min(mine), max(mine)] = timing(rank, partial(swap, partner), SAMPLES, longest=longest).seconds
    return took


def launch_seconds(rank: Rank, name: str, nbytes: int) -> tuple[float, float]:
    """The seconds this rank's host needs to launch a collective, and those until it is done, when all ranks begin
    together: a rank that comes late has a long first figure, and the others wait for it in their second."""
    collective, n = COLLECTIVES[name], rank.size
    total = collective.total(max(1, nbytes // 4), n)
    input, output = collective.buffers(
        total, n, rank.index, collective.in_place == "always", lambda count: torch.zeros(count, device=rank.device)
    )
    run = partial(collective.run, rank.group, output, input)
    launched, done = [], []
    with rank.phase(f"launches of {name} {nbytes:,} bytes"):
        seconds(rank, run, 1)  # connects the ranks
        launches = agree(rank, max(3, min(LAUNCHES, int(LONGEST / seconds(rank, run, 1)))))
        for _ in range(launches):
            line_up(rank)
            began = time.perf_counter()
            works = collective.launch(rank.group, output, input)
            launched.append(time.perf_counter() - began)
            wait([works])
            if rank.device.type == "cuda":
                torch.cuda.synchronize()
            done.append(time.perf_counter() - began)
    return median(launched), median(done)

"""What a call on warm ranks costs, and what starting them costs.

    python benchmarks/calls.py              4 CPU ranks
    python benchmarks/calls.py --gpus 8     8 GPUs
    python benchmarks/calls.py --nodes 3 --ranks 2      3 nodes of 2 CPU ranks, processes of this machine
    python benchmarks/calls.py --nodes 3 --ranks 2 --address auto       the same on the nodes of a Ray cluster

A no-op `world.run` and a no-op `nccl_group.run` (median and 95th percentile of 1,000, of the best of 5 rounds), the
start of the ranks by forkserver (what the local engine uses) and by spawn, and a fresh world after a failure.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time

from pytest_gpufleet.run.cluster_run import ClusterRun
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.run.settings import Options

ROUNDS = 5  # others may work on the machine: the best one counts
CALLS = 1000


def no_op(rank):
    return None


def first_tensor(device):
    import torch
    import torch.distributed

    torch.zeros(1, device=device)


def spawn_seconds(devices):
    """Processes that import torch and create their context, started by multiprocessing's spawn."""
    context = multiprocessing.get_context("spawn")
    began = time.perf_counter()
    processes = [context.Process(target=first_tensor, args=(device,)) for device in devices]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return time.perf_counter() - began


def timed(function, *args):
    began = time.perf_counter()
    function(*args)
    return time.perf_counter() - began


def asked_for(arguments):
    """A run on the ranks that were asked for, none of which is started yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=None)
    parser.add_argument("--ranks", type=int, default=4, help="CPU ranks, without --gpus")
    parser.add_argument("--nodes", type=int, default=None, help="GPUs and ranks are those of each")
    parser.add_argument("--address", default=None, help="of a Ray cluster")
    asked = parser.parse_args(arguments)
    where = {"nodes": asked.nodes, "address": asked.address}
    options = Options(gpus=asked.gpus, **where) if asked.gpus else Options(rehearse=asked.ranks, **where)
    return ClusterRun(options) if asked.nodes else Run(options)


def figures(arguments):
    run = asked_for(arguments)
    world, group = run.ranks.world(with_group=False), run.ranks.world(with_group=True)
    print(f"{world.size} ranks: {run.target.headline(run.options.level, run.options.basis)}")
    found = {
        "start by forkserver, first time, s": timed(world.run, no_op),
        "process group, first collective, s": timed(group.run, no_op),
    }
    run.ranks.pool.stop()
    found["start by forkserver, after a failure, s"] = timed(world.run, no_op)
    group.run(no_op)
    for name, handle in (("world", world), ("nccl_group", group)):
        rounds = [sorted(timed(handle.run, no_op) * 1e3 for _ in range(CALLS)) for _ in range(ROUNDS)]
        times = min(rounds, key=statistics.median)
        found[f"no-op {name}.run, median, ms"] = statistics.median(times)
        found[f"no-op {name}.run, 95 %, ms"] = times[CALLS * 95 // 100]
    run.close()
    return found


def main():
    found = figures(sys.argv[1:])
    run = asked_for(sys.argv[1:])
    devices = [spec.device for spec in run.ranks.pool.specs]
    run.close()
    found["start by spawn, for comparison, s"] = spawn_seconds(devices)
    for name, value in found.items():
        print(f"{name:40} {value:8.3f}")


if __name__ == "__main__":
    main()

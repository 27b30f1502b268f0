"""What a call on warm ranks costs, and what starting them costs.

    python benchmarks/calls.py              4 CPU ranks
    python benchmarks/calls.py --gpus 8     8 GPUs

A no-op `world.run` and a no-op `nccl_group.run` (median and 95th percentile of 1,000), the start of the ranks by
forkserver (what the local engine uses) and by spawn, and a fresh world after a failure.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time

from pytest_gpufleet.run.run import Run
from pytest_gpufleet.run.settings import Options


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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=None)
    parser.add_argument("--ranks", type=int, default=4, help="CPU ranks, without --gpus")
    asked = parser.parse_args()
    options = Options(gpus=asked.gpus) if asked.gpus else Options(rehearse=asked.ranks)
    run = Run(options)
    world, group = run.ranks.world(with_group=False), run.ranks.world(with_group=True)
    print(f"{world.size} ranks: {run.ground.headline(run.options.level)}")
    print(f"start by forkserver, first time       {timed(world.run, no_op):8.2f} s")
    print(f"process group, first collective       {timed(group.run, no_op):8.2f} s")
    run.ranks.pool.stop()
    print(f"start by forkserver, after a failure  {timed(world.run, no_op):8.2f} s")
    group.run(no_op)
    for name, handle in (("world", world), ("nccl_group", group)):
        times = sorted(timed(handle.run, no_op) * 1e3 for _ in range(1000))
        print(f"no-op {name}.run: median {statistics.median(times):.3f} ms, 95 % {times[949]:.3f} ms")
    run.close()
    print(
        f"start by spawn, for comparison        {spawn_seconds([spec.device for spec in run.ranks.pool.specs]):8.2f} s"
    )


if __name__ == "__main__":
    main()

"""Every probe that makes figures for limits, as the suite calls it, and training out of the ordinary."""

import os

from pytest_gpufleet import MiB, bus_bandwidth, measure, measure_all, scaling_efficiency
from pytest_gpufleet.machine import container
from pytest_gpufleet.probes import inference, measure as measure_module, memory
from pytest_gpufleet.probes.collectives import speed
from pytest_gpufleet.probes.collectives.speed import launch_time
from pytest_gpufleet.probes.collectives.under_load import retention_under_load
from pytest_gpufleet.probes.compute import rate
from pytest_gpufleet.probes.links import host_copies, pairs
from pytest_gpufleet.probes.memory import host_memory_bandwidth, memory_bandwidth
from pytest_gpufleet.probes.training import loop, sweep
from pytest_gpufleet.probes.training.loader import fed_throughput, write_photos
from pytest_gpufleet.probes.training.recipes import Workload
from pytest_gpufleet.probes.training.transformer import token_throughput


def has_all_of_its_host(rank):
    """Whatever a container leaves it."""
    container.short_of = lambda processors, memory: ""
    memory.by_numa_node = lambda: {0: sorted(os.sched_getaffinity(0))}


def decoded(world, of_all):
    return measure_module.together(world, [readings for readings, _ in world.run(inference.decode, of_all)])


def test_everything(nccl_group, world, judge, gpu_topology, tmp_path):
    write_photos(tmp_path, 4)
    world.run(has_all_of_its_host)
    alone, (every, share, busy) = (
        measure(nccl_group, loop.train_throughput, "fp32", together=False),
        measure_all(nccl_group, loop.train_throughput, "fp32", communication=True, busy=True),
    )
    way = sweep.Way("ddp", 2)
    compared = measure(nccl_group, sweep.throughput_of, way, "fp32", places=nccl_group.places)
    copied = [
        *host_copies.host_bandwidth(world, ["host to device"], "one", MiB).values(),
        *host_copies.host_bandwidth(world, ["both"], "all", MiB).values(),
        pairs.pair_bandwidth(world, gpu_topology, "read", MiB),
        pairs.ring_bandwidth(world, gpu_topology, MiB),
        pairs.pair_latency(world, gpu_topology),
    ]
    judge(
        measure(nccl_group, bus_bandwidth, "all_reduce", 1024),
        measure(nccl_group, speed.collective_latency, "all_reduce", 1024),
        measure(nccl_group, launch_time),
        product := measure(world, rate.matmul_rate, "fp32"),
        rate.relative_rate([product]),
        rate.full_clock_rates(world),
        *measure_all(world, memory_bandwidth),
        *host_memory_bandwidth(world, MiB, 0.01),
        *(measurement for each in copied for measurement in each.measurements),
        alone,
        every,
        share,
        busy,
        scaling_efficiency(alone, every),
        measure(nccl_group, loop.train_throughput, "fp32", Workload(optimizer="adam")),
        compared,
        scaling_efficiency(measure(nccl_group, sweep.throughput_of, way, "fp32"), compared),
        measure(nccl_group, fed_throughput, str(tmp_path), "fp32"),
        *measure_all(nccl_group, retention_under_load, "bf16", 1024),
        *measure_all(nccl_group, token_throughput, seconds=0.01),
        *measure_all(nccl_group, token_throughput, "ddp", seconds=0.01),
        *(each for of_all in (False, True) for each in decoded(nccl_group, of_all)),
        required=False,
    )

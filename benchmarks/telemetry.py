"""What watching the GPUs costs: the sampler's share of a core, and the same figures with and without it.

    python benchmarks/telemetry.py --gpus 8

all_reduce of 1 GiB and ResNet-50 (amp), in turns with the sampler running and stopped. Without GPUs there is no
telemetry to measure.
"""

from __future__ import annotations

import argparse
import itertools
import time
from statistics import mean, median

from pytest_gpufleet import GiB, measure
from pytest_gpufleet.machine.local_node import Sampler
from pytest_gpufleet.probes.collectives.speed import bus_bandwidth
from pytest_gpufleet.probes.training.loop import train_throughput
from pytest_gpufleet.probes.training.recipes import Workload
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.run.settings import Options

TURNS = 5
SHORT = Workload(warm_up=3, steps=4)  # the first turn has let cuDNN choose
IDLE_SECONDS = 15


def value(measurement):
    (only,) = measurement.values.values()
    return only


FIGURES = {
    "all_reduce of 1 GiB, GB/s": lambda group: value(measure(group, bus_bandwidth, "all_reduce", GiB)),
    "ResNet-50 amp, images/s": lambda group: value(measure(group, train_throughput, "amp", SHORT)),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=None, help="default: all")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between samples")
    asked = parser.parse_args()
    run = Run(Options(gpus=asked.gpus or "auto"))
    node = run.target.node
    if not node.topology.gpus:
        parser.error(f"there are no GPUs: {run.target.why}")

    taken = []

    def sampler():
        started = Sampler(node, asked.interval, taken.append)
        started.start()
        return started

    # Nothing else runs in this process: all its CPU time, that of the threads that ask NVML too, is telemetry.
    running = sampler()
    time.sleep(2 * asked.interval)
    cpu, began = time.process_time(), time.perf_counter()
    time.sleep(IDLE_SECONDS)
    share = (time.process_time() - cpu) / (time.perf_counter() - began)
    running.stop()
    what = f"{share:.2%} of a core at {asked.interval:g} s between samples ({len(taken)} samples)"
    print(f"{len(run.target.topology.gpus)} GPUs: {what}")

    group = run.ranks.world(with_group=True)
    for name, figure in FIGURES.items():
        figure(group)
        figures = {True: [], False: []}
        for watched in itertools.chain.from_iterable([(True, False), (False, True)][turn % 2] for turn in range(TURNS)):
            running = sampler() if watched else None
            figures[watched].append(figure(group))
            if running is not None:
                running.stop()
        with_it, without = (median(figures[watched]) for watched in (True, False))
        noise = (max(figures[False]) - min(figures[False])) / mean(figures[False])
        print(
            f"{name}: {with_it:,.1f} with telemetry, {without:,.1f} without ({with_it / without - 1:+.2%}; "
            f"without it the {TURNS} figures differ by {noise:.2%})",
            flush=True,
        )
    run.close()


if __name__ == "__main__":
    main()

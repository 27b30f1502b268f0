"""What ResNet-50 training gives on these GPUs, as Markdown tables: the figures of docs/ddp-vs-fsdp.md and docs/results.

python benchmarks/training.py                                  2 CPU ranks, a small network
python benchmarks/training.py --gpus 8                         everything
python benchmarks/training.py --gpus 8 scaling --recipes amp   one part, one recipe
"""

from __future__ import annotations

import argparse
import platform
import time

import torch

from pytest_gpufleet.model.conditions import METHODS
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.probes.measure import measure, measure_all, scaling_efficiency
from pytest_gpufleet.probes.training.batch_size import throughput_by_batch
from pytest_gpufleet.probes.training.loop import train_throughput
from pytest_gpufleet.probes.training.method_comparison import in_words, throughput_by
from pytest_gpufleet.probes.training.recipes import RECIPES, Workload
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.run.settings import Options

SECONDS = 1800  # compiling and searching take long
GLOBAL_BATCHES = (64, 256)  # images a GPU


def table(heads, rows):
    print("\n| " + " | ".join(heads) + " |")
    print("| --- |" + " ---: |" * (len(heads) - 1))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def value(measurement):
    return measurement.values[WORLD]


def gibibytes(values):
    """ "12.1" where all GPUs need the same, else of the first and the highest of the others."""
    first, *others = values.values()
    return f"{first:.1f}" if not others or abs(first - max(others)) < 0.1 else f"{first:.1f}, others {max(others):.1f}"


def counts(size):
    return sorted({1, size} | {count for count in (2, 4) if count < size})


def scaling(group, recipes, workload):
    """Throughput, efficiency and communication of every recipe on 1, 2, 4 and all ranks."""
    rows = []
    for recipe in recipes:
        # The largest first, so that all ranks compile at the same time.
        began = time.perf_counter()
        measured = {}
        for count in reversed(counts(group.size)):
            some = group.subset(range(count))
            measured[count] = measure_all(
                some, train_throughput, recipe, workload, communication=count > 1, timeout=SECONDS
            )
        (one,) = measured[1]
        for count in counts(group.size):
            many, *share = measured[count]
            rows.append(
                [
                    f"{recipe}, batch {many.conditions['batch']}",
                    str(count),
                    f"{value(many):,.0f}",
                    f"{value(many) / count:,.0f}",
                    f"{value(scaling_efficiency(one, many)):.1%}",
                    f"{value(share[0]):.1%}" if share else "",
                    str(many.details["step"]),
                    str(many.details.get("memory", "")),
                ]
            )
        print(f"<!-- {recipe}: {time.perf_counter() - began:.0f} s -->", flush=True)
    heads = ["recipe", "ranks", "images/s", "per rank", "efficiency", "communication", "step", "memory"]
    table(heads, rows)


def comparison(group, recipes, workload):
    """DataParallel, DDP and FSDP at the same global batches."""
    first = group.subset([0])
    worlds = {"dp": first, "ddp": group, "fsdp": group}
    if not group.gpus:
        del worlds["dp"]
    for recipe in recipes:
        for batch in GLOBAL_BATCHES if group.gpus else (8,):
            asked = Workload(workload.model, batch, workload.steps, workload.warm_up, workload.optimizer)
            one, *alone = measure_all(
                first, throughput_by, "ddp", recipe, asked, places=group.places[:1], timeout=SECONDS
            )
            rows = [["one GPU alone", f"{value(one):,.0f}", "", *(gibibytes(each.values) for each in alone)]]
            throughput, memory = {}, {}
            for method, world in worlds.items():
                fast, *used = measure_all(
                    world, throughput_by, method, recipe, asked, places=group.places, timeout=SECONDS
                )
                throughput[method] = value(fast)
                memory.update((method, each.values) for each in used)
                efficiency = f"{value(scaling_efficiency(one, fast)):.1%}"
                rows.append(
                    [METHODS[method], f"{value(fast):,.0f}", efficiency, *(gibibytes(each.values) for each in used)]
                )
            print(f"\n{recipe}, {group.size} ranks, {batch} images each, {batch * group.size:,} in all:")
            table(["method", "images/s", "efficiency", "memory, GiB a GPU"][: len(rows[-1])], rows)
            print(f"\n{in_words(throughput, memory)}")


def batches(group, recipes, workload):
    """Throughput of one rank by batch, to the largest that fits."""
    for recipe in recipes:
        figures = {}
        measured = measure_all(group.subset([0]), throughput_by_batch, recipe, workload, timeout=SECONDS)
        for each in measured:
            figures.setdefault(each.conditions["batch"], []).extend(each.values.values())
        print(f"\n{recipe}, one rank:")
        heads = ["batch", "images/s", "memory, GiB"][: 1 + len(next(iter(figures.values())))]
        table(
            heads,
            [[f"{batch}", f"{rate:,.0f}", *(f"{g:.1f}" for g in used)] for batch, (rate, *used) in figures.items()],
        )


def figures(arguments):
    """images/s of each recipe on all ranks, without the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--recipes", nargs="+", choices=tuple(RECIPES), default=["amp"])
    asked = parser.parse_args(arguments)
    run = Run(Options(gpus=asked.gpus) if asked.gpus else Options(rehearse=2))
    group = run.ranks.world(with_group=True)
    found = {
        f"{recipe}, images/s": value(measure(group, train_throughput, recipe, timeout=SECONDS))
        for recipe in asked.recipes
    }
    run.close()
    return found


# Each part, and the recipes that it is for where none are named.
PARTS = {
    "scaling": (scaling, tuple(RECIPES)),
    "comparison": (comparison, ("bf16",)),
    "batches": (batches, ("amp",)),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--ranks", type=int, default=2, help="CPU ranks, without --gpus")
    parser.add_argument("--recipes", nargs="+", choices=tuple(RECIPES))
    parser.add_argument("--batch", type=int, help="images a rank, for scaling")
    asked = parser.parse_args()
    if strangers := set(asked.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(strangers))}: there are {', '.join(PARTS)}")
    run = Run(Options(gpus=asked.gpus) if asked.gpus else Options(rehearse=asked.ranks))
    group = run.ranks.world(with_group=True)
    topology = run.ground.topology
    print(f"{run.ground.headline(run.options.level)}, {time.strftime('%Y-%m-%d', time.gmtime())}")
    versions = {"driver": topology.driver, "CUDA": topology.cuda, "NCCL": topology.nccl, "torch": torch.__version__}
    print(", ".join(f"{name} {version}" for name, version in versions.items() if version), end=", ")
    print(f"Python {platform.python_version()}")
    for name in asked.parts or PARTS:
        part, recipes = PARTS[name]
        part(group, asked.recipes or recipes, Workload(batch=asked.batch))
    run.close()


if __name__ == "__main__":
    main()

"""Images/s of ResNet-50 on all ranks, by recipe. What the ways to train make of it is in the report of the suite:
docs/ddp-vs-fsdp.md.

python benchmarks/training.py                              2 CPU ranks, a small network
python benchmarks/training.py --gpus 8 --recipes amp peak  these recipes
"""

from __future__ import annotations

import argparse
import sys

from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.probes.measure import measure
from pytest_gpufleet.probes.training.loop import train_throughput
from pytest_gpufleet.probes.training.recipes import RECIPES
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.run.settings import Options

SECONDS = 900  # searching takes long


def figures(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--recipes", nargs="+", choices=tuple(RECIPES), default=["amp"])
    asked = parser.parse_args(arguments)
    run = Run(Options(gpus=asked.gpus) if asked.gpus else Options(rehearse=2))
    group = run.ranks.world(with_group=True)
    measured = {recipe: measure(group, train_throughput, recipe, timeout=SECONDS) for recipe in asked.recipes}
    run.close()
    return {f"{recipe}, images/s": each.values[WORLD] for recipe, each in measured.items()}


if __name__ == "__main__":
    for name, rate in figures(sys.argv[1:]).items():
        print(f"{name}: {rate:,.1f}")

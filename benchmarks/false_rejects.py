"""How many healthy machines are rejected, and by what: machines made by chance, judged as those of a run are.

    python benchmarks/false_rejects.py                1,000 machines of 8, 20 fleets of 64 nodes, 3 of 500
    python benchmarks/false_rejects.py --noise 1.5    the same, where healthy GPUs differ by half as much again

Each is 2x NVIDIA H200 (tests/recorded/h200x2-g) made 8: its figures, collectives as docs/results/README.md has them of
8x H200, times what healthy machines and GPUs were seen to differ by (SPREADS) and what the two revisions of the board
do (BOARDS), less what their temperatures cost. A reference of a profile is taken for the mean of healthy machines, and
is off by chance, anew for each machine and fleet, as the mean of so many is. What a run measures a second time counts
the first time here: a chip does not change. Not simulated: inventory and health, how much samples differ.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import msgspec

from pytest_gpufleet.model.events import NodeFound
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.metric import GiB, GpuState, Measurement, MiB
from pytest_gpufleet.model.place import Gpu, GpuTopology, Pair, Where, gpu
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.probes.compute.rate import relative_rate
from pytest_gpufleet.verdict.fleet.fleet_peers import slow_places
from pytest_gpufleet.verdict.fleet.host_runs import HostRun
from pytest_gpufleet.verdict.judgement import judge, read
from pytest_gpufleet.verdict.profile import for_gpu

ROOT = Path(__file__).parents[1]
PROFILE = for_gpu("NVIDIA H200")
GPUS = 8
# GB/s of 64 MiB, 1 and 8 GiB, NVLS off.
SIZES = (64 * MiB, 1 * GiB, 8 * GiB)
OF_EIGHT = {
    "all_reduce": (317, 360, 367), "all_gather": (281, 344, 359), "reduce_scatter": (287, 347, 363),
    "broadcast": (305, 360, 364), "reduce": (310, 362, 367), "all_to_all": (263, 331, 345),
    "gather": (368, 375, 377), "scatter": (334, 367, 370), "sendrecv": (80, 358, 366),
}  # fmt: skip
# Standard deviations within a machine and between machines, in per cent of the mean, by how the label of a measurement
# begins: of 17 GPUs of 6 machines of H200 (2026-11-21 to 23), at one temperature and inside a revision of the board.
# Nobody has seen those of the last rows, which are guesses.
SPREADS = {
    "gemm fp64": (1.25, 1.5), "gemm fp32": (0.48, 0.27), "gemm tf32": (1.06, 0.7), "gemm fp16": (1.06, 0.64),
    "gemm bf16": (0.86, 0.6), "gemm fp8": (1.39, 0.9), "memory_bandwidth": (0.03, 0.03), "pair_bandwidth": (0.04, 0.08),
    "host_bandwidth one host to device": (0.59, 0.82), "host_bandwidth one device to host": (0.02, 0.11),
    "solo_train_throughput": (0.63, 0.4), "solo_token_throughput": (0.63, 0.4), "soak_clock": (1.4, 0.7),
    "busbw all_gather": (0, 0.65), "busbw reduce_scatter": (0, 0.65), "busbw": (0, 0.05),
    "host_bandwidth all": (0.4, 6), "host_memory_bandwidth": (0, 2), "launch_time": (10, 10), "soak_power": (0.4, 0.2),
    "product_retention": (0.5, 0.5), "collective_latency": (0, 2), "": (0, 0.5),
}  # fmt: skip
COMPUTE = ("gemm", "solo_train_throughput", "solo_token_throughput", "soak_clock")
CHIP = 0.78  # the correlation of what they give on one GPU
# By what board -000 has more than -001, in per cent.
REVISIONS = ("692-2G520-0282-000", "692-2G520-0282-001")
BOARDS = {"gemm bf16": 2.4, "gemm fp8": 3.0, "gemm": 1.0, "solo_t": 1.3, "memory_bandwidth copy": -0.6,
          "memory_bandwidth triad": 0.7, "": 0.0}  # fmt: skip
USUAL_C, KELVIN, PER_KELVIN = 57.0, 3.0, 0.0018

T = TypeVar("T")


@dataclass(frozen=True)
class Figure:
    """What a machine of 8 measures, and what healthy ones reach. `machines`: of how many the profile says so."""

    finding: Finding
    places: tuple[Where, ...]
    mean: float
    machines: int
    of_board: str

    @property
    def label(self) -> str:
        return labelled(self.finding.measurement.metric, self.finding.measurement.conditions)

    def row(self, table: Mapping[str, T]) -> T:
        return next(row for key, row in table.items() if self.label.startswith(key))


def labelled(metric: str, under: Mapping[str, object]) -> str:
    keys = ("precision", "operation", "at_once", "direction", "collective", "recipe", "bytes")
    return " ".join([metric, *(str(under[key]) for key in keys if key in under)])


@cache
def recorded() -> Record:
    return read(ROOT / "tests" / "recorded" / "h200x2-g" / "evidence.jsonl")


@cache
def figures(board: str) -> list[Figure]:
    found = []
    for finding in recorded().findings:
        measured = finding.measurement
        if finding.again or measured.metric in ("spread", "gemm_relative", "scaling_efficiency"):
            continue
        under = {key: GPUS if (key, value) == ("ranks", 2) else value for key, value in measured.conditions.items()}
        mean = fmean(measured.values.values())
        if measured.metric == "busbw" and under["bytes"] in SIZES:
            mean = OF_EIGHT[str(under["collective"])][SIZES.index(under["bytes"])]
        elif measured.metric in ("train_throughput", "token_throughput"):
            mean *= GPUS / 2
        places = tuple(eight_of(next(iter(measured.values))))
        whole = replace(measured, conditions=under, values=dict.fromkeys(places, mean), samples={}, gpu_states={})
        limit = PROFILE.limit_for(whole, "nvswitch", board)
        reference = limit.reference if limit else None
        of_board = str(limit.conditions.get("part", "")) if limit else ""
        machines = reference.machines if reference else 1
        mean = reference.value if reference else mean
        found.append(Figure(replace(finding, measurement=whole), places, mean, machines, of_board))
    return found


def eight_of(place: Where) -> list[Where]:
    """All places of a machine of 8 that are of the kind of this one."""
    if isinstance(place, Pair):
        return [Pair(gpu(i), gpu(j)) for i in range(GPUS) for j in range(GPUS) if i != j]
    return [gpu(index) for index in range(GPUS)] if place.parts[0].kind == "gpu" else [place]


@cache
def eight() -> GpuTopology:
    two = recorded().topology
    links = tuple(tuple("X" if i == j else two.links[0][1] for j in range(GPUS)) for i in range(GPUS))
    return replace(two, gpus=tuple(replace(two.gpus[0], index=index) for index in range(GPUS)), links=links)


def errors(by_chance: random.Random, noise: float) -> dict[str, float]:
    """By what the references of the profile are off, by figure."""
    found = {}
    for figure in figures(""):
        within, between = figure.row(SPREADS)
        sd = noise * (between**2 + within**2 / 4) ** 0.5 / 100
        found[figure.label] = by_chance.gauss(0, sd / figure.machines**0.5)
    return found


def machine(
    by_chance: random.Random, name: str, off: Mapping[str, float], noise: float, like: HostRun | None = None
) -> HostRun:
    """A healthy machine, judged by the profile that is shipped; or, for who compares it with others alone, with the
    tolerances of one that was."""
    revision = by_chance.choice(REVISIONS)
    gpus = [
        Gpu(each.index, {**each.facts, "uuid": f"GPU-{name}-{each.index}", "serial": f"{name}-{each.index}",
                         "board_part_number": revision}) for each in eight().gpus
    ]  # fmt: skip
    topology = replace(eight(), gpus=tuple(gpus))
    chips = {gpu(index): by_chance.gauss(0, 1) for index in range(GPUS)}
    of_all = by_chance.gauss(0, 1)
    states = {place: GpuState(by_chance.gauss(USUAL_C, KELVIN), 1470.0, 695.0) for place in chips}
    measured: list[tuple[Finding, Measurement]] = []
    for figure in figures(revision):
        within, between = (noise * each / 100 for each in figure.row(SPREADS))
        compute = figure.finding.measurement.metric in COMPUTE

        def drawn(common: float, compute: bool = compute) -> float:
            own = by_chance.gauss(0, 1)
            return CHIP**0.5 * common + (1 - CHIP) ** 0.5 * own if compute else own

        board = 0.0 if figure.of_board else figure.row(BOARDS) / 200 * (1 if revision == REVISIONS[0] else -1)
        usual = figure.mean * (1 + off[figure.label] + board + between * drawn(of_all))
        values = {}
        for place in figure.places:
            warmer = states[place].temperature_c - USUAL_C if compute else 0.0
            values[place] = usual * (1 + within * drawn(chips.get(place, 0.0)) - PER_KELVIN * warmer)
        known = states if compute else {}
        measured.append((figure.finding, replace(figure.finding.measurement, values=values, gpu_states=known)))
    alone = {each.conditions["recipe"]: each.values for _, each in measured if each.metric == "solo_train_throughput"}
    for number, (finding, each) in enumerate(measured):
        if each.metric == "train_throughput":  # the slowest decides
            slowest = min(alone[each.conditions["recipe"]].values()) * GPUS * 0.985
            measured[number] = finding, replace(each, values=dict.fromkeys(each.values, slowest))
    rates = [each for _, each in measured if each.metric == "gemm"]
    finding = next(each for each in recorded().findings if each.measurement.metric == "gemm_relative")
    measured.append((finding, relative_rate(rates)))
    every = [each for _, each in measured]
    if like is None:
        findings = [
            judge(each, PROFILE, topology, finding.check, rehearsal=False, required=finding.required, measured=every)
            for finding, each in measured
        ]
    else:
        findings = [replace(then, measurement=now) for then, now in zip(like.record.findings, every, strict=True)]
    node = NodeFound(0, name, f"SN-{name}", tuple(each.uuid for each in gpus))
    header = msgspec.structs.replace(recorded().run, host=name, nodes=(node,))
    record = replace(recorded(), run=header, topology=topology, findings=findings, telemetry=[], faults=[])
    return HostRun(name, f"{by_chance.randrange(16**64):064x}", record)


def rejecting(run: HostRun) -> set[str]:
    """What rejects a machine that runs alone."""
    found = set()
    for finding in run.record.findings:
        if finding.state == "missed":
            label = labelled(finding.measurement.metric, finding.measurement.conditions)
            found |= {f"{label}: limit"} if finding.missed else set()
            found |= {f"{label}: peers"} if finding.slower_than_peers else set()
    return found


def show(what: str, count: int, rejected: int, by: Counter[str]) -> None:
    print(f"{what}: {rejected} of {count}, {rejected / max(1, count):.2%}")
    for label, times in by.most_common(8):
        print(f"    {times:>5} {label}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--noise", type=float, default=1.0)
    arguments.add_argument("--machines", type=int, default=1000)
    arguments.add_argument("--fleets", type=int, nargs="*", default=[64] * 20 + [500] * 3, metavar="NODES")
    given = arguments.parse_args()
    by_chance, by, rejected = random.Random(31), Counter[str](), 0
    for _ in range(given.machines):
        why = rejecting(machine(by_chance, "node-0", errors(by_chance, given.noise), given.noise))
        by.update(why)
        rejected += bool(why)
    show(f"machines of {GPUS} alone, rejected", given.machines, rejected, by)
    like = machine(by_chance, "node-0", errors(by_chance, given.noise), given.noise)
    for nodes in sorted(set(given.fleets)):
        fleets, by, once = given.fleets.count(nodes), Counter[str](), Counter[str]()
        accused = places = 0
        for number in range(fleets):
            off = errors(by_chance, given.noise)
            names = (f"node-{number:04}" for number in range(nodes))
            found = slow_places(
                {node: machine(by_chance, name, off, given.noise, like) for node, name in enumerate(names)}
            )
            accused += bool(found.slow)
            places += len({(each.node, outlier.place) for each in found.slow for outlier in each.places})
            for what, slow in ((by, found.slow), (once, found.alone)):
                what.update({labelled(each.figure.name, dict(each.figure.conditions)) for each in slow})
            print(f"fleet {number + 1} of {nodes}: {accused} with anybody accused", flush=True)
        show(f"fleets of {nodes}, a place slower than its peers of the fleet by two measurements", fleets, accused, by)
        show(f"fleets of {nodes}, by one alone, which is no fault", fleets, sum(once.values()), once)
        print(f"    {places / fleets:.1f} places of {nodes * GPUS} GPUs a fleet are named")


if __name__ == "__main__":
    main()

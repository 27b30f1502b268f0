"""How small a fault a comparison finds, and how often it rejects what is healthy; and so does a run.

All by the model of verdict/noise.py: a healthy value is the mean of its kind times 1 + between + within, both normal. A
second measurement changes nothing here: how much healthy ones differ is for the most part of the chips, which are the
same when they are measured again. So what is found is found twice, and a healthy one that misses misses twice."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import permutations
from statistics import NormalDist
from typing import Literal, get_args

from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.finding import Finding, Limit, distinct, that_count
from pytest_gpufleet.model.metric import METRICS, Measurement, SpreadRow, metric_under
from pytest_gpufleet.model.place import WORLD, Gpu, GpuTopology, Pair, Where, gpu
from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.verdict.judgement import comparisons, judge
from pytest_gpufleet.verdict.noise import DEFAULT_IS_WORTH, Line
from pytest_gpufleet.verdict.outliers import WORTH
from pytest_gpufleet.verdict.profile import Profile

NORMAL = NormalDist()
SIZES = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.07, 0.10)  # of a fault, as fractions

# Of the machines in tests/recorded, all of which are healthy, those that the limits of today reject. Some of the limits
# were made from them. A test counts them again.
RECORDED_HEALTHY, RECORDED_REJECTED = 8, 0


def found(size: float, line: Line) -> float:
    """The probability that what is slower by the fraction `size` is found, by the standard deviation that is known or
    by the upper end of its confidence interval, whichever finds less of it: below the line that is the smaller one."""
    return min(_cdf(size - line.at, line.sd), _cdf(size - line.at, line.most))


def size_found(probability: float, line: Line) -> float:
    """From what size on a fault is found with a probability of at least one half."""
    return line.at + NORMAL.inv_cdf(probability) * line.most


def rejected(line: Line) -> float:
    """The probability that the comparison rejects what is healthy, at most."""
    return _cdf(-line.at, line.most)


def _cdf(above: float, sd: float) -> float:
    return NORMAL.cdf(above / sd) if sd else float(above > 0)


With = Literal["peers", "reference"]
HELD: tuple[With, ...] = get_args(With)
PROBABILITIES = (0.95, 0.99)


@dataclass(frozen=True)
class Comparison:
    """Of a run. Floors are none of them: how far above them healthy machines are is not known."""

    metric: str
    conditions: tuple[tuple[str, Condition], ...]
    held: With
    line: Line
    often: int  # with one line
    fixed: bool = False  # a tolerance that follows from no spread, so that nobody knows how often it is wrong
    nodes: int = 1  # that it is between


_CLOCK = ("gemm_full_clock",)
_COMPUTE = ("gemm_relative", "gemm", "solo_train_throughput", "solo_token_throughput")
_TRAINED = ("train_throughput", "token_throughput")
# What shows a fault, each by itself. A collective is as slow as the slowest link that it uses. Bad cooling, and a chip
# that takes more power, show at the power limit alone.
FAULTS: tuple[tuple[str, tuple[tuple[With, tuple[str, ...]], ...]], ...] = (
    ("one GPU", (("peers", (*_CLOCK, *_COMPUTE)),)),
    ("one GPU, at its power limit alone", (("peers", _COMPUTE),)),
    ("all GPUs", (("reference", (*_CLOCK, *_COMPUTE, *_TRAINED)),)),
    ("all GPUs, at their power limit alone", (("reference", (*_COMPUTE, *_TRAINED)),)),
    ("one memory", (("peers", ("memory_bandwidth",)),)),
    ("all memories", (("reference", ("memory_bandwidth",)),)),
    ("links of one GPU", (("peers", ("pair_bandwidth",)), ("reference", ("busbw",)))),
    ("links of all GPUs", (("reference", ("pair_bandwidth", "busbw")),)),
    ("host link of one GPU", (("peers", ("host_bandwidth",)),)),
    ("one adapter", (("peers", ("rail_bandwidth", "rdma_bandwidth", "nic_bandwidth")),)),
    ("one node", (("reference", (*_CLOCK, *_COMPUTE, *_TRAINED, "memory_bandwidth", "pair_bandwidth", "busbw")),)),
)


def showing(fault: str, made: Iterable[Comparison]) -> list[Comparison]:
    by = dict(FAULTS)[fault]
    some = [each for each in made if any(each.held == held and each.metric in metrics for held, metrics in by)]
    return sorted(some, key=lambda each: size_found(0.95, each.line))


def rejected_by_chance(made: Iterable[Comparison]) -> tuple[float, float]:
    """The probability that a healthy machine misses any line that follows from a spread: by the spreads that are known,
    and by their upper ends. At most so much, since what is measured of one chip misses together."""
    known = [(each.often, each.line) for each in made if not each.fixed]
    seen = sum(often * _cdf(-line.at, line.sd) for often, line in known)
    return min(1.0, seen), min(1.0, sum(often * rejected(line) for often, line in known))


def of_findings(findings: Iterable[Finding]) -> list[Comparison]:
    """The comparisons that these findings came from, by the lines and spreads on record."""
    found = []
    for finding in distinct(that_count(findings)):
        measurement, limit = finding.measurement, finding.limit
        conditions, places = tuple(measurement.conditions.items()), len(measurement.values)
        if limit and limit.reference and (noise := limit.reference.noise):
            at = abs(limit.reference.value - limit.value) / (1.0 if limit.unit == "ratio" else limit.reference.value)
            sd = noise.sd * math.sqrt(1 + 1 / limit.reference.machines)
            line = Line(at, sd, DEFAULT_IS_WORTH + max(0, noise.machines - 1))  # a default, pooled with what was seen
            found.append(Comparison(measurement.metric, conditions, "reference", line, 1))
        for each in (one for one in finding.tolerances if places > 1 and one.peers != "others of the model"):
            line = Line(each.worse, 0.0, 1.0)
            if noise := each.noise:
                seen = noise.gpus - noise.machines if noise.gpus else WORTH * (places - 1)  # as many nodes show it
                df = DEFAULT_IS_WORTH + (seen if noise.machines else 0)
                line = Line(each.worse, noise.sd * math.sqrt(places / (places - 1)), df)
            found.append(Comparison(measurement.metric, conditions, "peers", line, places, not each.noise))
    return found


def of_profile(profile: Profile, gpus: int, nodes: int, level: str) -> list[Comparison]:
    """The comparisons that a profile makes of what a level measures on so many healthy nodes: those of one node in its
    own run, and those between nodes. Where its references are of boards with a part number, on such boards."""
    limits = [limit for each in profile.layers for limit in each.limits]
    parts = sorted(str(limit.conditions["part"]) for limit in limits if "part" in limit.conditions)
    facts = {"name": profile.match[0] if profile.match else profile.name, "board_part_number": [*parts, ""][0]}
    links = int(profile.facts.get("nvlinks", 0))
    kind, fabric = (f"NV{links}", "nvswitch") if links else ("PHB", "pcie")
    rows = tuple(tuple("X" if i == j else kind for j in range(gpus)) for i in range(gpus))
    topology = GpuTopology(tuple(Gpu(index, facts) for index in range(gpus)), rows, fabric if gpus > 1 else "none")
    suite, found = shipped(), list[Comparison]()
    for among in sorted({1, nodes}):
        checks = [suite.checks[name] for name in suite.required(level, among)]
        metrics = {each for check in checks if (check.nodes > 0) == (among > 1) for each in check.metrics(gpus > 1)}
        count, findings = comparisons(suite, level, gpus * among, among), []
        for metric in sorted(metrics & METRICS.keys()):
            for under in _conditions(metric, profile, topology, among):
                places: list[Where] = [WORLD]
                if metric == "pair_bandwidth":
                    places = [Pair(gpu(i), gpu(j)) for i, j in permutations(range(gpus), 2)]
                elif METRICS[metric].peer_tolerance is not None:  # of each GPU, or of an adapter of each
                    places = [gpu(index, node) for node in range(among) for index in range(gpus)]
                each = Measurement(metric, dict.fromkeys(places, 1.0), under, definition=metric_under(metric, under))
                within, n = profile.spread_for(each, topology.fabric).within, len(places)
                apart = {at: 1 + within * NORMAL.inv_cdf((i + 0.5) / n) for i, at in enumerate(places)}
                each = replace(each, values=apart)  # as healthy ones are: how much, many nodes show themselves
                findings.append(judge(each, profile, topology, "", rehearsal=False, required=False, comparisons=count))
        found += [replace(each, nodes=among) for each in of_findings(findings)]
    return found


# What a profile that has no limit for it does not say of what the suite measures.
_USUAL: dict[str, dict[str, Condition]] = {"host_bandwidth": {"direction": "host to device", "at_once": "one"}}
_OF_MACHINE = ("fabric", "part")


def _conditions(metric: str, profile: Profile, topology: GpuTopology, nodes: int) -> list[dict[str, Condition]]:
    """Those of the limits and spreads that hold on this machine or between these nodes, the most specific ones."""
    here = {"fabric": topology.fabric, "part": topology.part, "nodes": nodes}
    found: list[dict[str, Condition]] = []
    rows: list[Limit | SpreadRow] = []
    for each in profile.layers:
        rows += (*each.limits, *each.spreads)
    for under in (row.conditions for row in rows if row.metric == metric):
        fits = all(under.get(key, value) == value for key, value in here.items())
        if fits and under.get("ranks", 1) in (1, len(topology.gpus) * nodes):
            found.append({key: value for key, value in under.items() if key not in _OF_MACHINE})
    found = found or [_USUAL.get(metric, {})]
    return [each for each in found if not any(each.items() < other.items() for other in found)]

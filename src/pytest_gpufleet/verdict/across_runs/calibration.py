"""Limits from machines that are known to be good, for what nobody published or a contract asks for more."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from itertools import chain
from statistics import NormalDist, fmean, median
from typing import Any, NamedTuple

from pytest_gpufleet.model import levels
from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.gpu import SOFTWARE
from pytest_gpufleet.model.limit import Calibration, KnownGood, Limit
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import MEASURED_UNDER, METRICS, GiB, KiB, MiB
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.verdict.across_runs.run_comparison import figures, held_to_limits, whose
from pytest_gpufleet.verdict.fleet import equality
from pytest_gpufleet.verdict.fleet.equality import models
from pytest_gpufleet.verdict.noise import factor
from pytest_gpufleet.verdict.outliers import Figure, GpuIds
from pytest_gpufleet.verdict.profile import Profile, for_gpu, of_every_gpu

# How far from the mean of known-good machines a healthy one may be: one-sided tolerance intervals.
#
# For several GPUs of few machines after R. W. Mee and D. B. Owen, Improved Factors for One-Sided Tolerance Limits for
# Balanced One-Way ANOVA Random Models, Journal of the American Statistical Association 78 (1983).

PORTION = 0.999
Z = NormalDist().inv_cdf(PORTION)


class Interval(NamedTuple):
    """Of one GPU of any other machine: `mean` less (or more) `k` times `s` is what 99.9 % of them reach, with a
    confidence of 95 %. `k` is None where one machine says nothing of how machines differ."""

    mean: float
    s: float
    k: float | None


def interval(machines: Sequence[Sequence[Sequence[float]]], floor: float) -> Interval:
    """The interval of a figure: for each machine and each of its places the values of all runs.

    Machines, GPUs of one machine and runs of one GPU vary each by themselves, with degrees of freedom of their own:
    eight GPUs of one board are not eight machines. The three variances add up, with degrees of freedom after
    Satterthwaite. Machines differ by a standard deviation of `floor` at least.
    """
    places = [[fmean(values) for values in machine] for machine in machines]
    means = [fmean(machine) for machine in places]
    between, between_df = _pooled([means])
    within, within_df = _pooled(places)
    runs, runs_df = _pooled([values for machine in machines for values in machine])
    mean, rest = fmean(means), within + runs
    if not between_df:
        return Interval(mean, math.sqrt(rest), None)
    between = max(between, floor**2)
    variance = between + rest
    parts = ((between, between_df), (within, within_df), (runs, runs_df))
    df = variance**2 / sum(part**2 / part_df for part, part_df in parts if part_df)
    # As many independent values would know the mean as well as these machines do.
    n = len(machines) * variance / between
    return Interval(mean, math.sqrt(variance), factor(Z, n, df))


def _pooled(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """The variance of values about the mean of their group, and its degrees of freedom."""
    df = sum(len(group) - 1 for group in groups)
    squares = sum((value - fmean(group)) ** 2 for group in groups for value in group)
    return (squares / df, df) if df else (0.0, 0)


# Machines of one model differ by this much at least: less is luck, and another driver changes as much.
FLOOR = 0.003
# However little a few machines show, a GPU that does worse than all of them by more is not what was calibrated on.
CAP = 0.05
DISAGREEMENT = 0.10
FEWEST_MACHINES = 2
DIGITS = 4


class CannotCalibrate(ValueError):
    """No limits can be made of the runs; the message says which and why."""


@dataclass(frozen=True)
class CalibratedLimits:
    """`limits` extend those of `base`, the shipped profile of the GPU model, if there is one; `kept` counts the figures
    for which its limits hold on. `figures`: what each limit is for."""

    limits: tuple[Limit, ...]
    figures: tuple[Figure, ...]
    base: Profile | None
    kept: int


@dataclass(frozen=True)
class _Known:
    """A figure of known-good machines: the worst place of each run, and by machine and GPUs the values of all runs."""

    figure: Figure
    by_run: dict[str, float]
    by_machine: dict[str, dict[GpuIds, list[float]]]

    @property
    def worst(self) -> float:
        return self.figure.worst(self.by_run.values())

    def __str__(self) -> str:
        conditions = ", ".join(f"{key}={value}" for key, value in self.figure.conditions)
        return f"{self.figure.metric.title} ({conditions})" if conditions else self.figure.metric.title


def calibrate(runs: Mapping[str, Record], *, replace_shipped: bool = False) -> CalibratedLimits:
    """A limit for each figure that the suite judges and no shipped limit holds for, by one-sided tolerance intervals:
    what 99.9 % of the GPUs of such machines reach, with a confidence of 95 %.

    `replace_shipped`: also where a shipped limit holds and is weaker; no shipped limit is ever weakened. The mean of
    the machines less k s is at most 5 % below it (a ratio: 0.05), but no limit is above what any of these GPUs did; of
    one machine, which says nothing of how machines differ, it is these 5 %. CannotCalibrate if a run was not clean, if
    the runs are not of one GPU model and software or differ by more than 10 % in a figure, or if a GPU lies outside of
    the interval that all of them give.
    """
    problems = [f"{name} {problem}" for name, record in runs.items() for problem in _unclean(record)]
    if problems or (problems := _unlike(runs)):
        raise CannotCalibrate("; ".join(problems))
    known = [one for one in _known(runs) if not one.worst <= 0]  # which no limit can be; NaN is refused below
    if not known:
        raise CannotCalibrate("the runs have no figure that a limit could rest on")
    if problems := [problem for one in known if (problem := _disagreement(one))]:
        raise CannotCalibrate("; ".join(problems))
    first = next(iter(runs.values()))
    base, origin, fabric = for_gpu(models(first)), _origin(runs.values()), first.topology.fabric
    shipped_limits = base or of_every_gpu()
    made = {one.figure: limit for one in known if (limit := _limit(one, origin))}
    limits = {
        figure: limit
        for figure, limit in made.items()
        if not _stands(shipped_limits, figure, limit, fabric, replace_shipped)
    }
    if not limits:
        sharper = "none of them is weaker" if replace_shipped else "--replace-shipped replaces those that are weaker"
        raise CannotCalibrate(f"a shipped limit holds for every figure: {sharper}")
    return CalibratedLimits(tuple(limits.values()), tuple(limits), base, len(made) - len(limits))


def _unclean(record: Record) -> list[str]:
    """Why a run does not show that its machine is good."""
    failed = [check.id for check in record.checks.values() if check.outcome == "failed"]
    missed = [finding.check for finding in record.findings if finding.state == "missed"]
    proving = {name.partition("::")[0]: name for name, check in shipped().checks.items() if check.proves_sound}
    ran = {levels.check_name(check).partition("::")[0] for check in record.checks}
    had = {name.partition("::")[0] for name in (record.suite.checks or shipped().checks)}  # the suite of then
    unseen = [file for file in proving if file in had and file not in ran]  # however fast the machine was
    rules = (
        (record.run.rehearsal, "is a rehearsal: its figures are those of CPU ranks"),
        (record.verdict is None, "did not come to its end"),
        (record.broken, f"was cut short: {record.broken}"),
        (record.spoiled, f"is not complete: {'; '.join(record.spoiled)}"),
        (failed, f"was rejected: {', '.join(failed[:3])}{' and others' if len(failed) > 3 else ''} failed"),
        (unseen, f"did not show that its machine is sound: nothing of {' and '.join(unseen)} ran"),
        (missed and not failed, f"was rejected: {', '.join(dict.fromkeys(missed))} missed a limit"),
    )
    return [problem for holds, problem in rules if holds][:1]


def _unlike(runs: Mapping[str, Record]) -> list[str]:
    """In what the runs' machines and software differ, so that one limit cannot hold for all."""
    begun: dict[tuple[object, object], str] = {}
    for name, record in runs.items():
        run = begun.setdefault((record.run.host, record.run.utc), name)
        if run != name:
            return [f"{run} and {name} are one and the same run"]
    mixed = {
        name: models(record) for name, record in runs.items() if len({gpu.name for gpu in record.topology.gpus}) != 1
    }
    unlike = [
        f"they differ in {each.text}"
        for each in equality.unlike(runs)
        if each.fact in ("GPU model", *SOFTWARE.values())
    ]
    return [f"{name} is not of one GPU model: {found}" for name, found in mixed.items()] or unlike


def _machines(runs: Mapping[str, Record]) -> dict[str, str]:
    """By run the first run of the same machine: of one that has a GPU in common with it."""
    gpus: dict[str, set[str]] = {}
    found = {}
    for name, record in runs.items():
        ids = {gpu.lasting_id for gpu in record.topology.gpus}
        found[name] = next((machine for machine, known in gpus.items() if known & ids), name)
        gpus.setdefault(found[name], set()).update(ids)
    return found


def _known(runs: Mapping[str, Record]) -> list[_Known]:
    """What limits can be made for: figures that require one or had one, under conditions that a profile knows."""
    found: dict[Figure, _Known] = {}
    machines = _machines(runs)
    for name, record in runs.items():
        for figure, values in figures(held_to_limits(record.findings)).items():
            under = MEASURED_UNDER.get(figure.name)
            conditions = tuple((key, value) for key, value in figure.conditions if under is None or key in under)
            if under and "fabric" in under and record.topology.fabric != "none":
                conditions = tuple(sorted((*conditions, ("fabric", record.topology.fabric))))
            known = Figure(figure.name, conditions, figure.metric)
            one = found.setdefault(known, _Known(known, {}, {}))
            one.by_run[name] = figure.worst((*values.values(), one.by_run.get(name, next(iter(values.values())))))
            of_gpus = one.by_machine.setdefault(machines[name], {})
            for place, value in values.items():
                of_gpus.setdefault(whose(record, figure, place), []).append(value)
    order = {metric: index for index, metric in enumerate(METRICS)}

    def by_metric(figure: Figure) -> tuple[int, str, list[tuple[str, bool, Condition]]]:
        """Of one metric by conditions, numbers before texts: the two cannot be compared."""
        conditions = [(key, isinstance(value, str), value) for key, value in figure.conditions]
        return order.get(figure.name, len(order)), figure.name, conditions

    return sorted(found.values(), key=lambda one: by_metric(one.figure))


def _disagreement(one: _Known) -> str:
    """Why no limit can be made of this figure; empty if they are."""
    unit = one.figure.metric.unit
    values = ", ".join(f"{value:,.4g} {unit} in {name}" for name, value in one.by_run.items())
    numbers = one.by_run.values()
    if not all(math.isfinite(value) for values in one.by_machine.values() for value in chain(*values.values())):
        return f"{one} is no number: {values}"
    apart = one.figure.share(max(numbers) - min(numbers), median(numbers))
    if apart > DISAGREEMENT:
        return f"{one} differs by {apart:.0%}: {values}"
    mean, s, k = _interval(one)
    if k is not None and abs(one.worst - mean) > k * s:
        return f"{one} has a GPU too far from the mean of {mean:,.4g} {unit} to be one of them: {values}"
    return ""


def _interval(one: _Known) -> Interval:
    values = [list(of_gpus.values()) for of_gpus in one.by_machine.values()]
    mean = fmean(value for machine in values for of_gpu in machine for value in of_gpu)
    return interval(values, FLOOR * one.figure.scale(mean))


def _origin(records: Iterable[Record]) -> str:
    """Where the figures come from: hosts, days, software."""
    records = list(records)
    hosts = sorted({record.run.host for record in records})
    days = sorted({record.run.utc[:10] for record in records})
    topology = records[0].topology
    counts = sorted({len(record.topology.gpus) for record in records})
    return (
        f"{'/'.join(map(str, counts))}x {topology.gpus[0].name}, {', '.join(hosts)}, "
        f"{days[0] if len(days) == 1 else f'{days[0]} to {days[-1]}'}, driver {topology.driver}, "
        f"NCCL {topology.nccl}, torch {topology.torch}"
    )


def _limit(one: _Known, origin: str) -> Limit | None:
    """None where it would be nothing, which no limit can be."""
    metric = one.figure.metric
    higher = metric.better == "higher"
    mean, s, k = _interval(one)
    most = max(CAP * one.figure.scale(mean), abs(mean - one.worst))
    margin = most if k is None else min(k * s, most)
    # Towards the side on which the runs that it comes from still meet it. A ratio is at most 1.
    value = _digits(mean - margin, ROUND_FLOOR) if higher else _digits(mean + margin, ROUND_CEILING)
    value = min(value, 1.0) if metric.unit == "ratio" else value
    if value <= 0:
        return None
    gpus = len(set(chain.from_iterable(chain.from_iterable(one.by_machine.values()))))
    calibration = Calibration(len(one.by_run), len(one.by_machine), gpus, _digits(s), k and _digits(k))
    return Limit(
        one.figure.name, "min" if higher else "max", value, metric.unit, "calibrated", origin,
        dict(one.figure.conditions), "", _digits(mean) or None, given=True, calibration=calibration,
    )  # fmt: skip


def _digits(value: float, rounding: str | None = None) -> float:
    return float(Context(prec=DIGITS, rounding=rounding).create_decimal(repr(value)))


def _stands(profile: Profile, figure: Figure, limit: Limit, fabric: str, replace_shipped: bool) -> bool:
    """Whether a shipped limit stays what holds for this figure: such runs met it."""
    conditions = dict(figure.conditions)
    before = profile.limit_for(Measurement(figure.name, {}, conditions, definition=figure.metric), fabric)
    return before is not None and not before.weak and (not replace_shipped or limit.met_by(before.value))


def too_few(runs: Mapping[str, Record]) -> str:
    """Why limits of these runs may say more of the machines at hand than of good ones; "" if there are enough."""
    machines = len(set(_machines(runs).values()))
    if machines >= FEWEST_MACHINES:
        return ""
    return (
        f"these limits come from {machines} machine, which does not show how machines differ: they are {CAP:.0%} below "
        f"what it did, or what its worst GPU did; take {FEWEST_MACHINES} machines at least, better 4 or more"
    )


HEAD = """\
# Calibrated on known-good runs of pytest-gpufleet {plugins}.
# Each limit is what 99.9 % of the GPUs of such machines reach, with a confidence of 95 %: k standard
# deviations s from the mean (measured). Machines differ by {floor:.1%} at least. k s is at most {cap:.0%},
# or as far as the worst of these GPUs was.
"""


def profile_text(calibrated: CalibratedLimits, runs: Mapping[str, Record], sums: Mapping[str, str]) -> str:
    """A profile as TOML: the limits, what each of them rests on, and the runs with their GPUs.

    `sums` has the SHA-256 of each run's evidence. The same runs give the same text.
    """
    import tomli_w

    base, model = calibrated.base, models(next(iter(runs.values())))
    plugins = sorted({record.run.plugin for record in runs.values()})
    head = HEAD.format(plugins=", ".join(plugins), floor=FLOOR, cap=CAP)
    if base:
        head += "# Where a shipped limit holds that is not repeated here, it holds on.\n"
    content = {
        "name": f"{base.name if base else model}, calibrated",
        **({"extends": base.name} if base else {"match": [model]}),
        # Those of an author's own checks, which a profile has to declare.
        "metric": {
            metric.name: {"unit": metric.unit, "better": metric.better, "title": metric.title}
            for metric in (figure.metric for figure in calibrated.figures)
            if metric.name not in MEASURED_UNDER
        },
        "limit": [_limit_text(limit) for limit in calibrated.limits],
        "calibrated_on": [asdict(_known_good(name, record, sums[name])) for name, record in runs.items()],
    }
    return f"{head}\n{tomli_w.dumps({key: value for key, value in content.items() if value})}"


def _known_good(name: str, record: Record, digest: str) -> KnownGood:
    """Where the limits come from, so that a machine is not held against itself without a word."""
    run, gpus = record.run, record.topology.gpus
    serials = tuple(gpu.serial for gpu in gpus if gpu.serial)
    return KnownGood(name, run.host, run.utc, tuple(gpu.uuid for gpu in gpus), serials, digest)


def _limit_text(limit: Limit) -> dict[str, Any]:
    rests_on = asdict(limit.calibration) if limit.calibration else {}
    table = {
        "metric": limit.metric,
        limit.sense: limit.value,
        "unit": limit.unit,
        "grade": limit.grade,
        "measured": limit.measured,
        "source": limit.source,
        "calibration": {name: value for name, value in rests_on.items() if value is not None},
        "when": {key: _value(key, given) for key, given in limit.conditions.items()},
    }
    return {key: value for key, value in table.items() if value}


def _value(key: str, value: Condition) -> Condition:
    if key == "bytes" and isinstance(value, int):
        for unit, size in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
            if value % size == 0:
                return f"{value // size} {unit}"
    return value

"""What machines that are known to be good reach, and how much they differ, as the limits of a profile."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from itertools import chain
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Literal

from pytest_gpufleet.model import levels
from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.finding import Limit, Reference
from pytest_gpufleet.model.language import rounded, some
from pytest_gpufleet.model.metric import MEASURED_UNDER, METRICS, GiB, KiB, Measurement, Metric, MiB, SpreadRow
from pytest_gpufleet.model.place import SOFTWARE, GpuTopology, Place, Where
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.verdict.across_runs.run_comparison import figures, held_to_limits, whose
from pytest_gpufleet.verdict.fleet import equality
from pytest_gpufleet.verdict.fleet.equality import models
from pytest_gpufleet.verdict.judgement import counted, line_of
from pytest_gpufleet.verdict.noise import Spread, pooled
from pytest_gpufleet.verdict.outliers import Figure, GpuIds, healthy_spread
from pytest_gpufleet.verdict.power import rejected as rejects, size_found
from pytest_gpufleet.verdict.profile import Profile, for_gpu, of_every_gpu

DISAGREEMENT = 0.10  # between runs, at most
FEWEST_MACHINES = 3
DIGITS = 4
FOUND = 0.99
MOST_MACHINES = 1000
NONE = "no profile can be made of these runs: "


@dataclass(frozen=True)
class _Known:
    """A figure of known-good machines."""

    figure: Figure
    topology: GpuTopology
    count: int  # how many comparisons a run makes on such machines
    by_run: dict[str, float]  # the worst place of each
    by_machine: dict[str, dict[GpuIds, list[float]]]  # and by GPUs the values of all runs

    @property
    def worst(self) -> float:
        return self.figure.worst(self.by_run.values())

    @property
    def places(self) -> list[list[float]]:
        """Of each machine what each of its places reached, as the mean of all runs."""
        return [[fmean(values) for values in of_gpus.values()] for of_gpus in self.by_machine.values()]

    @property
    def mean(self) -> float:
        return fmean(map(fmean, self.places))

    def seen(self, source: str = "", date: str = "") -> SpreadRow:
        """How much its places differ within a machine, and the means of machines, where these are several."""
        means, places = [*map(fmean, self.places)], sum(map(len, self.places))
        squares = sum((value - mean) ** 2 for mean, each in zip(means, self.places, strict=True) for value in each)
        df, scale = places - len(means), self.figure.scale(self.mean)
        within = _digits(math.sqrt(squares / df) / scale) if df else None
        between = _digits(stdev(means) / scale) if len(means) > 1 else None
        under = {key: value for key, value in self.figure.conditions if key != "part"}  # all are of one, if of any
        return SpreadRow(self.figure.name, within, between, len(means), places, None, source, date, under)

    def spread(self, machines: int = 0) -> Spread:
        """How much such machines differ, by these and the default of the metric; as if so many had been seen."""
        healthy, seen = healthy_spread(self.figure, self.topology, of_every_gpu()), self.seen()
        n = machines or seen.machines
        df = n * (seen.gpus / seen.machines - 1)
        within, within_df = pooled(healthy.within, healthy.within if seen.within is None else seen.within, df)
        between, between_df = pooled(healthy.between, healthy.between if seen.between is None else seen.between, n - 1)
        return Spread(within, between, within_df, between_df, healthy.matters, healthy.seen)

    def __str__(self) -> str:
        conditions = ", ".join(f"{key}={value}" for key, value in self.figure.conditions)
        return f"{self.figure.metric.title} ({conditions})" if conditions else self.figure.metric.title


def calibrate(
    runs: Mapping[str, Record], sums: Mapping[str, str], *, replace_shipped: bool = False
) -> tuple[str, list[str]]:
    """A profile as TOML, which extends the shipped one of the GPU model if there is one; and what it finds, in lines.

    It has a reference for each figure that the suite judges and no shipped limit holds for: the mean of the machines,
    and how much they and their places differ. Where no default says how much those of a figure usually differ, a floor.
    The same runs give the same text; `sums`: the SHA-256 of the evidence of each. `replace_shipped`: also where a
    shipped limit is weaker. Refused if a run was not clean, if runs differ in GPU model or software, or by more than
    10 % in a figure, or if a machine or place is further off than healthy ones are."""
    problems = [f"{name} {problem}" for name, record in runs.items() for problem in _unclean(record)]
    if problems or (problems := _unlike(runs)):
        raise Refused(f"{NONE}{'; '.join(problems)}")
    machines = _machines(runs)
    # What is 0 no limit can be; NaN is refused below.
    known = [one for one in _known(runs, machines) if not one.worst <= 0]
    if not known:
        raise Refused(f"{NONE}the runs have no measurement that a limit could rest on")
    if problems := [problem for one in known if (problem := _disagreement(one))]:
        raise Refused(f"{NONE}{'; '.join(problems)}")
    model, sources = models(next(iter(runs.values()))), _sources(runs.values())
    base = for_gpu(model)
    made = [(one, limit) for one in known if (limit := _limit(one, *sources))]
    before = base or of_every_gpu()
    seen = {one.figure: one.seen(*sources[:2]) for one, limit in made if limit.reference}
    here = replace(before, path=Path(), base=before, limits=(), spreads=tuple(seen.values()))
    new = [(one, limit) for one, limit in made if not _stands(before, here, limit, one, replace_shipped)]
    if not new:
        sharper = "none of them is weaker" if replace_shipped else "--replace-shipped replaces those that are weaker"
        raise Refused(f"{NONE}a shipped limit holds for every measurement: {sharper}")
    lines = [_reach(one) for one, _ in new]
    if kept := len(made) - len(new):
        lines.append(f"{kept} measurements keep their shipped limits (--replace-shipped)")
    if (count := len({*machines.values()})) < FEWEST_MACHINES:
        of = f"of {count} machine{'s' * (count > 1)}"
        lines.append(f"{of}: mostly default spread. Take {FEWEST_MACHINES} machines at least, better ten")
    own = [one.figure.metric for one, _ in new if one.figure.name not in MEASURED_UNDER]
    # Of shipped limits that stay the spreads stay too, from which their lines follow.
    spreads = [seen[one.figure] for one, _ in new if one.figure in seen]
    return _text(base, model, [limit for _, limit in new], spreads, own, runs, sums), lines


def _unclean(record: Record) -> list[str]:
    why = record.failed or record.reasons  # as of a fault that was seen beside the checks
    proving = {name.partition("::")[0]: name for name, check in shipped().checks.items() if check.proves_sound}
    ran = {levels.check_name(check).partition("::")[0] for check in record.checks}
    had = {name.partition("::")[0] for name in (record.suite.checks or shipped().checks)}  # the suite of then
    unseen = [file for file in proving if file in had and file not in ran]  # however fast the machine was
    rules = (
        (record.run.rehearsal, "is a rehearsal: its measurements are those of CPU ranks"),
        (record.verdict is None, "did not come to its end"),
        (record.broken, f"was cut short: {record.broken}"),
        (record.spoiled, f"is not complete: {'; '.join(record.spoiled)}"),
        (record.failed or record.verdict == "REJECTED", f"was rejected: {some(why, 3)}"),
        (unseen, f"did not show that its machine is sound: nothing of {' and '.join(unseen)} ran"),
    )
    return [problem for holds, problem in rules if holds][:1]


def _unlike(runs: Mapping[str, Record]) -> list[str]:
    """In what the runs' machines and software differ, so that one limit cannot hold for all."""
    begun: dict[tuple[object, object], str] = {}
    for name, record in runs.items():
        if (run := begun.setdefault((record.run.host, record.run.utc), name)) != name:
            return [f"{run} and {name} are one and the same run"]
    mixed = (name for name, record in runs.items() if len({gpu.name for gpu in record.topology.gpus}) != 1)
    unlike = (each for each in equality.unlike(runs) if each.fact in ("GPU model", *SOFTWARE.values()))
    of_several = [f"{name} is not of one GPU model: {models(runs[name])}" for name in mixed]
    return of_several or [f"they differ in {each.text}" for each in unlike]


def _machines(runs: Mapping[str, Record]) -> dict[str, str]:
    """By run the first run of the same machine: of one that has a GPU in common with it."""
    gpus: dict[str, set[str]] = {}
    found = {}
    for name, record in runs.items():
        ids = {gpu.lasting_id for gpu in record.topology.gpus} - {""}
        found[name] = next((machine for machine, known in gpus.items() if known & ids), name)
        gpus.setdefault(found[name], set()).update(ids)
    return found


def _known(runs: Mapping[str, Record], machines: Mapping[str, str]) -> list[_Known]:
    """What limits can be made for: figures that require one or had one, under conditions that a profile knows."""
    found: dict[Figure, _Known] = {}
    parts = {record.topology.part for record in runs.values()}
    part, first = parts.pop() if len(parts) == 1 else "", next(iter(runs.values()))
    for name, record in runs.items():
        for figure, values in figures(held_to_limits(record.findings)).items():
            under = MEASURED_UNDER.get(figure.name)
            conditions = tuple((key, value) for key, value in figure.conditions if under is None or key in under)
            here = {"fabric": record.topology.fabric.replace("none", ""), "part": part}
            conditions += tuple(item for item in here.items() if item[0] in (under or ()) and item[1])
            known = Figure(figure.name, tuple(sorted(conditions)), figure.metric)
            one = found.setdefault(known, _Known(known, first.topology, counted(first), {}, {}))
            one.by_run[name] = figure.worst((*values.values(), one.by_run.get(name, next(iter(values.values())))))
            of_gpus = one.by_machine.setdefault(machines[name], {})
            for place, value in values.items():
                of_gpus.setdefault(whose(record, figure, place), []).append(value)
    order = {metric: index for index, metric in enumerate(METRICS)}

    def by_metric(one: _Known) -> tuple[Any, ...]:
        """Of one metric by conditions, numbers before texts: the two cannot be compared."""
        conditions = [(key, isinstance(value, str), value) for key, value in one.figure.conditions]
        return order.get(one.figure.name, len(order)), one.figure.name, conditions

    return sorted(found.values(), key=by_metric)


def _disagreement(one: _Known) -> str:
    unit = one.figure.metric.unit
    said = ", ".join(f"{rounded(value)} {unit} in {name}" for name, value in one.by_run.items())
    numbers = one.by_run.values()
    if not all(math.isfinite(value) for values in one.by_machine.values() for value in chain(*values.values())):
        return f"{one} is no number: {said}"
    apart = one.figure.share(max(numbers) - min(numbers), median(numbers))
    if apart > DISAGREEMENT:
        return f"{one} differs by {apart:.0%}: {said}"
    for name, of_gpus in one.by_machine.items():  # beside the others, which it must not draw along
        machine = [fmean(values) for values in of_gpus.values()]
        others = {other: values for other, values in one.by_machine.items() if other != name}
        rest = replace(one, by_machine=others or one.by_machine)
        spread = rest.spread()
        off = abs(one.figure.share(fmean(machine) - rest.mean, rest.mean))
        if spread.seen and off > spread.machine_line(len(rest.places), len(machine), one.count).at:
            return f"{one} has a machine too far from the mean of {rounded(rest.mean)} {unit} to be one of them: {said}"
        allowed = spread.gpu_line(len(machine), one.count).at if len(machine) > 1 else math.inf
        if any(abs(one.figure.share(value - median(machine), median(machine))) > allowed for value in machine):
            return f"{one} has a GPU too far from the others of its machine to be one of them: {said}"
    return ""


def _reach(one: _Known) -> str:
    """What a limit finds of a machine and of each place; and of how many machines it would find half of that."""
    metric, machines, places = one.figure.metric, len(one.places), min(map(len, one.places))
    here, of = one.spread().machine_line(machines, places, one.count), machines
    while of <= MOST_MACHINES and (
        size_found(FOUND, one.spread(of).machine_line(of, places, one.count)) > size_found(FOUND, here) / 2
    ):
        of = math.ceil(1.25 * of)
    place = one.spread().gpu_line(places, one.count) if places > 1 else None
    each = f", one of {places} places {size_found(FOUND, place):.1%} worse" if place else ""
    more = f"{of} machines would halve that" if of <= MOST_MACHINES else "more machines would not halve that"
    return (
        f"{one}: {rounded(one.mean)} {metric.unit} of {machines} machine{'s' * (machines > 1)}; limit "
        f"{here.at:.1%} {'below' if metric.better == 'higher' else 'above'} it, which {100 * (1 - rejects(here)):.6g}% "
        f"of healthy machines meet; finds with {FOUND:.0%} a machine {size_found(FOUND, here):.1%} worse{each}; {more}"
    )


def _sources(records: Iterable[Record]) -> tuple[str, str, str, str]:
    """Where the figures come from: hosts, days, software; the last day; the versions of NCCL and of the driver."""
    records = list(records)
    hosts = sorted({record.run.host for record in records})
    days = sorted({record.run.utc[:10] for record in records})
    counts = sorted({len(record.topology.gpus) for record in records})
    topology = records[0].topology
    source = (
        f"{'/'.join(map(str, counts))}x {topology.gpus[0].name}, {', '.join(hosts)}, "
        f"{days[0] if len(days) == 1 else f'{days[0]} to {days[-1]}'}, driver {topology.driver}, "
        f"NCCL {topology.nccl}, torch {topology.torch}"
    )
    return source, days[-1], topology.nccl or "", topology.driver or ""


def _limit(one: _Known, source: str, date: str, nccl: str, driver: str) -> Limit | None:
    """None where it would be nothing, which no limit can be."""
    metric, mean, spread = one.figure.metric, _digits(one.mean), one.spread()
    higher, under = metric.better == "higher", dict(one.figure.conditions)
    sense: Literal["min", "max"] = "min" if higher else "max"
    known = Limit(metric.name, sense, mean, metric.unit, "calibrated", source, under, "", given=True)
    if spread.seen:
        return replace(known, reference=Reference(mean, len(one.places), date, nccl, driver)) if mean else None
    # Of each place, and towards the side on which all of these meet it. A ratio is at most 1.
    margin = spread.machine_line(len(one.places), 1, one.count).at * one.figure.scale(one.mean)
    margin = max(margin, abs(one.mean - one.worst))
    floor = _digits(one.mean - margin, ROUND_FLOOR) if higher else _digits(one.mean + margin, ROUND_CEILING)
    floor = min(floor, 1.0) if metric.unit == "ratio" else floor
    return replace(known, value=floor, measured=mean or None, date=date) if floor > 0 else None


def _digits(value: float, rounding: str | None = None) -> float:
    return float(Context(prec=DIGITS, rounding=rounding).create_decimal(repr(value)))


def _stands(before: Profile, here: Profile, limit: Limit, one: _Known, replace_shipped: bool) -> bool:
    """Whether a shipped limit stays what holds. A reference is worth more than a floor of this project."""
    values: dict[Where, float] = {Place(0, "gpu", index): value for index, value in enumerate(one.places[0])}
    measured = Measurement(one.figure.name, values, dict(one.figure.conditions), definition=one.figure.metric)
    stated = before.limit_for(measured, one.topology.fabric, one.topology.part)
    if stated is None or (limit.reference and stated.grade == "project"):
        return False
    if not replace_shipped:
        return True
    shipped_line = line_of(stated, measured, before, one.topology, one.count)
    return line_of(limit, measured, here, one.topology, one.count).met_by(shipped_line.value)


def _text(
    base: Profile | None, model: str, limits: Iterable[Limit], spreads: Iterable[SpreadRow], own: Iterable[Metric],
    runs: Mapping[str, Record], sums: Mapping[str, str],
) -> str:  # fmt: skip
    import tomli_w

    plugins = ", ".join(sorted({record.run.plugin for record in runs.values()}))
    head = (
        f"# Calibrated on known-good runs of pytest-gpufleet {plugins}.\n# A reference is the mean of the machines; "
        "[[spread]] says how much they and their GPUs differ (standard deviations).\n"
    )
    if base:
        head += "# Where a shipped limit holds that is not repeated here, it holds on.\n"
    content = {
        "name": f"{base.name if base else model}, calibrated",
        **({"extends": base.name} if base else {"match": [model]}),
        "metric": {each.name: {"unit": each.unit, "better": each.better, "title": each.title} for each in own},
        "limit": [
            {
                "metric": limit.metric,
                **({"reference": limit.reference.value, **asdict(limit.reference), "value": None} if limit.reference
                   else {limit.sense: limit.value, "measured": limit.measured, "date": limit.date}),
                "unit": limit.unit, "grade": limit.grade, "source": limit.source, "when": _when(limit.conditions),
            }
            for limit in limits
        ],
        "spread": [
            {**asdict(row), "conditions": None, "when": _when(row.conditions)}
            for row in spreads
            if row.between is not None or row.within is not None
        ],
        # So that a machine is not held against itself without a word.
        "calibrated_on": [
            {"run": name, "host": run.host, "utc": run.utc, "uuids": [gpu.uuid for gpu in gpus],
             "serials": [gpu.serial for gpu in gpus if gpu.serial], "evidence_sha256": sums[name]}
            for name, run, gpus in ((name, each.run, each.topology.gpus) for name, each in runs.items())
        ],
    }  # fmt: skip
    for key in ("limit", "spread"):
        tables: Any = content[key]
        content[key] = [{name: value for name, value in each.items() if value not in (None, "", {})} for each in tables]
    return f"{head}\n{tomli_w.dumps({key: value for key, value in content.items() if value})}"


def _when(conditions: Mapping[str, Condition]) -> dict[str, Condition]:
    """With bytes as people write them."""
    when, size = dict(conditions), conditions.get("bytes")
    for unit, each in (("KiB", KiB), ("MiB", MiB), ("GiB", GiB)):
        if isinstance(size, int) and size % each == 0:
            when["bytes"] = f"{size // each} {unit}"
    return when

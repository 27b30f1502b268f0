"""What other programs read of a run: figures, curves, losses and telemetry, a row a point, for experiment trackers and
spreadsheets; verdict, figures and faults for Prometheus, by the textfile collector of node_exporter.

From the beginning of a run on the textfile says that it is running, so that no verdict stays when the machine dies."""

import csv
import io
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from pytest_gpufleet import safe_files
from pytest_gpufleet.machine.gpu_facts import READINGS
from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.events import Outcome
from pytest_gpufleet.model.finding import GRADES
from pytest_gpufleet.model.levels import check_name
from pytest_gpufleet.model.place import WORLD, Where, grouped
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report.banner import STAMPS
from pytest_gpufleet.report.wording import ALONG, clean, one_line
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.accusations import all_faults
from pytest_gpufleet.verdict.across_runs.run_comparison import figures
from pytest_gpufleet.verdict.outliers import Figure

QUANTITIES = tuple(name for name in READINGS if name != "clock_event_reasons")  # whose value is a set of bits
UNITS = {
    "percent": "%", "bytes": "B", "c": "°C", "watts": "W", "mhz": "MHz", "kilobytes_per_second": "kB/s",
}  # fmt: skip
# SwanLab would describe the machine that it runs on, and not the one of the run.
NO_PROBE = dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "monitor"), False)

About = Mapping[str, str]  # what tells a run from others


class Point(NamedTuple):
    """`kind`: figures, curves, losses or telemetry. `along`: what the steps are, "" of a figure. `step`: 0 of a figure,
    the size of a curve, the steps done of losses, of telemetry milliseconds since the first sample. `time`: since the
    epoch; of figures and curves when the run began, of losses when their check wrote them."""

    kind: str
    name: str
    unit: str
    conditions: str
    place: str
    along: str
    step: int
    time: float
    value: float

    @property
    def tag(self) -> str:
        """What trackers call its series: they group by what stands before the first slash."""
        return "/".join(filter(None, (self.kind, self.name, self.conditions, self.place)))


def about(record: Record, sha256: str) -> About:
    """`sha256`: of the evidence."""
    run, topology = record.run, record.topology
    models = ", ".join(dict.fromkeys(gpu.name for gpu in topology.gpus))
    labels = {
        "host": run.host, "utc": run.utc, "level": run.level, "verdict": record.verdict or "", "gpus": models,
        "number_of_gpus": str(len(topology.gpus)),
        **{name: getattr(topology, name) or "" for name in ("driver", "cuda", "nccl", "torch")},
        "pytest_gpufleet": run.plugin, "evidence_sha256": sha256,
    }  # fmt: skip
    return {name: clean(value) for name, value in labels.items()}


def points(record: Record) -> list[Point]:
    """Those of a series one after the other. What is no number is left out."""
    every = (*_figures_and_curves(record), *_losses(record), *_telemetry(record))
    return [point for point in every if math.isfinite(point.value)]


def _figures_and_curves(record: Record) -> Iterator[Point]:
    """Of curves the figures that differ in nothing but a size, at least two of them."""
    began = record.run.utc.seconds
    found: dict[tuple[str, str, str, str, str], dict[int, float]] = defaultdict(dict)
    for figure, values in figures(record.findings).items():
        name, unit, conditions = clean(figure.name), figure.metric.unit, dict(figure.conditions)
        for place, value in values.items():
            yield Point("figures", name, unit, _words(conditions), str(place), "", 0, began, value)
            for along, changing in ALONG.items():
                size, rest = conditions.get(along), {key: of for key, of in conditions.items() if key not in changing}
                if isinstance(size, int) and not isinstance(size, bool) and math.isfinite(value):
                    found[f"{name} by {along}", unit, _words(rest), str(place), along][size] = value
    for labels, curve in found.items():
        if len(curve) > 1:
            yield from (Point("curves", *labels, size, began, curve[size]) for size in sorted(curve))


def _losses(record: Record) -> Iterator[Point]:
    """Named as the check that trains. Of what a check trained several times in the same way the last one."""
    last = {
        (clean(check_name(each.check)), "", _words(each.curve.training), str(each.curve.place)): each
        for each in record.losses
    }
    for labels, each in last.items():
        for step, loss in zip(each.curve.steps, each.curve.losses, strict=True):
            yield Point("losses", *labels, "steps", step, each.t.seconds, loss)


def _telemetry(record: Record) -> Iterator[Point]:
    for name in QUANTITIES:
        unit = next((unit for end, unit in UNITS.items() if name.endswith(f"_{end}")), "")
        for index, gpu in enumerate(record.topology.gpus):
            for sample in record.telemetry:
                value = sample.gpus[index].get(name) if index < len(sample.gpus) else None
                if isinstance(value, int | float):
                    since, labels = sample.time - record.telemetry[0].time, (name, unit, "", str(gpu.place))
                    yield Point("telemetry", *labels, "milliseconds", round(1000 * since), sample.time, float(value))


def _words(conditions: Mapping[str, Condition]) -> str:
    return clean(", ".join(f"{name}={value}" for name, value in conditions.items()))


# How a cell begins that spreadsheets compute (OWASP, "CSV Injection"); in many countries they split at ";".
FORMULA = re.compile(r"(^|[;\t])(?=\s*[=+@-])")


def to_csv(about: About, points: Sequence[Point], folder: Path) -> None:
    """A file for each kind. A text from evidence is never a formula, nor more than one line."""
    tables: dict[str, Sequence[tuple[Any, ...]]] = {"run": [("name", "value"), *about.items()]}
    for kind, of_kind in grouped((point.kind, point[1:]) for point in points).items():
        tables[kind] = [Point._fields[1:], *of_kind]
    for name, rows in tables.items():
        file, safe = io.StringIO(), partial(FORMULA.sub, r"\1'")
        lines = ([safe(one_line(each)) if isinstance(each, str) else each for each in row] for row in rows)
        csv.writer(file, lineterminator="\n").writerows(lines)
        safe_files.write_text(folder / f"{name}.csv", file.getvalue())


def to_tensorboard(about: About, points: Sequence[Point], folder: Path) -> None:
    import numpy
    from tensorboard.summary import DirectoryOutput, Writer

    run = ", ".join(f"{name} {value}" for name, value in about.items() if value)
    writer = Writer(DirectoryOutput(str(folder)))
    for each in points:
        described = f"{each.unit}{f', by {each.along}' if each.along else ''}; {run}"
        value = numpy.float32(each.value)  # as TensorBoard stores scalars
        writer.add_scalar(each.tag, value, each.step, wall_time=each.time, description=described)
    writer.close()


def to_swanlab(about: About, points: Sequence[Point], folder: Path) -> None:
    """An offline run, which `swanlab sync` sends to a server."""
    import swanlab

    settings = swanlab.Settings(interactive=False, probe=NO_PROBE, terminal={"proxy_type": "none"})
    name = " ".join(filter(None, (about["host"], about["utc"])))
    run = swanlab.init(
        mode="offline", log_dir=str(folder), project="gpufleet", name=name, config=dict(about), settings=settings
    )
    for of_kind in grouped((point.kind, point) for point in points).values():
        for step, at_step in sorted(grouped((point.step, point) for point in of_kind).items()):
            run.log({point.tag: point.value for point in at_step}, step=step)
    run.finish()


# Into an empty folder; OSError if it cannot be.
WRITERS = {"tensorboard": to_tensorboard, "swanlab": to_swanlab, "csv": to_csv}


HELP = {
    "gpufleet_running": "Whether an acceptance run goes on.",
    "gpufleet_verdict": "Whether the last acceptance run came to this verdict; all 0 while it goes on.",
    "gpufleet_run_timestamp_seconds": "When the last acceptance run began.",
    "gpufleet_run_end_timestamp_seconds": "When the last acceptance run ended; NaN while it goes on.",
    "gpufleet_exit_status": "Exit status of the last acceptance run.",
    "gpufleet_figures_judged": "Measurements of the last acceptance run by the grade of their limits.",
    "gpufleet_basis": "Whether this is the lowest grade of the limits of the last acceptance run.",
    "gpufleet_checks": "Checks of the last acceptance run by outcome.",
    # Of a run on many nodes what the own run of each came to; of one on its own machine nothing.
    "gpufleet_node_verdict": "Whether the own run of a node came to this verdict in the last run of many.",
    "gpufleet_node_lost": "Whether a node was lost in the last acceptance run of many.",
    "gpufleet_figure": "What was measured, by place; the label unit has its unit.",
    "gpufleet_limit": "The limit of a measurement: min or max.",
    "gpufleet_fault": "What is wrong, by code and place.",
}


def write_textfile(path: Path, record: Record) -> None:
    """Write the textfile for a run, which goes on as long as it has no verdict. OSError if it cannot be written."""
    registry = CollectorRegistry()
    found = _series(record)
    for name, series in ((name, found[name]) for name in HELP if found[name]):
        names = sorted({label for labels, _ in series for label in labels})
        gauge = Gauge(name, HELP[name], names, registry=registry)
        for labels, value in series:  # a label that a series does not have is empty, which to Prometheus is the same
            gauge.labels(**{label: clean(labels.get(label, "")) for label in names}).set(value)
    safe_files.write_text(path, generate_latest(registry).decode())


def _series(record: Record) -> dict[str, list[tuple[Mapping[str, str], float]]]:
    """By the names of HELP a value for each set of labels."""
    run, running, host = record.run, record.verdict is None, {"host": record.run.host}
    outcomes = Counter(check.outcome for check in record.checks.values())
    counts, worst = basis.by_grade(record), basis.lowest(record)
    status = math.nan if record.exit_status is None else record.exit_status
    nodes = record.hosts if record.of_cluster else {}
    ends = {node: end.verdict for node, end in record.finished.items()}
    serials = {gpu.place: gpu.serial or "" for gpu in record.topology.gpus}

    def at(where: Where) -> dict[str, str]:
        found = {"place": str(where), "serial": "-".join(serials[part] for part in where.parts if part in serials)}
        nodes = dict.fromkeys(record.hosts.get(part.node, "") for part in where.parts if part.is_on_node)
        return {**found, "node": "-".join(nodes)} if record.of_cluster else found

    return {
        "gpufleet_running": [(host, float(running))],
        "gpufleet_verdict": [({"verdict": word, **host}, float(word == record.verdict)) for word in STAMPS],
        "gpufleet_run_timestamp_seconds": [(host, run.utc.seconds or math.nan)],
        "gpufleet_run_end_timestamp_seconds": [(host, math.nan if running else time.time())],
        "gpufleet_exit_status": [(host, status)],
        "gpufleet_figures_judged": [({"grade": grade}, counts.get(grade, 0)) for grade in GRADES],
        "gpufleet_basis": [({"grade": grade, **host}, float(grade == worst)) for grade in GRADES],
        "gpufleet_checks": [({"outcome": name}, outcomes[name]) for name in get_args(Outcome)],
        "gpufleet_node_verdict": [
            ({"verdict": word, "node": name}, float(word == ends.get(node)))
            for node, name in nodes.items()
            for word in STAMPS
        ],
        "gpufleet_node_lost": [({"node": name}, float(node in record.lost)) for node, name in nodes.items()],
        "gpufleet_figure": [
            ({**_labels(figure), **at(place)}, value)
            for figure, values in figures(record.findings).items()
            for place, value in values.items()
        ],
        "gpufleet_limit": [
            ({**_labels(figure), "sense": finding.limit.sense}, finding.limit.value)
            for finding in record.findings
            if finding.limit
            for figure in figures([finding])
        ],
        "gpufleet_fault": [
            ({"code": str(fault.kind.number), "name": fault.name, "action": fault.kind.action, **at(where)}, 1.0)
            for fault in all_faults(record)
            for where in fault.subjects or (WORLD,)
        ],
    }


def _labels(figure: Figure) -> dict[str, str]:
    """Conditions have a prefix, since authors of checks may call them as they like: `instance`, `place`, `job`."""
    conditions = {f"condition_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": str(value) for name, value in figure.conditions}
    return {"metric": figure.name, "unit": figure.metric.unit, **conditions}

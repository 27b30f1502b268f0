"""The page that somebody signs: verdict, what was missed, the machine, every figure beside its limit."""

from __future__ import annotations

import inspect
import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jinja2
from markupsafe import Markup

from pytest_gpufleet.hardware.topology import Gpu, GpuTopology
from pytest_gpufleet.probes.reading import METRICS
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.gap import gaps
from pytest_gpufleet.report.miss import failed_checks, misses
from pytest_gpufleet.report.stamp import reasons, stamp
from pytest_gpufleet.verdict.evidence import Check, Record
from pytest_gpufleet.verdict.finding import Finding

HERE = Path(__file__).parent
ABSENT = "—"
# Half of it from the top and half from the end: the cause of a failure is in one of the two.
LONGEST_MESSAGE = 4000

# Kinds of links from `nvidia-smi topo -m`, nearest first, and what the report says of them.
LINKS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge",
    "NODE": "one NUMA node",
    "SYS": "across NUMA nodes",
}


@dataclass(frozen=True)
class Failure:
    """A check that failed: what it said, and what its author says about it."""

    id: str
    title: str
    message: str
    advice: tuple[str, ...]  # paragraphs


@dataclass(frozen=True)
class Row:
    """A finding in the table of figures."""

    conditions: str
    details: str
    measured: str
    spread: tuple[str, ...]
    limit: str
    kind: str
    source: str
    place: str
    state: str
    symbol: str
    reason: str


def summary(record: Record) -> str:
    """The report of a run as an HTML fragment for the top of pytest-html's page; see `stylesheet`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("summary.html.jinja").render(
        record=record,
        run=defaultdict(lambda: None, record.run),  # a run that died early tells less
        stamp=stamp(record),
        reasons=reasons(record),
        counts=_counts(record),
        misses=misses(record),
        failures=[_failure(check) for check in failed_checks(record)],
        facts=_facts(record),
        environment=_environment(record),
        inventory=[(gpu.place, _inventory_row(gpu)) for gpu in record.topology.gpus],
        links=_links(record.topology),
        kinds=LINKS,
        groups=_groups(record.findings),
        plots=_plots(record),
        gaps=gaps(record),
        carried=[check for check in record.checks.values() if check.run],
        symbols=wording.SYMBOLS,
    )


def stylesheet() -> Path:
    """The file for pytest-html's option --css. It styles the whole page, pytest-html's own tables too."""
    return HERE / "report.css"


def _shown(value: Any) -> Any:
    """What the template prints for a value: a dash where nothing is known, no control characters."""
    if value is None or value == "":
        return ABSENT
    return value if isinstance(value, Markup | int | float) else wording.clean(str(value))


def _counts(record: Record) -> list[str]:
    """The run in three figures: GPUs, checks, limits."""
    models = Counter(gpu.name for gpu in record.topology.gpus)
    outcomes = Counter(check.outcome for check in record.checks.values())
    states = Counter(str(finding.state) for finding in record.findings)
    machines = [f"{count} x {name}" for name, count in models.items()] or ["no GPU"]
    return [
        ", ".join(machines),
        _tally("check", outcomes, ("passed", "failed", "skipped", "not applicable")),
        _tally("figure", states, ("met", "missed", "not judged", "for information")),
    ]


def _tally(noun: str, counts: Counter[str], order: Sequence[str]) -> str:
    total = counts.total()
    parts = [f"{counts[name]} {name}" for name in order if counts[name]]
    return f"{total} {noun}{'' if total == 1 else 's'}" + (f": {', '.join(parts)}" if parts else "")


def _failure(check: Check) -> Failure:
    message = check.message
    if len(message) > LONGEST_MESSAGE:
        half = LONGEST_MESSAGE // 2
        left_out = f"[{wording.number(len(message) - 2 * half, 9)} characters left out; evidence.jsonl has them]"
        message = f"{message[:half]}\n\n{left_out}\n\n{message[-half:]}"
    advice = tuple(part for part in inspect.cleandoc(check.doc).split("\n\n") if part.strip())
    return Failure(check.id, check.title or check.id, message, advice)


def _facts(record: Record) -> dict[str, list[tuple[str, Any]]]:
    """The machine and the run, as they stand in the two halves of one table."""
    run, topology = record.run, record.topology
    command = run.get("command")
    return {
        "The run": [
            ("Host", run.get("host")),
            ("Date (UTC)", run.get("utc")),
            ("Command", shlex.join(command) if isinstance(command, list | tuple) else command),
            ("Level", run.get("level")),
            ("GPUs asked for", run.get("gpus")),
            ("Profile", run.get("profile")),
        ],
        "The software": [
            ("Driver", topology.driver),
            ("CUDA (driver, torch)", ", ".join(filter(None, (topology.cuda_driver, topology.cuda)))),
            ("cuDNN", topology.cudnn),
            ("NCCL", topology.nccl),
            ("torch", topology.torch),
            ("Python, pytest", ", ".join(str(run[key]) for key in ("python", "pytest") if run.get(key))),
            ("pytest-gpufleet", run.get("plugin")),
        ],
    }


def _environment(record: Record) -> list[tuple[str, str]]:
    variables = record.run.get("environment")
    return sorted((str(name), str(value)) for name, value in variables.items()) if variables else []


def _inventory_row(gpu: Gpu) -> list[Any]:
    generation = _of(gpu.pcie_generation, gpu.pcie_generation_max, "gen {}")
    width = _of(gpu.pcie_width, gpu.pcie_width_max, "x{}")
    return [
        gpu.name,
        gpu.serial,
        gpu.uuid,
        gpu.pci_bus_id,
        wording.number(gpu.memory_bytes / (1 << 30)),
        gpu.vbios,
        gpu.board_part_number,
        ", ".join(filter(None, (generation, width))),
        gpu.nvlinks_active,
        None if gpu.power_limit_watts is None else f"{wording.number(gpu.power_limit_watts)} W",
    ]


def _of(now: int | None, most: int | None, form: str) -> str:
    """A PCIe figure, and its maximum where the two differ."""
    if now is None:
        return ""
    return form.format(now) + (f" of {most}" if most not in (None, now) else "")


def _links(topology: GpuTopology) -> list[tuple[str, list[tuple[str, str]]]]:
    """The rows of the link matrix: the GPU, then the word and the kind of each of its links."""
    if len(topology.gpus) < 2:
        return []
    return [
        (gpu.place, [(link, next((kind for kind in LINKS if link.startswith(kind)), "")) for link in links])
        for gpu, links in zip(topology.gpus, topology.links, strict=False)
    ]


def _groups(findings: Sequence[Finding]) -> list[tuple[str, str, list[Row]]]:
    """The findings by metric (title, direction, rows), in the order in which the metrics are defined."""
    known = list(METRICS)
    names = dict.fromkeys(finding.measurement.metric for finding in findings)
    ordered = sorted(names, key=lambda name: known.index(name) if name in known else len(known))
    groups = []
    for name in ordered:
        of_name = [finding for finding in findings if finding.measurement.metric == name]
        metric = wording.metric(of_name[0])
        groups.append(
            (
                metric.title[:1].upper() + metric.title[1:],
                f"{metric.better} is better",
                [_row(finding) for finding in of_name],
            )
        )
    return groups


def _row(finding: Finding) -> Row:
    measurement, limit, unit = finding.measurement, finding.limit, wording.metric(finding).unit
    place, measured = "", ""
    spread: tuple[str, ...] = ()
    if worst := wording.worst(finding):
        place, measured = wording.place(worst[0]), wording.quantity(worst[1], unit)
        spread = _spread(measurement.samples.get(worst[0], ()), measurement.values.values(), unit)
    text = ""
    if limit and worst:
        measured, text = wording.beside(worst[1], limit)
    return Row(
        conditions=", ".join(wording.words(measurement.conditions)),
        details=", ".join(wording.words(measurement.details)),
        measured=measured,
        spread=spread,
        limit=text,
        kind=limit.kind if limit else "",
        source=limit.source if limit else "",
        place=place,
        state=finding.state,
        symbol=wording.SYMBOLS.get(finding.state, "○"),
        reason=finding.reason,
    )


def _spread(samples: Sequence[float], values: Any, unit: str) -> tuple[str, ...]:
    """How far the repetitions of the worst place differ, and how far the places do."""
    parts = []
    if len(samples) > 1:
        parts.append(f"{_range(samples, unit)} in {len(samples)} samples")
    if len(places := list(values)) > 1:
        middle = wording.quantity(median(places), unit)
        parts.append(f"{_range(places, unit)} over {len(places)} places, median {middle}")
    return tuple(parts)


def _range(values: Sequence[float], unit: str) -> str:
    low, high = wording.quantity(min(values), unit), wording.quantity(max(values), unit)
    return f"{low.removesuffix(' ' + unit)} to {high.removesuffix(' ' + unit)}"


def _plots(record: Record) -> list[tuple[str, Markup]]:
    """Every drawing of the report with its caption. matplotlib is loaded here, once there is something to draw."""
    if not (record.findings or record.telemetry):
        return []
    from pytest_gpufleet.report import plots, telemetry

    drawn = [
        ("Bus bandwidth against message size", plots.busbw_svg(record.findings)),
        ("Training throughput", plots.training_svg(record.findings)),
        *telemetry.svgs(record.telemetry, [gpu.place for gpu in record.topology.gpus], record.spans),
    ]
    return [(caption, Markup(svg)) for caption, svg in drawn if svg]

"""`gpufleet power`: how small a fault is found, and how often a healthy machine is rejected."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pytest_gpufleet.commands import command, verify
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.levels import LEVELS
from pytest_gpufleet.model.metric import METRICS
from pytest_gpufleet.model.place import grouped
from pytest_gpufleet.report import tables, wording
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.run.settings import whole_number
from pytest_gpufleet.verdict import power, profile
from pytest_gpufleet.verdict.across_runs.rejudgement import judge_again
from pytest_gpufleet.verdict.judgement import FORMULA
from pytest_gpufleet.verdict.power import Comparison

COLUMNS_WIDE = 150
NARROW = ("slow", "measurement", "line", "1 %", "2 %", "5 %", "10 %", "95% from")  # those of a narrower terminal
COLUMNS = ("line", *(f"{100 * size:g} %" for size in power.SIZES), *(f"{at:.0%} from" for at in power.PROBABILITIES))
# What distinguishes measurements of one metric.
TOLD_BY = ("precision", "operation", "recipe", "direction", "collective", "bytes", "nvls")


@command.subcommand(
    "print how small a fault is found, with which probability, and how often a healthy machine is rejected",
    command.argument("of", metavar="PROFILE|RUN", help="a shipped profile like h200, a TOML file, or a run's folder"),
    command.argument("--gpus", type=whole_number, default=8, metavar="N", help="GPUs of a node (default: 8)"),
    command.argument("--nodes", type=whole_number, default=1, metavar="M", help="nodes (default: 1)"),
    command.argument("--fleet-level", choices=LEVELS, default="standard", help="level (default: standard)"),
    command.file("--plot", help="also write the probabilities as curves, an SVG"),
    details="By the model that makes the lines: healthy machines and GPUs differ by the spreads of the profile, here "
    "at the upper end of their 95 % confidence; a second measurement changes nothing, since the chips are the same; a "
    "fault is found if the best single measurement of it misses its line.",
)  # fmt: skip
def show_power(given: argparse.Namespace) -> int:
    command.check_output(given.plot)
    made, title = _comparisons(given)
    console = command.new_console(highlight=False)
    narrow = console.is_terminal and console.width < COLUMNS_WIDE
    console.width = console.width if narrow else COLUMNS_WIDE
    found = (
        by_fault(made, f"{title}: probability that a slowdown of this size is found, in %"),
        by_measurement(made, "by each measurement"),
    )
    with command.printing():
        for table in found:
            shown = tables.on_screen(table)
            shown.columns = [each for each in shown.columns if not narrow or str(each.header) in NARROW]
            console.print(shown)
        for line in rejects(made, given.nodes):
            command.print_line(line)
    if given.plot:
        command.write(given.plot, plot(made, title))
        command.print_line(f"plot: {given.plot}")
    return 0


def _comparisons(given: argparse.Namespace) -> tuple[list[Comparison], str]:
    """Of a run those that it made, of a profile those that it would make; and of what they are."""
    path = Path(given.of)
    if path.is_dir():
        folder = RunFolder(path)
        with folder.of_anybody():
            record = verify.checked(folder).record
            if record.judging.formula < FORMULA:
                record = judge_again(record, profile.choose(None, [gpu.name for gpu in record.topology.gpus]))
            if record.run.rehearsal or not record.topology.gpus:
                raise Refused(f"{folder} has measured no GPUs, of which alone it is known how much they differ")
            return power.of_findings(record.findings), f"{record.run.host}, {len(record.topology.gpus)} GPUs"
    shipped = {each.path.stem: each for each in (*profile.shipped(), profile.of_every_gpu())}
    limits = shipped.get(given.of.lower())
    if limits is None and not path.exists():
        raise Refused(f"{path} is no folder of a run, no file, and no profile that is shipped ({', '.join(shipped)})")
    limits = limits or profile.load(path)
    nodes = f" on each of {given.nodes} nodes" if given.nodes > 1 else ""
    title = f"{limits.name}, {given.gpus} GPUs{nodes}, level {given.fleet_level}"
    return power.of_profile(limits, given.gpus, given.nodes, given.fleet_level), title


def by_fault(made: Sequence[Comparison], title: str) -> tables.Table:
    """Of each fault the probability that its best measurement finds it; those of one GPU go up and down together."""
    shown = [(fault, power.showing(fault, made)) for fault, _ in power.FAULTS]
    return tables.Table(title, "slow", COLUMNS, tuple(_row(fault, some) for fault, some in shown if some))


def by_measurement(made: Sequence[Comparison], title: str) -> tables.Table:
    """Each measurement by itself, those with the same line in one row; without fixed tolerances."""
    known = (each for each in made if not each.fixed)
    lines = (((each.metric, each.held, _percent(each.line.at), _percent(each.line.most)), each) for each in known)
    rows = []
    for (metric, *_), some in grouped(lines).items():
        under = [dict(each.conditions) for each in some]
        words = [
            "/".join(dict.fromkeys(word for each in under if key in each for word in wording.words({key: each[key]})))
            for key in TOLD_BY
        ]
        about = ", ".join(filter(None, words))
        rows.append(_row(f"{METRICS[metric].title}{about and f': {about}'}", some[:1]))
    return tables.Table(title, "measurement", COLUMNS, tuple(rows))


def _row(name: str, some: Sequence[Comparison]) -> tables.Row:
    """What the best of these finds, by size; the first finds the smallest."""
    first, found = some[0], [max(power.found(size, each.line) for each in some) for size in power.SIZES]
    sure = [_percent(power.size_found(probability, first.line)) for probability in power.PROBABILITIES]
    against = f"{_percent(first.line.at)} below {first.held}{', fixed' if first.fixed else ''}"
    shown = (f"{100 * each:.{1 if 0.99 <= each < 0.9995 else 0}f}" for each in found)  # 100 is next to certain
    return tables.row(name, against, *shown, *sure)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.{2 if fraction < 0.1 else 3}g} %"


def of_1000(chance: float) -> str:
    return f"{float(f'{1000 * chance:.2g}'):,g} of 1,000" if chance >= 1e-6 else "below 0.001 of 1,000"


def rejects(made: Sequence[Comparison], nodes: int = 1) -> list[str]:
    """How often a healthy machine is rejected, by the model and by what is on record."""
    lines = []
    for among, some in grouped((each.nodes, each) for each in made).items():
        seen, most = power.rejected_by_chance(some)
        count, any_node = sum(each.often for each in some if not each.fixed), 1 - (1 - most) ** nodes
        model = f"{of_1000(seen)} by the spreads that are known, {of_1000(most)} at their upper ends"
        what = f"{among} healthy nodes and rejected between them" if among > 1 else "healthy and rejected"
        lines.append(f"{what}, by the model: {model} ({count} comparisons)")
        if among == 1 < nodes:
            lines.append(f"of {nodes} healthy nodes any is rejected by its own run: at most {any_node:.2%}")
    healthy, rejected = power.RECORDED_HEALTHY, power.RECORDED_REJECTED
    so = f"{rejected} of {healthy} machines, so at most {3 / healthy:.0%}; some limits were made from them"
    return [*lines, f"healthy and rejected, on record: {so}"]


def plot(made: Sequence[Comparison], title: str) -> str:
    """An SVG: the probability that a fault is found, by its size."""
    from pytest_gpufleet.report import plots

    sizes = [number / 1000 for number in range(101)]
    shown = [(fault, some) for fault, _ in power.FAULTS if (some := power.showing(fault, made))]
    with plots.style(title):
        figure, axes = plots.panels(2, 2, 3.0, legend=False)
        for panel, held in zip(axes, power.HELD, strict=True):
            plots.title(panel, f"held against {held}")
            of_panel = ((fault, some) for fault, some in shown if some[0].held == held)
            for number, (fault, some) in enumerate(of_panel):
                found = [100 * max(power.found(size, each.line) for each in some) for size in sizes]
                panel.plot([100 * size for size in sizes], found, label=fault, **plots.look(number, 0))
            panel.set_xlabel("slow by, per cent")
            if panel.lines:
                panel.legend(frameon=False, fontsize=8, loc="lower right")
        axes[0].set_ylabel("found, per cent")
        return plots.svg(figure, f"{title}: the probability that a fault is found, by its size", {})

"""How every host of a fleet stands: one row a host, one cell a group of checks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.language import Say, english
from pytest_gpufleet.model.place import Where, on_node
from pytest_gpufleet.report import gpu_grid
from pytest_gpufleet.report.accused import accused, times_named
from pytest_gpufleet.report.groups import groups
from pytest_gpufleet.verdict.fleet.equality import Difference
from pytest_gpufleet.verdict.fleet.fleet_peers import OddHost, SlowPlaces
from pytest_gpufleet.verdict.fleet.fleet_verdict import Fleet
from pytest_gpufleet.verdict.fleet.host_runs import Gap, HostRun, by_host, natural

# What a cell can say, the gravest first; what several GPUs say of a group is the gravest of it.
SYMBOLS = {state: gpu_grid.SYMBOLS[state] for state in (
    "failed", "unclear", "explained", "affected", "not judged", "not run", "ok", "",
)}  # fmt: skip
OWN, ALIKE, PEERS = "Its own run", "Like the others", "As good as the others"


@dataclass(frozen=True)
class BetweenHosts:
    """What checks between hosts say of one: its state by their group (`cells`), and what they found there."""

    cells: Mapping[str, str] = field(default_factory=dict)
    said: tuple[str, ...] = ()


NOTHING = BetweenHosts()


@dataclass(frozen=True)
class HostRow:
    """A host that is there (`run`, the node of that number), or that should be. `cells`: its state by group of checks.
    `wrong`: whether there is anything that somebody has to look at."""

    host: str
    run: HostRun | None
    node: int
    cells: Mapping[str, str]
    named: tuple[Gpu, ...]  # by failed checks of its own run, the one named most often first; then by its peers
    gaps: tuple[Gap, ...]
    slow: tuple[SlowPlaces, ...]
    odd: tuple[OddHost, ...]
    differences: tuple[Difference, ...]
    said: tuple[str, ...] = ()  # by checks between hosts

    @property
    def verdict(self) -> str:
        return str(self.run.record.verdict) if self.run else ""

    @property
    def wrong(self) -> bool:
        return self.cells.get(OWN) != "ok" or "failed" in self.cells.values()

    @property
    def gone(self) -> str:
        """What is told of a host without a run."""
        return "lost" if _is_lost(self.gaps) else "no run that counts"


def host_rows(fleet: Fleet, between: Mapping[str, BetweenHosts] | None = None) -> list[HostRow]:
    """Each host, and each that is missing, in the order of their names. `between`: what a run over all of them has
    found, by host."""
    between = between or {}
    gaps, differences = by_host(fleet.gaps), by_host(fleet.differences)
    slow: dict[int, list[SlowPlaces]] = defaultdict(list)
    odd: dict[int, list[OddHost]] = defaultdict(list)
    for each in fleet.slow:
        slow[each.node].append(each)
    for figure in fleet.odd:
        odd[figure.node].append(figure)
    rows = []
    for node, run in enumerate(fleet.hosts):
        cells, named = _standing(run, slow[node])
        beyond = between.get(run.host, NOTHING)
        cells |= beyond.cells
        unlike = tuple(differences.get(run.host, ()))
        cells[OWN] = _own(run, gaps.get(run.host, ()))
        cells[ALIKE] = "failed" if unlike else "ok"
        cells[PEERS] = "failed" if slow[node] else "ok" if any(each.tolerances for each in run.record.findings) else ""
        rows.append(
            HostRow(
                run.host, run, node, cells, named,
                tuple(gaps.get(run.host, ())), tuple(slow[node]), tuple(odd[node]), unlike, beyond.said,
            )
        )  # fmt: skip
    there = {row.host for row in rows}
    absent = ((host, found) for host, found in gaps.items() if host not in there)
    rows += [_absent(host, found, between.get(host, NOTHING)) for host, found in absent]
    return sorted(rows, key=lambda row: natural(row.host))


def columns(rows: Iterable[HostRow]) -> list[str]:
    """The groups of checks of all hosts, in the order of the suite; then what the fleet adds."""
    titles = dict.fromkeys(title for row in rows for title in row.cells if title not in (OWN, ALIKE, PEERS))
    return [*titles, OWN, ALIKE, PEERS]


def _absent(host: str, gaps: Collection[Gap], between: BetweenHosts) -> HostRow:
    cells = {**between.cells, OWN: "not run"} if between.cells else {}
    return HostRow(host, None, -1, cells, (), tuple(gaps), (), (), (), between.said)


def _own(run: HostRun, gaps: Collection[Gap]) -> str:
    """How a host's own run ended, and whether it counts as it is."""
    record = run.record
    if record.verdict == "REJECTED" or (record.run.rehearsal and record.exit_status == 1) or _is_lost(gaps):
        return "failed"
    rehearsed = record.run.rehearsal and record.exit_status
    return "not judged" if gaps or record.verdict == "INCOMPLETE" or rehearsed else "ok"


def _is_lost(gaps: Iterable[Gap]) -> bool:
    return any(gap.kind == "lost" for gap in gaps)


def _standing(run: HostRun, slow: Collection[SlowPlaces]) -> tuple[dict[str, str], tuple[Gpu, ...]]:
    """The gravest state of each group of checks, and the GPUs that are named. Their peers name none where all are slow,
    nor where something that is no fault of a GPU explains it."""
    record = run.record
    parts, said = groups(record), accused(record)
    rows = gpu_grid.standings(record, parts, said)
    order = list(SYMBOLS)
    cells = {
        part.title: min((row.cells[number].state for row in rows), key=order.index) for number, part in enumerate(parts)
    }
    gpus: dict[Where, Gpu] = {gpu.place: gpu for gpu in record.topology.gpus}
    named: list[Where] = [place for place, _ in times_named(said.values()).most_common()]
    if not run.held_back and not any(each.everywhere for each in slow):
        named += [on_node(place, 0) for each in slow for place in each.worse]
    return cells, tuple(gpus[place] for place in dict.fromkeys(named) if place in gpus)


def counts(fleet: Fleet, say: Say = english) -> list[str]:
    """The fleet in figures: hosts by verdict, GPUs by model."""
    verdicts = Counter(str(run.record.verdict) for run in fleet.hosts)
    models = Counter(gpu.name for run in fleet.hosts for gpu in run.record.topology.gpus)
    hosts = say("{count} hosts" if len(fleet.hosts) != 1 else "1 host", count=len(fleet.hosts))
    if fleet.expected is not None:
        hosts += say(", {count} expected", count=len(fleet.expected))
    told = [
        hosts,
        say(", ").join(f"{count} {say(verdict)}" for verdict, count in sorted(verdicts.items())),
        say(", ").join(f"{count} x {name}" for name, count in models.items()),
    ]
    return [text for text in told if text]

"""The hosts of a fleet, or the nodes of a run on many, by their own runs and beside each other: rows, JSON, a page."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from pytest_gpufleet import __version__
from pytest_gpufleet.machine.network_ports import ports_of
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.finding import distinct
from pytest_gpufleet.model.language import Said, say
from pytest_gpufleet.model.place import Gpu, Place, Where, grouped, on_node
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import failures, wording
from pytest_gpufleet.report.banner import STAMPS, reasons, why
from pytest_gpufleet.report.failures import Group, accused, groups, times_named
from pytest_gpufleet.report.rendering import render
from pytest_gpufleet.report.tables import number, of_figure, what
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.accusations import all_faults
from pytest_gpufleet.verdict.fleet.equality import Difference
from pytest_gpufleet.verdict.fleet.fleet_peers import SlowPlaces
from pytest_gpufleet.verdict.fleet.fleet_verdict import WITH_WHY, WORDS, Fleet
from pytest_gpufleet.verdict.fleet.host_runs import Gap, HostRun, natural, one_host, rejected

OWN, ALIKE, PEERS = "Its own run", "Like the others", "As good as the others"
GRAVITY = [*failures.SYMBOLS]  # the gravest first
WRONG_BITS = ("matmul_wrong", "matmul_nondeterministic", "gpu_bits_differ")
SCHEMA = 1
FIGURES = ("limit_missed", "slower_than_peers")
MOST_FIGURES = 12  # of a host
MOST_PLACES = 4  # of a figure
SECURED = {
    "secret": "which only holders of the run's secret can read or send",
    "token": "which only holders of the cluster's token can read or send",
    "loopback": "which never leave this machine",
    "insecure": "INSECURE: anyone who reaches the cluster can run programs on its nodes",
}
MEANS = {
    "ACCEPTED": "Every host is ACCEPTED, all are alike, and none is worse than its peers on the others.",
    "REJECTED": "A host is REJECTED, lost, unlike the others or worse than its peers, or a check between hosts failed.",
    "INCOMPLETE": "No fault of a host was found, but the fleet is not complete: this is no acceptance.",
    "REHEARSAL": "All runs are rehearsals on CPU ranks, which say nothing about any GPU.",
}


@dataclass(frozen=True)
class HostRow:
    """A host that is there (`run`, the node of that number), or should be. `cells`: its state by group of checks."""

    host: str
    gaps: Sequence[Gap]
    run: HostRun | None = None
    node: int = -1
    cells: Mapping[str, str] = field(default_factory=dict)
    named: Sequence[Gpu] = ()  # by failed checks of its own run, the one named most often first; then by its peers
    slow: Sequence[SlowPlaces] = ()
    differences: Sequence[Difference] = ()
    said: Sequence[str] = ()  # by checks between hosts
    serial: str | None = None  # of a node, as the run over all has it

    @property
    def verdict(self) -> str:
        return str(self.run.record.verdict) if self.run else ""

    @property
    def wrong(self) -> bool:
        return self.cells.get(OWN) != "ok" or "failed" in self.cells.values()

    @property
    def gone(self) -> str:
        """What is told of a host without a run."""
        return "lost" if any(gap.kind == "lost" for gap in self.gaps) else "no run that counts"


def host_rows(fleet: Fleet) -> list[HostRow]:
    """Each host, and each that is missing, in the order of their names."""
    gaps_of = grouped((host, gap) for gap in fleet.gaps for host in gap.hosts)
    differences_of = grouped((host, each) for each in fleet.differences for host in each.hosts)
    slow_of = grouped((each.node, each) for each in fleet.slow)
    rows = []
    for node, run in enumerate(fleet.hosts):
        gaps, slow, unlike = gaps_of.pop(run.host, []), slow_of.get(node, []), differences_of.get(run.host, [])
        record = run.record
        parts, said = groups(record), accused(record)
        states = zip(
            *((cell.state for cell in row.cells) for row in failures.grid_rows(record, parts, said)), strict=True
        )
        cells = {part.title: min(of, key=GRAVITY.index) for part, of in zip(parts, states, strict=True)}
        places: list[Where] = [place for place, _ in times_named(said.values()).most_common()]
        # Peers name no GPU where all are slow, nor where something that is no fault of a GPU explains it.
        if not run.held_back and not any(each.everywhere for each in slow):
            places += [on_node(one.place, 0) for each in slow for one in each.places]
        gpus: dict[Where, Gpu] = {gpu.place: gpu for gpu in record.topology.gpus}
        named = [gpus[place] for place in dict.fromkeys(places) if place in gpus]
        bad = rejected(record) or any(gap.kind == "lost" for gap in gaps)
        is_open = gaps or record.verdict == "INCOMPLETE" or (record.run.rehearsal and record.exit_status)
        cells[OWN] = "failed" if bad else "not judged" if is_open else "ok"  # whether it counts as it is
        cells[ALIKE] = "failed" if unlike else "ok"
        cells[PEERS] = "failed" if slow else "ok" if any(each.tolerances for each in record.findings) else ""
        rows.append(HostRow(run.host, gaps, run, node, cells, named, slow, unlike))
    rows += [HostRow(host, gaps) for host, gaps in gaps_of.items()]  # of hosts that are not there
    return sorted(rows, key=lambda row: natural(row.host))


def beside(row: HostRow) -> list[str]:
    """What the fleet lacks of a host, in words."""
    text = "{hosts} {are}: {why}"
    return [
        say(text, hosts=row.host, are=say(WORDS[gap.kind]), why=say(gap.what))
        if gap.kind in WITH_WHY
        else say(gap.what)
        for gap in row.gaps
    ]


def counts(fleet: Fleet) -> list[str]:
    """Hosts by verdict, GPUs by model; and what all together exclude: GPU time in which no bit differed adds up."""
    records = [run.record for run in fleet.hosts]
    verdicts = Counter(str(record.verdict) for record in records)
    models = Counter(gpu.name for record in records for gpu in record.topology.gpus)
    hosts = say("{count} hosts" if len(records) != 1 else "1 host", count=len(records))
    if fleet.expected is not None:
        hosts += say(", {count} expected", count=len(fleet.expected))
    found = [
        hosts,
        say(", ").join(f"{count} {say(verdict)}" for verdict, count in sorted(verdicts.items())),
        say(", ").join(f"{count} x {name}" for name, count in models.items()),
    ]
    measured = (finding.measurement for record in records for finding in distinct(record.findings))
    seconds = sum(sum(each.values.values()) for each in measured if each.metric == "corruption_bound")
    if seconds and not any(fault.name in WRONG_BITS for record in records for fault in record.faults):
        text = "silent data corruption in matmuls rarer than once per {time} and GPU (95 % confidence)"
        found.append(say(text, time=wording.duration(seconds)))
    return [text for text in found if text]


def document(fleet: Fleet) -> dict[str, Any]:
    """What is wrong beside the hosts' own runs. Places of a host but the first begin with "node<n>/", by its `node`."""
    names = [run.host for run in fleet.hosts]
    hosts = [
        {
            "node": row.node, "host": run.host, "serial": run.serial,
            "gpus": [gpu.uuid for gpu in run.record.topology.gpus], "verdict": run.record.verdict,
            "basis": basis.lowest(run.record), "utc": str(run.record.run.utc), "folder": run.folder,
            "evidence_sha256": run.sha256, "groups": {title: state for title, state in row.cells.items() if state},
            "named": [gpu.identity for gpu in row.named],
        }
        for row in host_rows(fleet)
        if (run := row.run)
    ]  # fmt: skip

    def about(each: SlowPlaces, **more: Any) -> dict[str, Any]:
        return {"host": names[each.node], **of_figure(each.figure), **more}

    slow = [
        about(
            each, values={str(one.place): number(one.value) for one in each.places},
            worse={str(one.place): one.worse for one in each.places}, everywhere=each.everywhere, peers=each.peers,
        )
        for each in fleet.slow
    ]  # fmt: skip
    odd = [
        about(each, value=number(worst.value), reference=number(worst.reference), worse=worst.worse, check=each.check)
        for each, worst in ((each, each.worst) for each in fleet.odd)
    ]
    faults = [
        {
            "hosts": [*dict.fromkeys(names[part.node] for subject in fault.subjects for part in subject.parts)],
            **codec.plain(fault), "action": fault.kind.action, "next_step": fault.kind.next_step,
        }
        for fault in fleet.faults
    ]  # fmt: skip
    shown: dict[str, Any] = codec.plain({
        "schema": SCHEMA, "plugin": __version__, "verdict": fleet.verdict, "exit_status": fleet.exit_status,
        "reasons": fleet.reasons, "basis": {"lowest": next(reversed(fleet.grades), None), "figures": fleet.grades},
        "expected": fleet.expected, "hosts": hosts, "gaps": fleet.gaps, "unusable": fleet.unusable, "odd_hosts": odd,
        "differences": fleet.differences, "slower_than_peers": slow, "faults": faults, "notes": fleet.notes,
    })  # fmt: skip
    return shown


def rows(record: Record, fleet: Fleet) -> list[HostRow]:
    """A row for each node. `fleet`: what this record came to."""
    between = groups(record)
    numbers = {host: node for node, host in record.hosts.items()}
    named, said = accused(record, nodes=True), _said(record, between)
    nobody = {check for check, each in named.items() if not (each.named or each.is_explained)}
    found = []
    for row in host_rows(fleet):
        node, cells = numbers[row.host], {**row.cells} if row.run or not between else {OWN: "not run"}
        for group in between:
            state = failures.cell(Place(node, "node"), group, named, record.hosts).state
            if state != "failed" and (node in record.lost or node in record.left_out or not group.checks):
                state = "not run"
            elif state in ("ok", "") and not nobody.isdisjoint(group.checks):  # nobody is named who could be: any may
                state = "unclear"
            cells[group.title] = state
        found.append(replace(row, cells=cells, said=said[node][:6], serial=record.node(node).serial))
    return found


def _said(record: Record, between: Sequence[Group]) -> dict[int, list[str]]:
    """What checks between nodes, and what was seen while they ran, say of each node."""
    ours = {check for group in between for check in group.checks}
    name = partial(wording.place, hosts=record.hosts)
    found: dict[int, list[str]] = defaultdict(list)
    explained: set[tuple[int, str]] = set()  # by a check that also says what makes its figures miss
    for fault in sorted(all_faults(record), key=lambda fault: fault.name in FIGURES):
        if fault.name != "node_lost" and (fault.check in ours or fault.watched):
            for node in dict.fromkeys(part.node for at in fault.subjects for part in at.parts if part.is_on_node):
                if fault.name not in FIGURES:
                    explained.add((node, fault.check))
                elif (node, fault.check) in explained:
                    continue
                found[node].append(Said("{kind}: {what}", kind=Said(fault.kind.message), what=fault.described(name)))
    return found


def nodes_in_words(record: Record) -> list[str]:
    """How many nodes there are, which are one host, and what they reach each other by; nothing of one machine."""
    run = record.run
    if not record.of_cluster:
        return []
    there = len(run.nodes) or 1
    nodes = say("{count} nodes" if there != 1 else "1 node", count=there)
    if run.nodes_wanted:
        nodes = say("{nodes} of {wanted} asked for", nodes=nodes, wanted=run.nodes_wanted)
    gone = {"{count} lost": len(record.lost), "{count} left out": len(record.left_out)}
    networks: Counter[str] = Counter()  # "8 x ConnectX-7 400 Gb/sec"
    for machine in record.machines.values():
        kinds = Counter(" ".join(filter(None, (port.adapter, port.rate))) for port in ports_of(machine.host))
        networks[", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()) if kind)] += 1
    del networks[""]
    interfaces = ", ".join(dict.fromkeys(filter(None, run.interfaces)))
    safe = say(SECURED.get(run.secured or "", "how they are secured is not recorded"))
    return [
        say(", ").join([nodes, *(say(text, count=count) for text, count in gone.items() if count)]),
        *one_host(record),
        *(say("network of a node: {network}", network=network) for network, _ in networks.most_common(1)),
        *([say("ranks meet over {interfaces}", interfaces=interfaces)] if interfaces else []),
        say("messages: {transport}, {safe}", transport=run.transport, safe=safe),
    ]


@dataclass(frozen=True)
class HostsPart:
    """What the templates show. `noun`: what a host is called. `reports`: where those of hosts are, by folder."""

    noun: str
    nouns: str
    fleet: Fleet
    rows: Sequence[HostRow]
    reports: Mapping[str, str]
    symbols: ClassVar[Mapping[str, str]] = failures.SYMBOLS

    def columns(self) -> list[str]:
        """The groups of checks of all hosts, in the order of the suite; then what the fleet adds."""
        titles = dict.fromkeys(title for row in self.rows for title, state in row.cells.items() if state)
        return [*(title for title in titles if title not in (OWN, ALIKE, PEERS)), OWN, ALIKE, PEERS]

    def anchors(self) -> dict[str, str]:
        """Where each host that somebody has to look at is told of."""
        return {row.host: f"fleet-host-{number}" for number, row in enumerate(self.rows) if row.wrong}

    def why(self, row: HostRow) -> str:
        return why(row.run.record) if row.run and row.verdict != "ACCEPTED" else ""

    def said(self, row: HostRow) -> list[str]:
        """What only shows beside the others, or between them, and what its own run says."""
        found = beside(replace(row, gaps=[gap for gap in row.gaps if gap.kind != "incomplete"]))
        found += [wording.capitalised(say(text)) for text in row.said]
        if row.run and row.verdict != "ACCEPTED":
            found += reasons(row.run.record, "which its own report lists", with_checks=True)
        elif not row.run and row.serial:
            found.append(f"{say('serial of the machine')}{say(': ')}{row.serial}")
        return found

    def figures(self, row: HostRow) -> list[tuple[str, str, str, str]]:
        """The worst of those that are worse than its peers': what, where, measured, by how much."""
        found = []
        for slow in row.slow[:MOST_FIGURES]:
            worse = [on_node(each.place, 0) for each in sorted(slow.places, key=lambda each: -each.worse)]
            every = say("all {count} places", count=len(worse)) if slow.everywhere else ""
            measured = wording.span([each.value for each in slow.places], slow.figure.metric.unit)
            percent, allowed = wording.percent(slow.worst.worse), wording.percent(slow.worst.allowed)
            worst = say("{percent}; allowed: {allowed}", percent=percent, allowed=allowed)
            found.append((what(slow.figure), every or wording.places(worse, MOST_PLACES), measured, worst))
        return found


def page(fleet: Fleet, reports: Mapping[str, str]) -> str:
    """The report of a fleet as a self-contained HTML page. `reports`: as `HostsPart` has them."""
    return render(
        "fleet.html.jinja", title=say("GPU acceptance of a fleet: {count} hosts", count=len(fleet.hosts)),
        made="Made by {tool} from the evidence of each host's run.", fleet=fleet, stamp=STAMPS[fleet.verdict],
        means=MEANS[fleet.verdict], basis=basis.in_words(fleet.grades), counts=counts(fleet),
        hosts=HostsPart("host", "hosts", fleet, host_rows(fleet), reports),
    )  # fmt: skip

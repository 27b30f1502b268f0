"""The machine and the run as tables: software, environment, GPUs, and how these are linked."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup

from pytest_gpufleet.machine.host import DMI
from pytest_gpufleet.machine.processors import PROCESSOR_SETUP, ProcessorSetup
from pytest_gpufleet.model.events import HostFound
from pytest_gpufleet.model.finding import IN_WORDS
from pytest_gpufleet.model.language import say, some
from pytest_gpufleet.model.place import Gpu, GpuTopology, Missing
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.tables import Cell, Row, Table, row

Facts = list[tuple[str, Any]]  # a name and a value each

# Keys of --fleet-note that have words of their own; the others are called as they were given.
NOTES = {
    "order": "Order number", "asset": "Asset tag", "location": "Location", "technician": "Technician",
    "remarks": "Remarks",
}  # fmt: skip
# By how much begin and end may differ from how long the run took: both are told in whole seconds.
CLOCK_SECONDS, CLOCK_SHARE = 1.0, 0.005
MOST_NOTES, MOST_NAMED = 12, 16  # that the page with the signatures has room for


def notes(record: Record) -> list[tuple[str, str]]:
    """What --fleet-note gave, under the names that people read."""
    given = record.run.notes
    keys = [*(key for key in NOTES if key in given), *(key for key in given if key not in NOTES)]
    return [(NOTES.get(key) or wording.capitalised(key.replace("_", " ")), given[key]) for key in keys]


def time_taken(record: Record) -> str:
    """From when to when, and how long: "2026-11-22 08:00:00 UTC to 2026-11-22 08:31:12 UTC, 31 min 12 s"."""
    begin, end, lasted = wording.moment(record.run.utc), wording.moment(record.ended), wording.duration(record.lasted)
    text = say("{begin} to {end}, {lasted}" if end else "{begin}, not ended", begin=begin, end=end, lasted=lasted)
    return wording.sentences(f"{text}{say('.')}", wrong) if (wrong := clock_error(record)) else text


def clock_error(record: Record) -> str:
    """A sentence where begin and end, by the clock of the host, are further apart than the run lasted, or less far."""
    by_clock = record.ended.seconds - record.run.utc.seconds
    known = record.run.utc and record.ended and record.lasted
    if not known or abs(by_clock - record.lasted) <= max(CLOCK_SECONDS, CLOCK_SHARE * record.lasted):
        return ""
    text = "The clock of the host ran {percent} {how} during the run: synchronise it, by NTP for example."
    how = say("fast" if by_clock > record.lasted else "slow")
    return say(text, percent=wording.percent(abs(by_clock / record.lasted - 1), 2), how=how)


def signed(record: Record) -> list[tuple[str, str]]:
    """What the verdict is of, and what is signed: a name and a value each."""
    noted, run, models = notes(record), record.run, wording.models(record.topology.gpus) or say("no GPU")
    numbers = [say("serial {serial}", serial=at.serial) if at.serial else "" for at in run.nodes]
    if record.of_cluster:
        names = [f"{at.host} ({number})" if number else at.host for at, number in zip(run.nodes, numbers, strict=True)]
        who = [("Nodes", say(some(names, MOST_NAMED))), ("GPUs", models)]
    else:
        gpus = [
            f"GPU {gpu.index}{f' ({gpu.position})' if gpu.position else ''}: {gpu.serial or gpu.uuid}"
            for gpu in record.topology.gpus
        ]
        machine = ", ".join(filter(None, (_board(record.machine), *numbers[:1])))
        who = [("Host", run.host), ("Machine", machine), ("GPUs", models)]
        who.append(("Serial numbers", say(some(gpus, MOST_NAMED))))
    commit = f"commit {run.commit}" if run.commit else ""
    suite = f"pytest-gpufleet {run.plugin}", say("level {level}", level=say(run.level)), commit
    more = say("{count} more notes, which evidence.jsonl has", count=len(noted) - MOST_NOTES)
    rows = [*noted[:MOST_NOTES], ("And", more if noted[MOST_NOTES:] else ""), *who]
    rows += [("Time", time_taken(record)), ("Suite", say(", ").join(filter(None, suite)))]
    return [(name, value) for name, value in rows if value]


def _board(found: HostFound) -> str:
    """ "Dell Inc. PowerEdge XE9680" """
    return "" if isinstance(dmi := DMI.of(found.host), Missing) else " ".join(filter(None, (dmi.vendor, dmi.product)))


def page_foot(record: Record, sha256: str) -> Markup:
    """The rules that put host, run and the sum of its evidence at the foot of each printed page."""
    of = f"{record.run.host} · run of {wording.moment(record.run.utc)}"
    lines = [of, f"evidence SHA-256 {sha256}"] if sha256 else [of]
    # For a string of CSS, inside HTML: whatever could end either is written as a number.
    safe = (re.sub(r"[^A-Za-z0-9 ._:/-]", lambda found: f"\\{ord(found[0]):x} ", wording.clean(line)) for line in lines)
    text = "\\A ".join(safe)
    return Markup(
        "@media print { @page { margin-bottom: 18mm; "
        f'@bottom-left {{ content: "{text}"; white-space: pre; font: 6.5pt/1.4 monospace; }} '
        '@bottom-right { content: counter(page) " / " counter(pages); font: 6.5pt/1.4 sans-serif; } } }'
    )


# Heading, and the facts that stand under it.
COLUMNS = (
    ("ECC: now / after the next boot", ("ecc_mode",)),
    ("Uncorrectable memory errors: volatile / aggregate", ("ecc_uncorrected_volatile", "ecc_uncorrected_aggregate")),
    ("Corrected memory errors: volatile", ("ecc_corrected_volatile",)),
    ("Corrected memory errors by place", ("ecc_corrected",)),
    ("Rows remapped: corrected / uncorrectable / pending / failed", ("remapped_rows",)),
    ("PCIe replays", ("pcie_replays",)),
    ("Banks of memory by spare rows", ("spare_rows",)),
    ("NVLink errors", ("nvlink_errors",)),
    ("Temperature limits, °C", ("temperature_limits_c",)),
)


def health(gpus: Sequence[Gpu]) -> Table:
    """Without the columns of which no GPU here has anything, and without GPUs whose health nobody recorded."""
    every = [(name, value) for gpu in gpus for name, value in gpu.facts.items() if value is not None]
    known = {name for name, value in every if not isinstance(value, Missing) or not value.absent}
    columns = [column for column in COLUMNS if not known.isdisjoint(column[1])]
    rows = []
    for gpu in (gpu for gpu in gpus if any(name in gpu.facts for _, names in columns for name in names)):
        cells = (" / ".join(_fact(name, gpu.facts.get(name)) for name in names) for _, names in columns)
        rows.append(row(wording.place(gpu.place), *cells))
    note = "as their driver gave it when the run began"
    return Table("Health of the GPUs", "GPU", tuple(heading for heading, _ in columns), tuple(rows), (note,))


def _fact(name: str, value: Any) -> str:
    """Of counters by name and link what is not 0, all links together. 0 is also what some drivers do not know."""
    match value:
        case None:
            return say("not recorded")
        case Missing(absent=absent):
            return say("not supported" if absent else "not readable")
        case dict():
            sums = {key: sum(filter(None, of)) if isinstance(of, list) else of for key, of in value.items()}
            counts = (f"{say(key.replace('_', ' '))} {wording.number(of, 12)}" for key, of in sums.items() if of)
            return say(", ").join(counts) or say("none")
        case list():
            return " / ".join(say("on" if each else "off") if name == "ecc_mode" else str(each) for each in value)
    return str(value)


# Kinds of links from `nvidia-smi topo -m`, nearest first, and what the report says of them.
LINKS = {
    "NV": "NVLink", "PIX": "one PCIe switch", "PXB": "several PCIe switches", "PHB": "a PCIe host bridge",
    "NODE": "one NUMA node", "SYS": "across NUMA nodes",
}  # fmt: skip
# Of each GPU, by the heads of the table behind its name.
INVENTORY: dict[str, Callable[[Gpu], Any]] = {
    "Position": lambda gpu: gpu.position,
    "Model": lambda gpu: gpu.name,
    "Serial": lambda gpu: gpu.serial,
    "UUID": lambda gpu: gpu.uuid,
    "PCI bus id": lambda gpu: gpu.pci_bus_id,
    "Memory, GiB": lambda gpu: wording.number(gpu.memory_bytes / (1 << 30)),
    "VBIOS": lambda gpu: gpu.get("vbios"),
    "Board part number": lambda gpu: gpu.get("board_part_number"),
    "PCIe": lambda gpu: ", ".join(filter(None, (_pcie(gpu, "generation", "gen {}"), _pcie(gpu, "width", "x{}")))),
    "NVLinks": lambda gpu: gpu.nvlinks_active,
    "Power limit": lambda gpu: None if (most := gpu.power_limit_watts) is None else f"{wording.number(most)} W",
}


def _pcie(gpu: Gpu, fact: str, form: str) -> str:
    """A fact of its PCIe link, and the maximum where the two differ."""
    now, most = gpu.get(f"pcie_{fact}"), gpu.get(f"pcie_{fact}_max")
    return "" if now is None else form.format(now) + (say(" of {most}", most=most) if most not in (None, now) else "")


def inventory(gpus: Sequence[Gpu]) -> Table:
    rows = (row(wording.place(gpu.place), *(fact(gpu) for fact in INVENTORY.values())) for gpu in gpus)
    return Table("The GPUs", "GPU", tuple(INVENTORY), tuple(rows))


def facts(record: Record) -> list[Table]:
    """The run, the software and the host, each a small table."""
    run, topology, several = record.run, record.topology, record.of_cluster
    changes, known_good = (record.profile.changes, record.profile.calibrated_on) if record.profile else ((), ())
    given = (  # of which nothing is said where nobody gave it
        ("Network between nodes, by --fleet-network", run.network),
        ("Not judged, by --fleet-without", ", ".join(run.without)),
        ("Hardware", say("used (--fleet-used)") if run.used else ""),
        ("Deadline", wording.duration(run.deadline_seconds) if run.deadline_seconds else ""),
        ("Order", run.order),
        ("SHA-256 of the order", run.order_sha256),
    )
    tables: dict[str, Facts] = {
        "The run": [
            *notes(record),
            ("Host", run.host),
            ("Command", run.command),
            ("Level", say(run.level)),
            *([("Nodes asked for", run.nodes_wanted or say("all")), ("Nodes", len(run.nodes))] if several else []),
            ("GPUs asked for", say("{gpus} of each node", gpus=run.gpus) if several else run.gpus),
            ("Limits asked for", say("at least {grade}", grade=say(IN_WORDS[run.basis]))),
            ("Profile", run.profile),
            ("SHA-256 of the profile", run.profile_sha256),
            *((name, value) for name, value in given if value),
            *(("Changed by the profile", str(change)) for change in changes),
            *(("The profile is calibrated on", str(run)) for run in known_good),
        ],
        "The software": [
            ("Driver", topology.driver),
            ("CUDA (driver, torch)", ", ".join(filter(None, (topology.cuda_driver, topology.cuda)))),
            ("cuDNN", topology.cudnn),
            ("NCCL", topology.nccl),
            ("torch", topology.torch),
            ("Python, pytest", ", ".join(filter(None, (run.python, run.pytest)))),
            ("pytest-gpufleet", run.plugin),
            ("Commit of the suite", run.commit),
        ],
        "What else ran": _all_that_ran(record),
        "The host": [] if several else _host(record.machine),
    }
    found = {title: tuple(row(say(name), value) for name, value in rows) for title, rows in tables.items()}
    return [Table(title, "", (), rows) for title, rows in found.items() if rows]


def _all_that_ran(record: Record) -> Facts:
    """Of this run, and what was otherwise in those that it goes on with."""
    found: Facts = []
    for session in sorted(record.sessions, key=lambda session: bool(session.in_run)):
        plugins = ", ".join(f"{each.name} {each.version}".strip() for each in session.plugins)
        files = ", ".join(f"{each.file} (SHA-256 {each.sha256[:12]}…)" for each in session.conftests)
        for what, text in (("Plugins of pytest", plugins), ("conftest.py, sitecustomize.py", files)):
            if not session.in_run or (what, text) not in found:
                found.append((f"{what}{session.where if session.in_run else ''}", text))
    return found


def _host(host: HostFound) -> Facts:
    """What is shown and not judged is among it: NVIDIA's and AMD's guides for tuning advise against NUMA
    balancing, systems have it as they come, and healthy machines have been seen with it."""
    dmi, setup = DMI.of(host.host), PROCESSOR_SETUP.of(host.host)
    bios = () if isinstance(dmi, Missing) else (dmi.bios_version, dmi.bios_date)
    setup = ProcessorSetup() if isinstance(setup, Missing) else setup
    balancing = setup.numa_balancing
    files = (host.get("open_files_limit"), host.get("open_files_hard_limit"))
    return [
        ("Machine", _board(host)),
        ("BIOS", ", ".join(filter(None, bios))),
        ("System", ", ".join(filter(None, (host.get("system"), host.get("kernel"))))),
        ("Processors (allowed)", host.get("processors_allowed")),
        ("Host memory", _size(host.get("memory_bytes"))),
        ("Shared memory (/dev/shm)", _size(host.get("shared_memory_bytes"))),
        ("Locked memory (memlock)", _size(host.get("locked_memory_limit"))),
        ("Open files, soft / hard", " / ".join(f"{of:,}" if isinstance(of, int) else of for of in files if of)),
        ("Clock source", setup.clock_source),
        ("Second threads (SMT)", setup.smt),
        ("NUMA balancing", None if balancing is None else f"{say('on')} ({balancing})" if balancing else say("off")),
        ("Transparent hugepages", setup.transparent_hugepages),
    ]


def _size(nbytes: int | str | None) -> str | None:
    """Bytes in binary units; "unlimited" and what is not known as they are."""
    return wording.size(nbytes) if isinstance(nbytes, int) else nbytes


def links(topology: GpuTopology) -> Table:
    """The matrix of links, in the state of each cell its kind; without rows where there are no two GPUs."""
    names = tuple(wording.place(gpu.place) for gpu in topology.gpus) if len(topology.gpus) > 1 else ()
    rows = (
        Row(name, tuple(Cell(link, next((kind for kind in LINKS if link.startswith(kind)), "")) for link in of_gpu))
        for name, of_gpu in zip(names, topology.links, strict=False)
    )
    return Table("How each pair of GPUs is connected", "From, to", names, tuple(rows))

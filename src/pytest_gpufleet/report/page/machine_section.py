"""The machine and the run as tables: software, environment, GPUs, and how these are linked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_gpufleet.model.events import HostFound, Session
from pytest_gpufleet.model.gpu import Gpu, GpuTopology
from pytest_gpufleet.model.language import Say, english
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.page import identity

# Kinds of links from `nvidia-smi topo -m`, nearest first, and what the report says of them.
LINKS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge",
    "NODE": "one NUMA node",
    "SYS": "across NUMA nodes",
}
INVENTORY = (
    "GPU",
    "Position",
    "Model",
    "Serial",
    "UUID",
    "PCI bus id",
    "Memory, GiB",
    "VBIOS",
    "Board part number",
    "PCIe",
    "NVLinks",
    "Power limit",
)


def facts(record: Record, say: Say = english) -> dict[str, list[tuple[str, Any]]]:
    """The run, the software and the host, each a small table."""
    run, topology, host = record.run, record.topology, record.machine
    changes, known_good = (record.profile.changes, record.profile.calibrated_on) if record.profile else ((), ())
    tables: dict[str, list[tuple[str, Any]]] = {
        "The run": [
            *identity.notes(record),
            ("Host", run.host),
            ("Begin", wording.moment(run.utc)),
            ("End", wording.moment(record.ended)),
            ("Duration", wording.duration(record.lasted) if record.lasted else None),
            ("Command", run.command),
            ("Level", run.level),
            *(
                [("Nodes asked for", run.nodes_wanted or say("all")), ("Nodes", len(run.nodes))]
                if record.of_cluster
                else []
            ),
            ("GPUs asked for", say("{gpus} of each node", gpus=run.gpus) if record.of_cluster else run.gpus),
            ("Limits asked for", say("at least {grade}", grade=say(run.basis))),
            *([("Deadline", wording.duration(run.deadline_seconds))] if run.deadline_seconds else []),
            ("Profile", run.profile),
            ("SHA-256 of the profile", run.profile_sha256),
            *([("Order", run.order), ("SHA-256 of the order", run.order_sha256)] if run.order else []),
            *[("Changed by the profile", str(change)) for change in changes],
            *[("The profile is calibrated on", str(run)) for run in known_good],
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
        "The host": [] if record.of_cluster else _host(host),
    }
    return {title: rows for title, rows in tables.items() if rows}


def _host(host: HostFound) -> list[tuple[str, Any]]:
    told = host.get("dmi") or {}
    return [
        ("Machine", " ".join(filter(None, (told.get("vendor"), told.get("product"))))),
        ("BIOS", ", ".join(filter(None, (told.get("bios_version"), told.get("bios_date"))))),
        ("System", ", ".join(filter(None, (host.get("system"), host.get("kernel"))))),
        ("Processors (allowed)", host.get("processors_allowed")),
        ("Memory", _size(host.get("memory_bytes"))),
        ("Shared memory (/dev/shm)", _size(host.get("shared_memory_bytes"))),
        ("Locked memory (memlock)", _size(host.get("locked_memory_limit"))),
        ("Open files, soft / hard", _both(host.get("open_files_limit"), host.get("open_files_hard_limit"))),
        *_setup(host.get("processor_setup") or {}),
    ]


def _setup(setup: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What is shown and not judged: NVIDIA's and AMD's guides for tuning advise against NUMA balancing and deep idle
    states, systems have both as they come, and machines that are healthy have been seen with either."""
    balancing = setup.get("numa_balancing")
    deepest = max(
        (each for each in setup.get("idle_states", ()) if not each["disabled"]),
        key=lambda state: state["microseconds"] or 0,
        default=None,
    )
    return [
        ("Clock source", setup.get("clock_source")),
        ("Second threads (SMT)", setup.get("smt")),
        ("NUMA balancing", None if balancing is None else "off" if balancing == 0 else f"on ({balancing})"),
        ("Transparent hugepages", setup.get("transparent_hugepages")),
        ("Deepest idle state", deepest and f"{deepest['name']}, {deepest['microseconds']} µs to leave"),
        ("Swap in use", _size(setup.get("swap_used_bytes"))),
    ]


def _all_that_ran(record: Record) -> list[tuple[str, Any]]:
    """Of this run, and what was otherwise in those that it goes on with."""
    now = [text for session in record.sessions if not session.in_run for text in _what_else(session)]
    before = [
        (f"{what}{session.where}", text)
        for session in record.sessions
        if session.in_run
        for what, text in _what_else(session)
        if (what, text) not in now
    ]
    return now + before


def _what_else(session: Session) -> list[tuple[str, Any]]:
    return [
        ("Plugins of pytest", ", ".join(f"{each.name} {each.version}".strip() for each in session.plugins)),
        ("conftest.py", ", ".join(f"{each.file} (SHA-256 {each.sha256[:12]}…)" for each in session.conftests)),
    ]


def _size(nbytes: int | str | None) -> str | None:
    """Bytes in binary units; "unlimited" and what is not known as they are."""
    return wording.size(nbytes) if isinstance(nbytes, int) else nbytes


def _both(soft: int | str | None, hard: int | str | None) -> str:
    return " / ".join(f"{limit:,}" if isinstance(limit, int) else limit for limit in (soft, hard) if limit is not None)


def environment(record: Record) -> list[tuple[str, str]]:
    return sorted(record.run.environment.items())


def inventory(topology: GpuTopology) -> list[tuple[str, list[Any]]]:
    """The rows of the table whose heads are INVENTORY: the GPU, and the rest."""
    return [(wording.place(gpu.place), _identity(gpu)) for gpu in topology.gpus]


def links(topology: GpuTopology) -> list[tuple[str, list[tuple[str, str]]]]:
    """The rows of the link matrix: the GPU, then the word and the kind of each of its links."""
    if len(topology.gpus) < 2:
        return []
    return [
        (
            wording.place(gpu.place),
            [(link, next((kind for kind in LINKS if link.startswith(kind)), "")) for link in row],
        )
        for gpu, row in zip(topology.gpus, topology.links, strict=False)
    ]


def _identity(gpu: Gpu) -> list[Any]:
    generation = _of(gpu.get("pcie_generation"), gpu.get("pcie_generation_max"), "gen {}")
    width = _of(gpu.get("pcie_width"), gpu.get("pcie_width_max"), "x{}")
    return [
        gpu.position,
        gpu.name,
        gpu.serial,
        gpu.uuid,
        gpu.pci_bus_id,
        wording.number(gpu.memory_bytes / (1 << 30)),
        gpu.get("vbios"),
        gpu.get("board_part_number"),
        ", ".join(filter(None, (generation, width))),
        gpu.nvlinks_active,
        None if gpu.power_limit_watts is None else f"{wording.number(gpu.power_limit_watts)} W",
    ]


def _of(now: int | None, most: int | None, form: str) -> str:
    """A PCIe figure, and its maximum where the two differ."""
    if now is None:
        return ""
    return form.format(now) + (f" of {most}" if most not in (None, now) else "")

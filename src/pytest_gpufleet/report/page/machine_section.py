"""The machine and the run as tables: software, environment, GPUs, and how these are linked."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from pytest_gpufleet.model.gpu import Gpu, GpuTopology
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording

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
    "Name",
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


def facts(record: Record) -> dict[str, list[tuple[str, Any]]]:
    """The run, the software and the host, each a small table."""
    run, topology, host = record.run, record.topology, record.machine.get("host", {})
    command = run.get("command")
    changes = record.profile.changes if record.profile else ()
    return {
        "The run": [
            ("Host", run.get("host")),
            ("Date", wording.moment(run.get("utc"))),
            ("Command", shlex.join(command) if isinstance(command, list | tuple) else command),
            ("Level", run.get("level")),
            ("GPUs asked for", run.get("gpus")),
            ("Profile", run.get("profile")),
            ("SHA-256 of the profile", run.get("profile_sha256")),
            *[("Changed by the profile", str(change)) for change in changes],
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
        "What else ran": _all_that_ran(record),
        "The host": [
            ("System", ", ".join(filter(None, (host.get("system"), host.get("kernel"))))),
            ("Processors (allowed)", host.get("processors_allowed")),
            ("Memory", _size(host.get("memory_bytes"))),
            ("Shared memory (/dev/shm)", _size(host.get("shared_memory_bytes"))),
            ("Locked memory (memlock)", _size(host.get("locked_memory_limit"))),
            ("Open files, soft / hard", _both(host.get("open_files_limit"), host.get("open_files_hard_limit"))),
        ],
    }


def _all_that_ran(record: Record) -> list[tuple[str, Any]]:
    """Of this run, and what was otherwise in those that it goes on with."""
    now = _what_else(record.session)
    before = [
        (f"{what} (in run {session['in_run']})", told)
        for session in record.earlier_sessions
        for what, told in _what_else(session)
        if (what, told) not in now
    ]
    return now + before


def _what_else(session: Mapping[str, Any]) -> list[tuple[str, Any]]:
    plugins = (f"{each['name']} {each['version'] or each['file']}" for each in session.get("plugins", ()))
    conftests = (f"{each['file']} (SHA-256 {each['sha256'][:12]}…)" for each in session.get("conftests", ()))
    return [
        ("Plugins of pytest", ", ".join(plugins)),
        ("conftest.py", ", ".join(conftests)),
        ("Configuration", " ".join(filter(None, (session.get("ini_file"), session.get("ini_options"))))),
        ("Root", session.get("rootdir")),
        ("-p", " ".join(session.get("asked_for", ()))),
        ("PYTEST_ADDOPTS", session.get("PYTEST_ADDOPTS")),
        ("PYTEST_PLUGINS", session.get("PYTEST_PLUGINS")),
    ]


def _size(nbytes: int | str | None) -> str | None:
    """Bytes in binary units; "unlimited" and what is not known as they are."""
    return wording.size(nbytes) if isinstance(nbytes, int) else nbytes


def _both(soft: int | str | None, hard: int | str | None) -> str:
    return " / ".join(f"{limit:,}" if isinstance(limit, int) else limit for limit in (soft, hard) if limit is not None)


def environment(record: Record) -> list[tuple[str, str]]:
    variables = record.run.get("environment")
    return sorted((str(name), str(value)) for name, value in variables.items()) if variables else []


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

"""`gpufleet snapshot`: everything the inventory reads."""

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pytest_gpufleet.commands.command import Command, argument
from pytest_gpufleet.hardware import local_node
from pytest_gpufleet.hardware.local_node import take
from pytest_gpufleet.model import codec

NO_CLUSTER = "0" * 32
WITH_SERIALS = ("memory_modules", "nvme")  # facts of the host: parts that have one each
SCHEMA = 3  # 1 had no topology, 2 the facts of GPUs beside it


def _run(given: argparse.Namespace) -> int:
    with local_node.opened() as node:
        taken = take(node)
    # Of the environment it holds what environment.relevant() shows.
    topology = codec.plain(replace(node.topology, gpus=taken.gpus))
    document = {"schema": SCHEMA, "taken": taken.taken, "host": codec.plain(dict(taken.host)), "topology": topology}
    print(json.dumps(_anonymous(document) if given.anonymous else document, indent=1))
    return 0


def _anonymous(document: Mapping[str, Any]) -> dict[str, Any]:
    """The same document with serials, UUIDs and the host's name replaced by aliases, the same ones every time."""
    aliases: dict[str, str] = {}
    for gpu in document["topology"]["gpus"]:
        serial, uuid = (str(gpu["facts"][fact]) for fact in ("serial", "uuid"))
        aliases |= {serial: f"{gpu['index']:013d}", uuid: f"GPU-00000000-0000-0000-0000-{gpu['index']:012d}"}
        cluster = (gpu["facts"].get("fabric_health") or {}).get("cluster", NO_CLUSTER)
        if cluster != NO_CLUSTER:  # as a single machine has it
            aliases.setdefault(cluster, f"{len(aliases):032x}")
    # Wherever they stand: CUDA_VISIBLE_DEVICES can name UUIDs too.
    names = "|".join(map(re.escape, aliases))
    text = re.sub(rf"(?<!\w)({names})(?!\w)", lambda found: aliases[found[0]], json.dumps(document))
    plain: dict[str, Any] = json.loads(text)
    host = plain["host"]
    return {**plain, "host": {**host, **{part: _numbered(host.get(part)) for part in WITH_SERIALS}, "name": "host"}}


def _numbered(parts: Any) -> Any:
    """Their numbers instead of their serials, which may be as short as a number that stands elsewhere too."""
    if not isinstance(parts, list):
        return parts
    return [{**part, "serial": part["serial"] and f"{number:013d}"} for number, part in enumerate(parts)]


SNAPSHOT = Command(
    "print everything the inventory reads, as one JSON document, secrets hidden",
    _run,
    (argument("--anonymous", action="store_true", help="aliases instead of serials, UUIDs and the host's name"),),
)

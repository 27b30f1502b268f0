"""`gpufleet snapshot`: everything the inventory reads."""

import argparse
import json
from dataclasses import replace

from pytest_gpufleet.commands.command import Command, argument
from pytest_gpufleet.machine import local_node
from pytest_gpufleet.machine.local_node import take
from pytest_gpufleet.model import codec
from pytest_gpufleet.redaction import aliased, use_aliases

SCHEMA = 3  # 1 had no topology, 2 the facts of GPUs beside it


def _run(given: argparse.Namespace) -> int:
    with local_node.opened() as node:
        taken = take(node)
    # Of the environment it holds what environment.relevant() shows.
    topology = codec.plain(replace(node.topology, gpus=taken.gpus))
    document = {"schema": SCHEMA, "taken": taken.taken, "host": codec.plain(dict(taken.host)), "topology": topology}
    use_aliases(given.anonymous)
    print(json.dumps(aliased(document), indent=1))
    return 0


SNAPSHOT = Command(
    "print everything the inventory reads, as one JSON document, secrets hidden",
    _run,
    (argument("--anonymous", action="store_true", help="aliases, as --fleet-alias puts them in"),),
)

"""`gpufleet snapshot`: everything the inventory reads."""

from __future__ import annotations

import argparse
import json

from pytest_gpufleet.commands.command import Command
from pytest_gpufleet.hardware import facts
from pytest_gpufleet.model import machine


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--anonymous", action="store_true", help="aliases instead of serials, UUIDs and the host's name"
    )


def _run(given: argparse.Namespace) -> int:
    with facts.open_source() as (source, topology):
        taken = machine.take(source, tuple(gpu.index for gpu in topology.gpus))
    document = machine.snapshot(taken, topology)
    print(json.dumps(machine.anonymous(document) if given.anonymous else document, indent=1))
    return 0


SNAPSHOT = Command("print everything the inventory reads, as one JSON document, secrets hidden", _arguments, _run)

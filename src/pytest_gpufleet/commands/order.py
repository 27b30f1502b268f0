"""`gpufleet order`: the order that a recorded machine meets."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_gpufleet.commands.command import Command, check_is_new, check_output, tell, write
from pytest_gpufleet.commands.recorded import checked
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.verdict import orders
from pytest_gpufleet.verdict.orders import order_text
from pytest_gpufleet.verdict.toml_table import FileError


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=RunFolder.of, metavar="DIR", help="the folder of a run on a machine that is right"
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the order to write, a TOML file"
    )


def _run(given: argparse.Namespace) -> int:
    check_output(given.output)
    check_is_new(given.output)
    with given.folder.of_anybody():
        record = checked(given.folder).record
        if record.of_cluster:
            raise Refused(f"{given.folder} is of several nodes: give the folder of one of them, in its nodes/")
        if not record.topology.gpus:
            raise Refused(f"{given.folder} has no GPUs: an order comes from a run on a whole machine")
        write(given.output, order_text(record, given.folder.name))
    try:
        orders.load(given.output)
    except FileError as error:
        raise Refused(f"the order was written but is not valid; please report this: {error}") from None
    tell(f"{given.output}: what {record.run.host} has; compare it with what was bought, and use it with --fleet-order")
    if record.verdict != "ACCEPTED":
        came_to = record.verdict or "did not come to its end"
        tell(f"that run: {came_to}; what is wrong with the machine may stand in its order")
    return 0


ORDER = Command(
    "write what a machine that is right has, to hold others against it with --fleet-order",
    _arguments,
    _run,
    "It is read from the evidence of a run; an existing file is left as it is.",
)

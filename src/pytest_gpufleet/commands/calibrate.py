"""`gpufleet calibrate` and `gpufleet order`: what runs on machines that are right say of others like them."""

import argparse
import sys

from pytest_gpufleet.commands import command, verify
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.verdict import orders, profile
from pytest_gpufleet.verdict.across_runs.calibration import calibrate, profile_text, too_few


def _calibrate(given: argparse.Namespace) -> int:
    command.check_output(given.output, new=True)
    found = verify.all_checked(given.folders)
    runs = {name: run.record for name, run in found.items()}
    limits = calibrate(runs, replace_shipped=given.replace_shipped)
    command.write(given.output, profile_text(limits, runs, {name: run.digest for name, run in found.items()}))
    written = profile.load(given.output)
    command.print_line(
        f"{given.output}: {len(written.limits)} limits for {', '.join(written.match)}; use it with --fleet-profile"
    )
    for reach in limits.reaches:
        command.print_line(reach)
    if limits.kept:
        kept = f"{limits.kept} measurements keep their shipped limits (--replace-shipped)"
        command.print_line(f"{given.output}: {kept}")
    if problem := too_few(runs):
        command.print_line(f"{given.output}: {problem}", file=sys.stderr)
    return 0


CALIBRATE = command.Command(
    "write a profile with limits from runs on known-good machines",
    _calibrate,
    (
        command.folders("the folders of known-good runs"),
        command.output("the profile to write, a TOML file", required=True),
        command.argument("--replace-shipped", action="store_true",
                         help="also write limits where weaker shipped ones hold (default: only where none holds)"),
    ),
    "A limit is the mean of these machines, with how much they and their GPUs differ. It refuses runs that were not "
    "clean, and runs that differ in GPU model, in software, or by more than 10 % in a measurement.",
)  # fmt: skip


def _order(given: argparse.Namespace) -> int:
    command.check_output(given.output, new=True)
    with given.folder.of_anybody():
        record = verify.checked(given.folder).record
        if record.of_cluster:
            raise Refused(f"{given.folder} is of several nodes: give the folder of one of them, in its nodes/")
        if not record.topology.gpus:
            raise Refused(f"{given.folder} has no GPUs: an order comes from a run on a whole machine")
        command.write(given.output, orders.order_text(record, given.folder.name))
    orders.load(given.output)  # what it refuses is a defect of ours
    command.print_line(
        f"{given.output}: what {record.run.host} has; compare it with what was bought, and use it with --fleet-order"
    )
    if record.verdict != "ACCEPTED":
        came_to = record.verdict or "did not come to its end"
        command.print_line(f"that run: {came_to}; what is wrong with the machine may stand in its order")
    return 0


ORDER = command.Command(
    "write an order file from a known-good machine, for --fleet-order",
    _order,
    (
        command.folder("the folder of a run on a machine that is right"),
        command.output("the order to write, a TOML file", required=True),
    ),
    "It is read from the evidence of a run; an existing file is left as it is.",
)

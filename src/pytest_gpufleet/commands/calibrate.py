"""`gpufleet calibrate`: limits from known-good runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pytest_gpufleet.commands.command import Command, check_is_new, check_output, tell, write
from pytest_gpufleet.commands.recorded import all_checked
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.verdict.across_runs.calibration import CannotCalibrate, calibrate, profile_text, too_few
from pytest_gpufleet.verdict.profiles import profile


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", type=RunFolder.of, nargs="+", metavar="DIR", help="the folders of known-good runs")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the profile to write, a TOML file"
    )
    parser.add_argument(
        "--replace-shipped", action="store_true",
        help="also write limits where weaker shipped ones hold (default: only where none holds)",
    )  # fmt: skip


def _run(given: argparse.Namespace) -> int:
    check_output(given.output)
    check_is_new(given.output)
    found = all_checked(given.folders)
    runs = {name: run.record for name, run in found.items()}
    sums = {name: run.digest for name, run in found.items()}
    try:
        limits = calibrate(runs, replace_shipped=given.replace_shipped)
    except CannotCalibrate as error:
        raise Refused(f"no profile can be made of these runs: {error}") from None
    write(given.output, profile_text(limits, runs, sums))
    try:
        written = profile.load(given.output)
    except profile.FileError as error:
        raise Refused(f"the profile was written but is not valid; please report this: {error}") from None
    tell(f"{given.output}: {len(written.limits)} limits for {', '.join(written.match)}; use it with --fleet-profile")
    if limits.kept:
        tell(f"{given.output}: for {limits.kept} figures the shipped limits hold on (--replace-shipped)")
    if problem := too_few(runs):
        tell(f"{given.output}: {problem}", file=sys.stderr)
    return 0


CALIBRATE = Command(
    "write a profile with limits from runs on machines that are known to be good",
    _arguments,
    _run,
    "A limit is what 99.9 % of the GPUs of such machines reach, with a confidence of 95 %. It refuses runs that were "
    "not clean, and runs that differ in GPU model, in software, or by more than 10 % in a figure.",
)

"""`gpufleet calibrate`: limits from known-good runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pytest_gpufleet.commands.command import Command, tell
from pytest_gpufleet.commands.recorded import records_of
from pytest_gpufleet.commands.writing import check_output, write
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.run.refused import Refused
from pytest_gpufleet.verdict.across_runs.calibration import CannotCalibrate, calibrate, too_few
from pytest_gpufleet.verdict.profiles import profile

MARGIN = 0.95


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", type=RunFolder.of, nargs="+", metavar="DIR", help="the folders of known-good runs")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the profile to write, a TOML file"
    )
    parser.add_argument(
        "--margin", type=_margin, default=MARGIN, metavar="RATIO",
        help=f"a limit is the worst known-good figure times this (default: {MARGIN:g})",
    )  # fmt: skip


def _run(given: argparse.Namespace) -> int:
    check_output(given.output)
    if given.output.is_file():
        raise Refused(f"{given.output} is there already and is left as it is: name another file, or remove it")
    runs = records_of(given.folders)
    sums = {name: folder.digest() for name, folder in zip(runs, given.folders, strict=True)}
    try:
        text = calibrate(runs, given.margin, sums)
    except CannotCalibrate as error:
        raise Refused(f"no profile can be made of these runs: {error}") from None
    write(given.output, text)
    try:
        written = profile.load(given.output)
    except profile.ProfileError as error:
        raise Refused(f"the profile was written but is not valid; please report this: {error}") from None
    tell(f"{given.output}: {len(written.limits)} limits for {', '.join(written.match)}; use it with --fleet-profile")
    if problem := too_few(runs):
        tell(f"{given.output}: {problem}", file=sys.stderr)
    return 0


def _margin(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and at most 1")
    return value


CALIBRATE = Command(
    "write a profile with limits from runs on machines that are known to be good",
    _arguments,
    _run,
    "It refuses runs that were not clean, and runs that differ in GPU model, in software, or by more than 10 % in a "
    "figure.",
)

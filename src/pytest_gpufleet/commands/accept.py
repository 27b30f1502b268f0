"""`gpufleet accept`: the acceptance suite, wherever it is installed."""

import argparse
import os
import sys
from importlib.util import find_spec

from pytest_gpufleet.commands.command import subcommand
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.events import STARTED_BY
from pytest_gpufleet.model.suite import CLONE, PACKAGED
from pytest_gpufleet.run.settings import lacking


@subcommand(
    "run the acceptance suite on the GPUs of this machine",
    details="Any option of pytest may follow, and checks of your own: `gpufleet accept --gpus 8 checks/`. Without "
    "--gpus, --rehearse or --nodes it is --gpus auto. `pytest --help` has all options.",
    statuses="Of a run: 0 ACCEPTED, or a rehearsal in which nothing failed; 1 REJECTED; 10 INCOMPLETE; 2 to 5 as "
    "pytest has them, 4 for wrong options.",
    passes_on=True,
)  # fmt: skip
def accept(given: argparse.Namespace) -> int:
    if lacks := lacking():  # pytest-html says so by a traceback
        raise Refused(lacks)
    suite = [str(CLONE / "acceptance")]  # by its folder in a clone, by its package as a wheel has it
    if find_spec(PACKAGED):
        suite = ["--pyargs", PACKAGED]
    elif not os.path.isdir(suite[0]):
        raise Refused(f"the suite is not installed: there is no {PACKAGED}, which a wheel of pytest-gpufleet has")
    arguments = [sys.executable, "-m", "pytest", *suite, *given.passed_on]
    # Signals and exit status are those of pytest.
    os.execve(sys.executable, arguments, {**os.environ, STARTED_BY: "gpufleet accept"})

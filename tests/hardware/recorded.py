"""A recorded machine in the place of this one. Loaded with `-p tests.hardware.recorded`.

The environment variable SNAPSHOT names the machine, of those in snapshots/ (default: h200x4), CHANGE what is different
about it: see tests/machines.py.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_gpufleet.hardware import host, nvml
from pytest_gpufleet.hardware.kernel_log import KernelLog
from pytest_gpufleet.hardware.nvml import FactError
from pytest_gpufleet.model.facts import Unavailable
from tests import machines

here = machines.recorded(os.environ.get("CHANGE", ""), os.environ.get("SNAPSHOT", "h200x4"))
recorded = here.machine


class Recorded:
    """A Source that answers from the document, with the GPUs that were asked for."""

    def __init__(self, wanted):
        self._wanted = wanted

    def count(self):
        return len(recorded.gpus[: self._wanted])

    def xids(self):
        return []

    def ask(self, index, fact):
        answer = recorded.gpus[index][fact]
        if isinstance(answer, Unavailable):
            raise FactError(answer.reason, answer.applicable)
        return answer


@contextmanager
def open_source(wanted=None):
    yield Recorded(wanted), here.topology if wanted is None else here.topology.first(wanted)


patch = pytest.MonkeyPatch()
patch.setattr(nvml, "open_source", open_source)
patch.setattr(nvml, "gpus_present", lambda: len(recorded.gpus))
patch.setattr(host, "read", lambda: dict(recorded.host))
log = Path("kernel-log")
log.write_text(here.log)
patch.setattr(KernelLog.__init__, "__defaults__", (str(log),))


def pytest_unconfigure():
    """The process may be that of another pytest, which goes on."""
    patch.undo()
    del sys.modules[__name__]

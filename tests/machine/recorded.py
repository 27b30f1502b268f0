"""A recorded machine in the place of this one. Loaded with `-p tests.machine.recorded`.

The environment variable CHANGE has assignments to `gpus`, `host` and `machine`, which is a machines.Draft.
"""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_gpufleet.machine import local_node
from pytest_gpufleet.machine.local_node import LocalNode
from pytest_gpufleet.model.place import Missing
from tests import machines


def change(machine):
    exec(os.environ.get("CHANGE", ""), {**vars(machine), "machine": machine, "Missing": Missing})


here = machines.recorded(change)
recorded = here.machine


class Recorded:
    """In the place of the driver: answers from the document, of the GPUs that were asked for."""

    def __init__(self, wanted):
        self._wanted = wanted

    def count(self):
        return len(recorded.gpus[: self._wanted])

    def xids(self):
        return []

    def present(self):
        return recorded.present

    def ask(self, index, fact):
        return recorded.gpus[index][fact]


class RecordedNode(LocalNode):
    def host(self, names=None):
        return dict(recorded.host) if names is None else {name: recorded.host.get(name) for name in names}


@contextmanager
def opened(wanted=None):
    topology = here.topology if wanted is None else machines.first_gpus(here.topology, wanted)
    yield RecordedNode(Recorded(wanted), topology, "kernel-log")


Path("kernel-log").write_text(here.log)
patch = pytest.MonkeyPatch()
patch.setattr(local_node, "opened", opened)


def pytest_unconfigure():
    """The process may be that of another pytest, which goes on."""
    patch.undo()
    del sys.modules[__name__]

"""The GPUs that are here: what the tests of this folder skip themselves by."""

import pytest

from pytest_gpufleet.machine import local_node
from pytest_gpufleet.machine.nvml import NoGpus


def _read():
    try:
        with local_node.opened() as node:
            return node.topology.gpus
    except NoGpus:
        return ()


GPUS = _read()
COUNT = len(GPUS)


def needs_gpus(count, why=""):
    return pytest.mark.skipif(count > COUNT, reason=f"needs {count} GPU(s){why and ': '}{why}")

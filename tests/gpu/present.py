"""The GPUs that are here: what the tests of this folder skip themselves by."""

import pytest

from pytest_gpufleet.hardware import nvml


def _read():
    try:
        with nvml.open_source() as (_, topology):
            return topology.gpus
    except nvml.NoGpus:
        return ()


GPUS = _read()
COUNT = len(GPUS)


def needs_gpus(count, why=""):
    return pytest.mark.skipif(count > COUNT, reason=f"needs {count} GPU(s){why and ': '}{why}")

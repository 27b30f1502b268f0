"""The GPUs that are here, by which the tests of this folder skip themselves; a process that uses one of them."""

import subprocess
import sys
from contextlib import contextmanager

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


MULTIPLIES = """
import sys
import torch

a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=f"cuda:{sys.argv[1]}")
torch.mm(a, a)
torch.cuda.synchronize()
print("loaded", flush=True)
while True:
    for _ in range(100):
        torch.mm(a, a)
    torch.cuda.synchronize()
"""

COPIES = """
import sys
import torch

device = f"cuda:{sys.argv[1]}"
here, there = (torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True) for _ in range(2))
down, up = (torch.empty(256 << 20, dtype=torch.uint8, device=device) for _ in range(2))
streams = [torch.cuda.Stream(device) for _ in range(2)]
print("loaded", flush=True)
while True:
    for _ in range(10):
        with torch.cuda.stream(streams[0]):
            down.copy_(here, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            there.copy_(up, non_blocking=True)
    torch.cuda.synchronize()
"""


@contextmanager
def intruder(program, gpu):
    """Runs on the GPU with this index from its first work on until it is killed."""
    with subprocess.Popen([sys.executable, "-c", program, str(gpu)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "loaded\n"
            yield
        finally:
            process.kill()

"""A process that is not of the run and uses one of its GPUs."""

import subprocess
import sys
from contextlib import contextmanager

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

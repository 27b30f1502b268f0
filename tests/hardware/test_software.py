"""Versions of what is installed, told without a GPU."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import SECONDS

# As on a machine with a GPU that cuDNN no longer knows.
ON_OLD_GPU = """
import torch
known = torch.backends.cudnn.version()

def capability(*device):
    raise RuntimeError("CUDA was started")

torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
torch.cuda.get_device_capability = torch.cuda._lazy_init = capability
torch.backends.cudnn._init.__globals__["__cudnn_version"] = None
from pytest_gpufleet.hardware.software import _cudnn_text, software
assert software()["cudnn"] == (_cudnn_text(known) if known else None), software()
"""


def test_no_gpu_is_asked_for_versions() -> None:
    ended = subprocess.run([sys.executable, "-c", ON_OLD_GPU], capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr

"""What Triton needs of a machine, and with it torch.compile and kernels of our own."""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

COMPILERS = ("gcc", "clang")  # what Triton looks for where CC names none (triton/runtime/build.py)


def missing() -> str | None:
    """What is missing of Triton, and for the C code by which it launches its kernels. None if nothing is."""
    if find_spec("triton") is None:
        return "torch.compile and Triton kernels need Triton, which torch for CUDA on Linux brings along"
    if not os.environ.get("CC") and not any(map(shutil.which, COMPILERS)):
        return "torch.compile and Triton need a C compiler: install gcc"
    if not Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").is_file():
        return "torch.compile and Triton need the headers of Python: install python3-dev or python3-devel"
    return None

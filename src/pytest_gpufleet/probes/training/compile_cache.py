"""Where torch's compiler keeps what it made, for the next run: a folder that nobody else can have put anything into.

What lies there is run again later: Python that inductor wrote, machine code, pickles. torch's own place is a name in
/tmp that anybody may have taken first.
"""

from __future__ import annotations

import hashlib
import os
import stat
from functools import cache
from multiprocessing.util import get_temp_dir
from pathlib import Path

import torch

# Read by inductor and Triton at every use. Triton's by itself is one for each GPU, although kernels are the same.
INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def use(device: torch.device, *sources: str) -> None:
    """Let the compiler keep what it makes for this GPU, this torch and these sources of ours in the user's own folder.

    Where that cannot be had (no home, a file system that is read-only, a folder that others may write to) it is one
    that is new and goes with this process.
    """
    folder = folder_of(device, *sources)
    os.environ.update({INDUCTOR: str(folder), TRITON: str(folder / "triton")})


@cache
def folder_of(device: torch.device, *sources: str) -> Path:
    """The folder for what is compiled for a GPU, of sources at these paths; made if it is not there."""
    try:
        return own_folder(("pytest-gpufleet", "compiled", _key(device, sources)))
    except (OSError, RuntimeError):  # no home
        # Of a rank it is the controller that removes this: ranks are killed, or end by os._exit.
        folder = Path(get_temp_dir(), "compiled")
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder


def own_folder(names: tuple[str, ...]) -> Path:
    """A folder below the user's cache folder, entered by nobody else. OSError if a part of the path is a link, belongs
    to somebody else or may be written to by others; RuntimeError if this user has no home."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = base if base.is_absolute() else Path.home() / ".cache"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = base.resolve()  # a link in a home is the user's own
    _check(folder)
    for name in names:
        folder /= name
        folder.mkdir(mode=0o700, exist_ok=True)
        _check(folder)
    return folder


def _check(folder: Path) -> None:
    found = folder.lstat()
    others_write = stat.S_IMODE(found.st_mode) & 0o022
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or others_write:
        raise PermissionError(f"{folder} is not a folder of this user alone")


def _key(device: torch.device, sources: tuple[str, ...]) -> str:
    """Inductor has keys of its own for what it keeps. By this one a folder belongs to one state of everything."""
    gpu = torch.cuda.get_device_properties(device)
    about = (gpu.name, gpu.major, gpu.minor, torch.__version__, torch.version.git_version)
    digest = hashlib.sha256(repr(about).encode())
    for source in sources:
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:16]

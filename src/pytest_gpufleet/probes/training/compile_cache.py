"""Where torch's compiler keeps what it made, for the next run: a folder that nobody else can have put anything into.

What lies there is run again later: Python that inductor wrote, machine code, pickles. torch's own place is a name in
/tmp that anybody may have taken first.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from contextlib import suppress
from functools import cache
from multiprocessing.util import get_temp_dir
from pathlib import Path
from tempfile import gettempdir

import torch

from pytest_gpufleet.world.engines import held_folders

# Read by inductor and Triton at every use. Triton's by itself is one for each GPU, although kernels are the same.
INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
# How the place begins that inductor takes for itself, below the folder for temporary files, and writes into them
# (torch/_inductor/runtime/cache_dir_utils.py).
OF_TORCH = "torchinductor_"
# Folders that stay for each model of GPU, of 160 MB each on an H200: two versions of torch with two of these sources,
# so that who compares two of either finds both, and the one that is in use among them.
KEPT = 4
# Of ours, what is compiled by inductor. Triton tells its own kernels apart by their source.
SOURCES = tuple(str(Path(__file__).with_name(name)) for name in ("cuda_graph.py", "batch_norm.py"))


def use(device: torch.device) -> None:
    """Let inductor and Triton keep what they make for this GPU, this torch and these sources of ours where the site has
    said, otherwise in the user's own folder.

    Where that cannot be had (no home, a file system that is read-only, a folder that others may write to) it is one
    that is new and goes with this process.
    """
    torchs = os.path.join(gettempdir(), OF_TORCH)
    if missing := [name for name in (INDUCTOR, TRITON) if os.environ.get(name, torchs).startswith(torchs)]:
        folder = folder_of(device, *SOURCES)
        ours = {INDUCTOR: folder, TRITON: folder / "triton"}
        os.environ.update({name: str(ours[name]) for name in missing})


@cache
def folder_of(device: torch.device, *sources: str) -> Path:
    """The folder for what is compiled for a GPU, of sources at these paths; made if it is not there. This process holds
    it until it ends, and removes what others left longest ago for GPUs of this model."""
    gpu = torch.cuda.get_device_properties(device)
    model = f"{re.sub('[^A-Za-z0-9]+', '-', gpu.name)}-{gpu.major}.{gpu.minor}"
    try:
        folder = own_folder(("pytest-gpufleet", "compiled", model, _key(sources)))
        held_folders.share(folder)
    except (OSError, RuntimeError):  # no home
        # Of a rank it is the controller that removes this: ranks are killed, or end by os._exit.
        folder = Path(get_temp_dir(), "compiled")
        folder.mkdir(mode=0o700, exist_ok=True)
    else:
        _remove_old(folder.parent)
    return folder


def _remove_old(of_model: Path) -> None:
    """Remove all but the folders that were used last, and those that somebody holds."""
    with suppress(OSError):  # another rank was faster
        by_use = sorted(of_model.iterdir(), key=lambda folder: folder.lstat().st_mtime, reverse=True)
        for folder in by_use[KEPT:]:
            with suppress(OSError):  # held, or not ours
                _check(folder)
                held_folders.remove_if_left(folder)


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


def _key(sources: tuple[str, ...]) -> str:
    """Inductor has keys of its own for what it keeps. By this one a folder belongs to one state of everything."""
    digest = hashlib.sha256(repr((torch.__version__, torch.version.git_version)).encode())
    for source in sources:
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:16]

"""One run a GPU: a lock for each UUID, held until the process that took it is gone."""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path

from pytest_gpufleet.hardware.topology import Gpu

# One folder for all users of the machine.
FOLDER = Path(tempfile.gettempdir()) / "gpufleet-locks"


class GpuTaken(Exception):
    """Another run holds a GPU; the text says which one and who."""


def lock(gpus: Iterable[Gpu], folder: Path | None = None) -> ExitStack:
    """Lock GPUs without waiting; closing what is returned frees them, and so does the end of this process, whatever
    ends it. Raises GpuTaken."""
    folder = folder or FOLDER
    with ExitStack() as taken:
        folder.mkdir(exist_ok=True)
        if folder.stat().st_uid == os.getuid():
            folder.chmod(0o777)  # not sticky: a later holder of another user must be able to open the files
        for gpu in gpus:
            descriptor = os.open(folder / f"{gpu.uuid}.lock", os.O_RDWR | os.O_CREAT, 0o666)
            taken.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise GpuTaken(f"{gpu.identity} is in use by another run: {_holder(descriptor)}") from None
            me = {"pid": os.getpid(), "user": getpass.getuser(), "since": datetime.now(timezone.utc).isoformat()[:19]}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(me).encode(), 0)
        return taken.pop_all()


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} of {holder['user']}, since {holder['since']} UTC"
    except (ValueError, KeyError):
        return "it has not said who it is"

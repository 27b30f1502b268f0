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
    """Another run holds a GPU, or its lock cannot be used; the text says which one, who, and what to do."""


def lock(gpus: Iterable[Gpu], folder: Path | None = None) -> ExitStack:
    """Lock GPUs without waiting; closing what is returned frees them, and so does the end of this process, whatever
    ends it. Raises GpuTaken."""
    folder = folder or FOLDER
    with ExitStack() as taken:
        folder.mkdir(exist_ok=True)
        if folder.stat().st_uid == os.getuid():
            folder.chmod(0o777)  # not sticky: a later holder of another user must be able to open the files
        for gpu in gpus:
            descriptor = _open(folder / f"{gpu.uuid}.lock", gpu)
            taken.callback(os.close, descriptor)
            if os.fstat(descriptor).st_uid == os.getuid():
                os.fchmod(descriptor, 0o666)  # past the umask: a later holder may be another user
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise GpuTaken(f"{gpu.identity} is in use by another run: {_holder(descriptor)}") from None
            me = {"pid": os.getpid(), "user": getpass.getuser(), "since": datetime.now(timezone.utc).isoformat()[:19]}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(me).encode(), 0)
        return taken.pop_all()


def _open(path: Path, gpu: Gpu) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        barred = path if os.path.exists(path) else path.parent
        raise GpuTaken(
            f"{gpu.identity} cannot be locked: {barred} belongs to {_owner(barred)} and is closed to this user; "
            "have it removed while no run is on"
        ) from None


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except KeyError:  # in a container, of a user that it does not know
        return f"user {path.stat().st_uid}"


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} of {holder['user']}, since {holder['since']} UTC"
    except (ValueError, KeyError):
        return "it has not said who it is"

"""What was written to a drive, read again and compared, and how fast it was read, by fio."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from errno import EILSEQ, EINVAL, EIO, EOPNOTSUPP
from pathlib import Path
from typing import Any

from pytest_gpufleet.machine.tools import NoAnswer, RunTool, Unreadable, output
from pytest_gpufleet.model.endings import NO_DISK_FOLDER, not_applicable, not_judged
from pytest_gpufleet.model.fault import Fault, node_fault
from pytest_gpufleet.model.metric import GiB, KiB, Measurement, MiB
from pytest_gpufleet.model.place import THIS_NODE

READ_SECONDS = 10  # in order, and as long again at random
QUEUE_DEPTH = 32
IN_MEMORY = ("tmpfs", "ramfs")
ANY_STATUS = tuple(range(256))
SECONDS = 120  # in which 1 GiB is written at less than 15 MB/s
# Around the page cache, which would give back what never reached the drive. Threads end with fio, processes would stay.
ALL_JOBS = ("--thread", "--direct=1", "--ioengine=libaio", f"--iodepth={QUEUE_DEPTH}", "--verify_state_save=0")
# Each 4 KiB has a checksum of its own, so that blocks of either size can be compared.
COMPARED = ("--verify=crc32c", "--verify_interval=4k", "--verify_fatal=1")
IN_ORDER, AT_RANDOM = ("--rw=read", "--bs=1M"), ("--rw=randread", "--bs=4k")
# Comparing takes a processor longer than a fast drive needs to read, so rates are of jobs that do not.
TIMED = ("--time_based", "--runtime=5")
JOBS = (
    *("--name=written", "--rw=write", "--bs=1M", *COMPARED, "--do_verify=0", "--end_fsync=1"),
    *("--name=read in order", "--stonewall", *IN_ORDER, *COMPARED, f"--runtime={READ_SECONDS}"),
    *("--name=read at random", "--stonewall", *AT_RANDOM, *COMPARED, f"--runtime={READ_SECONDS}"),
    *("--name=read in order again", "--stonewall", *IN_ORDER, *TIMED),
    *("--name=read at random again", "--stonewall", *AT_RANDOM, *TIMED),
)
# By job: the metric, the key of what fio read that it is, by how much that is divided, and the bytes of a block.
RATES = {
    "read in order again": ("drive_bandwidth", "bw_bytes", 1e9, MiB),
    "read at random again": ("drive_iops", "iops", 1.0, 4 * KiB),
}

Found = tuple[list[Fault], list[Measurement]]


def read_drive(folder: Path | None, nbytes: int = GiB, run: RunTool = output) -> Found:
    """Write `nbytes` to a file in this folder, read them in order and at random past the page cache, and compare; then
    read them again for drive_bandwidth (GB/s) and drive_iops of one thread. What was wrong, and the rates. The file has
    no name, so nothing of it is left. Not applicable without a folder, where it lies on no drive, or its system has no
    direct I/O; not judged without fio, or where it cannot be written or has no room for twice as much."""
    if folder is None:
        not_applicable(NO_DISK_FOLDER)
    if shutil.which("fio") is None:
        not_judged("fio is not installed: apt install fio")
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            number = file.fileno()
            if (system := _file_system(os.fstat(number).st_dev)) in IN_MEMORY:
                not_applicable(f"the folder lies in memory ({system}), and on no drive")
            state = os.fstatvfs(number)
            if state.f_bavail * state.f_frsize < 2 * nbytes:
                not_judged(f"the folder has less room than {2 * nbytes / GiB:g} GiB")
            os.close(os.open(f"/proc/self/fd/{number}", os.O_RDWR | os.O_DIRECT))
            os.posix_fallocate(number, 0, nbytes)
            where = (f"--filename=/proc/{os.getpid()}/fd/{number}", f"--size={nbytes}")
            printed = run("fio", "--output-format=json", *where, *ALL_JOBS, *JOBS, seconds=SECONDS, statuses=ANY_STATUS)
        # Before its JSON fio prints a line for each job that failed.
        return _found(json.loads(printed[printed.find("{\n") :])["jobs"], folder)
    except OSError as error:
        why = f"{folder} cannot be written past the page cache: {error.strerror}"
        if error.errno == EIO:
            return [node_fault("drive_unreadable", why)], []
        if error.errno in (EINVAL, EOPNOTSUPP):
            not_applicable(why)
        not_judged(why)  # also where the kernel has made it read-only, since its drive had errors
    except NoAnswer:
        what = f"{folder}: {nbytes / GiB:g} GiB could not be written and read within {SECONDS} s"
        return [node_fault("drive_unreadable", what)], []
    except Unreadable as why:
        not_judged(str(why))
    except (ValueError, KeyError, TypeError):
        not_judged("fio printed no JSON")


def _file_system(device: int) -> str:
    """Of what is mounted as this device, by proc_pid_mountinfo(5); "" if that does not say."""
    number = f"{os.major(device)}:{os.minor(device)}"
    mounted = (line.split() for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines())
    return next((each[each.index("-") + 1] for each in mounted if each[2] == number), "")


def _found(jobs: Iterable[Mapping[str, Any]], folder: Path) -> Found:
    """Faults by the error numbers of fio (EILSEQ: data are others than were written), and rates of jobs without any."""
    faults, figures = list[Fault](), list[Measurement]()
    for job in jobs:
        name, error = job["jobname"], job["error"]
        if error == EILSEQ:
            faults.append(node_fault("drive_data_error", f"{folder}: data {name} are others than were written"))
        elif error:
            faults.append(node_fault("drive_unreadable", f"{folder}: data could not be {name}: {os.strerror(error)}"))
        elif name in RATES:
            metric, key, unit, nbytes = RATES[name]
            slowest = job["read"]["clat_ns"]["percentile"]["99.000000"] / 1e6
            conditions = {"bytes": nbytes, "queue_depth": QUEUE_DEPTH}
            details = {"folder": str(folder), "99 % of reads took at most": f"{slowest:.3g} ms"}
            figures.append(Measurement(metric, {THIS_NODE: job["read"][key] / unit}, conditions, details=details))
    return faults, figures

"""Two runs never share a GPU, and locking one gives nobody anything."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpufleet import Gpu
from pytest_gpufleet.machine import local_node
from pytest_gpufleet.machine.local_node import GpuTaken, lock

GPUS = [Gpu(i, {"name": "NVIDIA H200", "uuid": f"GPU-{i}", "serial": f"S{i}", "minor": 2 - i}) for i in range(3)]
NOBODY = 65534
# argv: the folder of the device files, the user to be.
HOLDER = """
import ctypes, os, sys
from pathlib import Path
from pytest_gpufleet import Gpu
from pytest_gpufleet.machine import local_node
os.chdir(sys.argv[1])  # while it may: the folders above are closed to others
local_node.DEVICES = Path()
os.setuid(int(sys.argv[2]))
held = local_node.lock([Gpu(1, {"minor": 1})])
ctypes.CDLL(None).prctl(15, b"\\xff) \\x1b[31m (")  # PR_SET_NAME: no text, and what parts the fields of stat
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def devices(tmp_path, monkeypatch):
    """A folder with files in the place of /dev."""
    monkeypatch.setattr(local_node, "DEVICES", tmp_path)
    for gpu in GPUS:
        (tmp_path / f"nvidia{gpu['minor']}").touch()
    return tmp_path


@pytest.fixture
def hold(devices, tmp_path_factory):
    """hold(user): a run of this user, with a temporary folder of its own, which has GPU 1."""
    processes = []

    def start(user=None):
        command = [sys.executable, "-c", HOLDER, str(devices), str(os.getuid() if user is None else user)]
        environment = {**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("own"))}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        processes.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_second_run_is_refused_at_once_by_whom_it_is_named_until_that_one_is_dead(hold, devices):
    process = hold()
    taken = rf"GPU 1 NVIDIA H200, serial S1.*: process {process.pid} of \w+, since 20.* UTC$"
    with pytest.raises(GpuTaken, match=taken):
        lock(GPUS)
    lock([GPUS[0], GPUS[2]]).close()  # what was taken before the refusal is free again
    process.kill()
    process.wait()
    lock(GPUS).close()
    with lock(GPUS):
        assert sorted(os.listdir(devices)) == ["nvidia0", "nvidia1", "nvidia2"]


def test_a_gpu_that_has_no_device_file_or_does_not_open_it_is_for_the_checks(devices):
    (devices / "nvidia2").unlink()
    (devices / "nvidia1").unlink()
    (devices / "nvidia1").symlink_to("nvidia0")  # refused, as a GPU that fell off the bus refuses
    with lock([*GPUS, Gpu(3)]), pytest.raises(GpuTaken, match="GPU 2 "):
        lock(GPUS)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_stranger_who_holds_a_gpu_is_named(hold, devices):
    devices.chmod(0o755)
    pid = hold(NOBODY).pid
    with pytest.raises(GpuTaken, match=rf"GPU 1 .*: process {pid} of nobody, since 20"):
        lock(GPUS)


def test_a_holder_who_cannot_be_seen(hold, monkeypatch):
    hold()
    monkeypatch.setattr(local_node, "Path", lambda path: Path("/dev/null"))  # as /proc/locks is in another container
    with pytest.raises(GpuTaken, match=r"GPU 1 .*: a process that cannot be seen from here, as in another container"):
        lock(GPUS)


def test_a_holder_that_left_the_lock_to_its_child(devices):
    descriptor = os.open(devices / "nvidia1", os.O_RDONLY)
    parent = os.fork()
    if not parent:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os._exit(0)
    os.waitpid(parent, 0)
    with pytest.raises(GpuTaken, match=rf"process {parent}, of which nothing more can be seen"):
        lock(GPUS)
    os.close(descriptor)

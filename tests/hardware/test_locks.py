"""Two runs never share a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpufleet import Gpu
from pytest_gpufleet.hardware.locks import GpuTaken, lock

GPUS = [Gpu(index, "NVIDIA H200", f"GPU-{index}", f"0000:0{index}:00.0", 1, serial=f"S{index}") for index in range(3)]
HOLDER = """
import sys
from pathlib import Path
from pytest_gpufleet import Gpu
from pytest_gpufleet.hardware.locks import lock
held = lock([Gpu(1, "NVIDIA H200", "GPU-1", "0000:01:00.0", 1)], Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_run(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_run_is_refused_at_once_and_told_who_holds_the_gpu(other_run, tmp_path):
    with pytest.raises(GpuTaken, match=rf"GPU 1 NVIDIA H200, serial S1.* process {other_run.pid} of \w+, since 20"):
        lock(GPUS, tmp_path)


def test_what_was_taken_before_the_refusal_is_free_again(other_run, tmp_path):
    with pytest.raises(GpuTaken):
        lock(GPUS, tmp_path)
    lock([GPUS[0], GPUS[2]], tmp_path).close()


def test_the_lock_of_a_dead_holder_is_free(other_run, tmp_path):
    other_run.kill()
    other_run.wait()
    with lock(GPUS, tmp_path):
        pass


def test_the_next_user_can_take_it_whatever_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        lock(GPUS[:1], tmp_path / "locks").close()
    finally:
        os.umask(before)
    assert (tmp_path / "locks").stat().st_mode & 0o777 == 0o777
    assert (tmp_path / "locks" / "GPU-0.lock").stat().st_mode & 0o777 == 0o666


@pytest.fixture
def as_another_user(tmp_path, monkeypatch):
    """Called, it makes this process one of nobody until the test ends."""
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # the folders above it are closed
    yield lambda: os.setresuid(65534, 65534, 0)
    os.setresuid(0, 0, 0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("closed", ["GPU-0.lock", ""])
def test_a_lock_that_another_user_left_closed_is_one_sentence(tmp_path, as_another_user, closed):
    folder = tmp_path / "locks"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "GPU-0.lock").touch()
    (folder / closed).chmod(0o600)
    as_another_user()
    with pytest.raises(GpuTaken) as refused:
        lock(GPUS[:1], Path("locks"))
    assert str(refused.value) == (
        f"{GPUS[0].identity} cannot be locked: {Path('locks', closed)} belongs to root and is closed to this user; "
        "have it removed while no run is on"
    )


def test_a_lock_can_be_given_back(tmp_path):
    lock(GPUS, tmp_path).close()
    with lock(GPUS, tmp_path):
        assert sorted(os.listdir(tmp_path)) == ["GPU-0.lock", "GPU-1.lock", "GPU-2.lock"]

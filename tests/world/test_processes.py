"""The processes of a world, those that start them, and those that they start."""

import fcntl
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from pytest_gpufleet.world.call import pack, unpack
from pytest_gpufleet.world.engines import channel, processes, rank_files
from pytest_gpufleet.world.engines.forkserver import Forkserver
from pytest_gpufleet.world.engines.local import DEFAULTS, ON_LOOPBACK, RECORDED, LocalEngine, recorder
from tests.conftest import comes_true
from tests.world.fake_engine import specs

ATTACKS = """
import os, resource, signal, socket, subprocess, sys, threading, time
import pytest
import torch
from torch.utils.data import DataLoader
from pytest_gpufleet import RankFailure
from pytest_gpufleet.world.engines import processes

def pids(world):
    return world.run(lambda rank: os.getpid())

def test_two_threads_get_their_own_results(world):
    def answer(rank, number):
        time.sleep(0.01)
        return rank.index, number

    got, before = {}, pids(world)
    handles = {0: world, 1: world, 2: world.subset([0]), 3: world.subset([1])}
    call = lambda number: got.setdefault(number, handles[number].run(answer, number))
    threads = [threading.Thread(target=call, args=(number,)) for number in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {0: [(0, 0), (1, 0)], 1: [(0, 1), (1, 1)], 2: [(0, 2)], 3: [(0, 3)]}
    assert pids(world) == before

def loaded(rank):
    return [batch.tolist() for batch in DataLoader(torch.arange(4), num_workers=1, multiprocessing_context="fork")]

def test_sockets_of_data_loaders(world):
    assert len(os.environ["TMPDIR"]) > 107
    assert world.run(loaded) == [[[0], [1], [2], [3]]] * 2

def begets(rank):
    in_a_group_of_its_own = subprocess.Popen(["sleep", "3600"], preexec_fn=os.setpgrp)
    read, write = os.pipe()
    if os.fork() == 0:  # its child in turn has neither the rank's session nor, soon, a parent
        os.setsid()
        if os.fork() == 0:
            os.write(write, b"%d" % os.getpid())
            time.sleep(3600)
        os._exit(0)
    return in_a_group_of_its_own.pid, int(os.read(read, 20))

def test_children_in_groups_and_sessions_of_their_own_end_with_the_rank(world):
    children = [pid for each in world.run(begets) for pid in each]
    assert all(map(processes.look, children))
    with pytest.raises(ValueError):
        world.run(lambda rank: int("x"))
    assert not any(map(processes.look, children))

def test_the_fork_server_is_killed(world):
    server = world.run(lambda rank: os.getppid())[0]
    os.kill(server, signal.SIGKILL)
    while processes.look(server):
        pass
    with pytest.raises(RankFailure, match="forked from, which died by SIGKILL"):
        world.run(lambda rank: time.sleep(60))
    assert world.run(lambda rank: rank.index) == [0, 1]

def test_the_fork_server_is_stopped_and_a_rank_dies(world):
    server = world.run(lambda rank: os.getppid())[0]
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(RankFailure, match="does not answer .stopped by a signal"):
        world.run(lambda rank: os._exit(3) if rank.index else time.sleep(60))
    assert world.run(lambda rank: rank.index) == [0, 1]

def test_the_fork_server_comes_to_harm_while_there_are_no_ranks(world):
    for harm in (signal.SIGKILL, signal.SIGSTOP):
        server = world.run(lambda rank: os.getppid())[0]
        world._pool.stop()
        os.kill(server, harm)
        while (process := processes.look(server)) and process.state != "T":
            pass
        assert world.run(lambda rank: rank.index) == [0, 1]

def test_more_descriptors_are_open_than_select_knows(world):
    os.kill(world.run(lambda rank: os.getppid())[0], signal.SIGSTOP)
    world._pool.stop()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    opened = [open(os.devnull) for _ in range(1100)]
    assert world.run(lambda rank: rank.index) == [0, 1]
    for file in opened:
        file.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)

def test_a_process_that_a_test_forks_does_not_use_ranks(world):
    world.run(lambda rank: None)
    folder = world._pool.engine._scratch[0]
    files = os.listdir(folder)
    read, write = os.pipe()
    if os.fork() == 0:
        with pytest.raises(RuntimeError, match="in a process that a test has forked"):
            world.run(lambda rank: "for the child")
        world._pool.stop()
        world._pool.engine.end()  # as it does when a process ends
        os.write(write, b"done")
        os._exit(0)
    assert os.read(read, 1000) == b"done"
    assert os.listdir(folder) == files != []
    assert world.run(lambda rank: rank.index) == [0, 1]

def test_a_folder_that_is_gone(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    world._pool.stop()
    assert world.run(lambda rank: rank.index) == [0, 1]

def test_a_name_that_is_no_text(world):
    def body(rank):
        with rank.phase("\\udcff"):
            return rank.index

    body.__qualname__ = "\\ud800"
    assert world.run(body) == [0, 1]

def test_the_fork_server_is_stopped_at_the_end(world):
    os.kill(world.run(lambda rank: os.getppid())[0], signal.SIGSTOP)
"""


def test_attacks_on_the_processes_of_a_world(fleet, tmp_path):
    folder = tmp_path / ("x" * 150)  # too long for the path of a socket
    folder.mkdir()
    left_by_another = folder / "gpufleet-world-dead"
    left_by_another.mkdir()
    (left_by_another / rank_files.MARKER).touch()
    os.utime(left_by_another, (0, 0))
    run = fleet(ATTACKS, TMPDIR=str(folder))
    assert set(run.outcomes.values()) == {"passed"}, run.text
    assert run.status == 0, run.text
    assert "Exception ignored" not in run.text
    others = ("pytest-of-", "torchinductor_")  # of pytest, and the cache of torch's compiler
    assert [path for path in folder.iterdir() if not path.name.startswith(others)] == []


def test_a_module_by_its_name_is_itself_again():
    import torch

    for module in (torch.backends.cudnn, torch.backends, torch.ops, torch.ops.aten):
        assert unpack(pack(module)) is module


@contextmanager
def asked_for_a_rank(server, main, before=lambda: None, after=lambda: None):
    """What a rank sends first whose whole life is `main`; `before` and `after` the fork server is asked for it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(60)  # a rank that could not begin answers nothing
    with ours, theirs:
        before()
        server.fork(0, theirs.fileno())
        after()
        for parcel in ((sys.path, sys.argv, os.getcwd()), (main,)):
            channel.Message(pickle.dumps(parcel)).send(ours)
        yield pickle.loads(channel.receive(ours))


def has_a_child(connection):
    child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    channel.Message(pickle.dumps((os.getpid(), child.pid))).send(connection)
    time.sleep(3600)


def test_the_fork_server_ends_everything_when_its_controller_is_gone_without_hearing_its_news():
    server = Forkserver([])
    with asked_for_a_rank(server, has_a_child) as family:
        pids = [server.pid, *family]
        assert all(map(processes.look, pids))
        os.kill(server.pid, signal.SIGSTOP)  # also if somebody has stopped it
        server._control.close()
        assert comes_true(lambda: not any(map(processes.look, pids)))
    assert server.exitcode() == 0


def lists_its_modules(connection):
    channel.Message(pickle.dumps([name for name in sys.modules if name.startswith("idle_")])).send(connection)


@pytest.mark.parametrize("asked_first", [False, True])
def test_ranks_find_imported_what_the_fork_server_had_time_for_and_wait_for_no_more(tmp_path, monkeypatch, asked_first):
    """The second of three modules is imported until a rank has been asked for, if `asked_first`."""
    monkeypatch.syspath_prepend(folder := tmp_path)
    for name in ("idle_first", "idle_second", "idle_third"):
        (folder / f"{name}.py").write_text(f"import pathlib, time; pathlib.Path({str(folder / name)!r}).touch()\n")
    if asked_first:
        with (folder / "idle_second.py").open("a") as file:
            file.write(f"while not pathlib.Path({str(folder / 'asked')!r}).exists(): time.sleep(0.01)\n")
    server = Forkserver(["idle_first"], ["idle_second", "idle_third"])
    begun = (folder / ("idle_second" if asked_first else "idle_third")).exists
    around = (lambda: comes_true(begun), (folder / "asked").touch)
    with asked_for_a_rank(server, lists_its_modules, *around) as modules:
        assert modules == ["idle_first", "idle_second", "idle_third"][: 2 if asked_first else 3]
    server.kill()


FAMILY = """
import ctypes, os, subprocess, sys, threading, time
if os.fork() == 0:
    os.setsid()
    threading.Thread(target=time.sleep, args=(3600,)).start()
    child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    print(os.getpid(), child.pid, flush=True)
    ctypes.CDLL(None).pthread_exit(None)  # the first thread only: the kernel calls the process a zombie
time.sleep(3600)
"""


def test_descendants_are_found_in_whatever_session_and_below_what_looks_dead():
    command = [sys.executable, "-c", FAMILY]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as server:
        pids = set(map(int, server.stdout.readline().split()))
        try:
            assert comes_true(lambda: processes.look(min(pids)).state == "Z")
            assert processes.started_by(server.pid) == pids
        finally:
            processes.kill({*pids, server.pid})


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A folder that others write to as well, in place of TMPDIR and of /tmp."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(rank_files, "SHORT", str(tmp_path))
    return tmp_path


def test_only_what_a_killed_controller_of_this_user_left_is_swept(shared, monkeypatch):
    def folder(name, *files):
        made = shared / name
        made.mkdir()
        for file in files:
            (made / file).write_text("x")
        os.utime(made, (0, 0))
        return made

    left = folder("gpufleet-world-left", rank_files.MARKER, "rank0.output")
    held = folder("gpufleet-world-held", rank_files.MARKER)
    young = folder("gpufleet-world-young", rank_files.MARKER)
    os.utime(young)
    mine = folder("gpufleet-world-model-results", "weights.pt")
    outside = folder("outside", rank_files.MARKER, "kept")
    (shared / "gpufleet-world-link").symlink_to(outside)
    os.mkfifo(shared / "gpufleet-world-fifo")
    os.utime(shared / "gpufleet-world-fifo", (0, 0))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(shared / "gpufleet-world-socket"))
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with monkeypatch.context() as another_user:
            another_user.setattr(os, "geteuid", lambda: left.stat().st_uid + 1)
            rank_files.sweep("gpufleet-world-", [shared], 60)
        assert left.exists()
        os.close(rank_files.make_scratch()[1])
    finally:
        os.close(lock)
    assert not left.exists()
    assert all(path.exists() for path in (held, young, mine / "weights.pt", outside / "kept"))
    assert {path.name for path in shared.iterdir()} >= {f"gpufleet-world-{kind}" for kind in ("fifo", "link", "socket")}


def test_a_folder_is_short_and_plain_enough_for_sockets(shared, monkeypatch):
    monkeypatch.setattr(rank_files, "MOST_PATH_BYTES", len(str(shared)) + 50)
    made = [rank_files.make_scratch()]
    for name in ("x" * 100, "a?b#c", "\udcff"):
        (shared / name).mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(shared / name))
        made.append(rank_files.make_scratch())
    for path, held in made:
        assert (path.parent, path.stat().st_mode & 0o777) == (shared, 0o700)
        os.close(held)


def test_a_rank_finds_the_environment_of_the_controller_and_what_torchrun_sets(monkeypatch):
    defaults = {**DEFAULTS, recorder(): RECORDED}
    for name in defaults | ON_LOOPBACK:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    environment = LocalEngine().environment(specs(2, 3)[4])
    torchrun = {"RANK": "4", "LOCAL_RANK": "2", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "3"}
    mine = {**ON_LOOPBACK, "GLOO_SOCKET_IFNAME": "eth0"}
    assert environment == {**os.environ, **defaults, **mine, **torchrun}
    several = LocalEngine(lambda spec: {"GLOO_SOCKET_IFNAME": f"eth{spec.local_index}"}).environment(specs(2, 3)[4])
    assert several == {**os.environ, **defaults, "GLOO_SOCKET_IFNAME": "eth2", **torchrun}

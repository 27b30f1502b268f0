"""Facts of a host that take more than one call, and programs of the system that are asked."""

import os
import signal
import subprocess

import pytest

from pytest_gpufleet.machine import host, tools
from pytest_gpufleet.machine.tools import HostFact, Unreadable, output
from pytest_gpufleet.model.gpu import Missing


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """A folder for libraries that the loader looks into, and nothing else that it could find."""
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    monkeypatch.delenv("NCCL_NET_PLUGIN", raising=False)
    monkeypatch.setattr(host, "_by_the_loader", lambda name: None)
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "file", "found"),
    [(None, "libnccl-net.so", True), (None, "libnccl-net-ofi.so", False), ("ofi", "libnccl-net-ofi.so", True),
     ("ofi", "libnccl-net.so", False), ("libmine.so", "libmine.so", True), ("none", "libnccl-net.so", False)],
)  # fmt: skip
def test_the_plugin_of_nccl_is_the_file_that_it_would_load(libraries, monkeypatch, asked, file, found):
    (libraries / file).touch()
    if asked is not None:
        monkeypatch.setenv("NCCL_NET_PLUGIN", asked)
    assert host.read()["nccl_net_plugin"] == (str(libraries / file) if found else "none")


def test_a_library_in_the_loaders_cache_is_found():
    assert host._by_the_loader("libc.so.6").endswith("libc.so.6")
    assert host._by_the_loader("libc.so") is None


def test_what_a_program_prints():
    assert output("sh", "-c", "echo $LC_ALL; echo noise >&2; exit 4", statuses=(0, 4)) == "C\n"


@pytest.mark.parametrize(("command", "why"), [
    (("no-such-program", "-x"), "no-such-program is not installed"),
    (("sh", "-c", "echo first; echo no rights >&2; exit 3"), "sh failed with status 3: no rights"),
    (("sh", "-c", "exit 3"), "sh failed with status 3"),
    (("sleep", "60"), "sleep did not answer within 0.1 s"),
    (("/etc",), "/etc cannot be started: Permission denied"),
])  # fmt: skip
def test_why_nothing_is_printed_is_one_sentence(command, why):
    with pytest.raises(Unreadable) as failure:
        output(*command, seconds=0.1 if command[0] == "sleep" else 20)
    assert str(failure.value) == why


def test_a_program_that_nobody_can_end_holds_nobody_up(monkeypatch):
    """As one does that the kernel keeps waiting for a drive."""
    kept = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda program: kept.append(program))
    monkeypatch.setattr(subprocess.Popen, "terminate", lambda program: None)
    monkeypatch.setattr(tools, "LAST_SECONDS", 0.1)
    monkeypatch.setattr(tools, "KILLED_SECONDS", 0.1)
    with pytest.raises(Unreadable, match=r"sleep did not answer within 0.1 s"):
        output("sleep", "1000", seconds=0.1)
    os.kill(kept[0].pid, signal.SIGKILL)
    kept[0].wait()


@pytest.mark.parametrize("error", [IndexError("index out of range"), TypeError("no number"), RecursionError()])
def test_a_reader_that_fails_ends_no_run(monkeypatch, error):
    def reader():
        raise error

    monkeypatch.setitem(host.FACTS, "dmi", HostFact("dmi", str, reader))
    found = host.read()
    assert (found["dmi"].absent, type(error).__name__ in found["dmi"].why) == (False, True)
    assert "bmc" not in found  # which is read when a check asks for it


def test_a_loader_that_does_not_answer_leaves_its_fact_unknown(monkeypatch):
    def hangs(*command):
        raise Unreadable("ldconfig did not answer within 20 s")

    monkeypatch.setattr(host, "output", hangs)
    monkeypatch.delenv("NCCL_NET_PLUGIN", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    assert host.read(["nccl_net_plugin"]) == {"nccl_net_plugin": Missing("ldconfig did not answer within 20 s")}

"""What only real GPUs can show. Skipped without them."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from pytest_gpufleet.machine import local_node, nvml
from pytest_gpufleet.machine.gpu_facts import COUNTERS, SLOW_COUNTERS
from pytest_gpufleet.machine.local_node import GpuTaken
from pytest_gpufleet.model.place import Missing
from pytest_gpufleet.verdict import physical_limits as peaks
from pytest_gpufleet.world.engines.processes import look as alive
from tests.boards import BOARDS
from tests.conftest import FILES, ROOT
from tests.gpu.present import GPUS, needs_gpus

pytestmark = needs_gpus(1)

SPINS = """
import os, time

def test_spins(nccl_group):
    pids = nccl_group.run(lambda rank: os.getpid())
    with open("pids.part", "w") as file:
        file.write(" ".join(map(str, pids)))
    os.rename("pids.part", "pids")
    nccl_group.run(lambda rank: time.sleep(3600))
"""

# Rank 1 reads memory that is gone. The test itself passes.
REACHES_TOO_FAR = """
import pytest

def reach(rank):
    import torch

    if rank.index == 1:
        x = torch.ones(1 << 20, device=rank.device)
        x.untyped_storage().resize_(0)
        x.add_(1)
    torch.cuda.synchronize()

def test_reaches_too_far(world):
    with pytest.raises(Exception, match="illegal memory access"):
        world.run(reach)
"""


def smi(fields):
    text = subprocess.check_output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"], text=True)
    return [line.split(", ") for line in text.splitlines()]


def used_bytes():
    with nvml.session() as library:
        handles = map(library.nvmlDeviceGetHandleByIndex, range(library.nvmlDeviceGetCount()))
        return [library.nvmlDeviceGetMemoryInfo(handle).used for handle in handles]


def grown(now, before):
    return any(after > then for after, then in zip(now, before, strict=True))


def test_topology_is_what_nvidia_smi_says():
    with local_node.opened(environment={}) as node:
        topology = node.topology
    fields = "index,name,uuid,serial,pci.bus_id,vbios_version"
    ours = [[str(gpu.index), gpu.name, gpu.uuid, gpu.serial, gpu.pci_bus_id, gpu["vbios"]] for gpu in topology.gpus]
    assert ours == smi(fields)
    matrix = subprocess.check_output(["nvidia-smi", "topo", "-m"], text=True)
    rows = [line.split("\t") for line in matrix.splitlines() if line.startswith("GPU")]
    theirs = [[cell.strip() for cell in row[1 : len(topology.gpus) + 1]] for row in rows]
    assert [list(row) for row in topology.links] == theirs


@needs_gpus(2)
def test_an_xid_fails_the_test_that_it_came_in(run_pytest):
    run = run_pytest("--gpus=all", "--fleet-dir=runs", files={"test_inner.py": REACHES_TOO_FAR})
    check = run.check("test_reaches_too_far")
    assert check.outcome == "failed", run.text
    assert re.search(r"GPU 1 .*serial .*: XID (13|31|43) \(.*what to do: ", check.message), run.text
    assert "GPU 0 " not in check.message


@needs_gpus(4)
def test_every_fault_is_caught_named_and_survived():
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "faults.py"), "--gpus", "4"], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "not as expected" not in ended.stdout, ended.stdout


@contextmanager
def spinning(folder, *options):
    """A run whose ranks spin, with its command."""
    (folder / "test_inner.py").write_text(SPINS)
    (folder / "pytest.ini").write_text("[pytest]")
    command = [sys.executable, "-m", "pytest", "--gpus=all", "--fleet-dir=out", *options]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as process:
        while not (folder / "pids").exists():
            assert process.poll() is None
            time.sleep(0.05)
        yield process, command


def test_gpu_memory_is_free_after_the_controller_is_killed(tmp_path):
    before = used_bytes()
    with spinning(tmp_path) as (process, _):
        assert grown(used_bytes(), before)
        os.kill(process.pid, signal.SIGKILL)
        killed = time.monotonic()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    while (left := [pid for pid in pids if alive(pid)]) or grown(used_bytes(), before):
        assert time.monotonic() - killed < 2.0, (left, before, used_bytes())
        time.sleep(0.01)


def test_the_device_file_of_a_gpu_is_what_is_locked():
    assert all((local_node.DEVICES / f"nvidia{gpu['minor']}").is_char_device() for gpu in GPUS)
    with local_node.lock(GPUS), pytest.raises(GpuTaken, match=f"is in use by another run: process {os.getpid()} of "):
        local_node.lock(GPUS)


def test_a_run_on_a_gpu_ends_by_sigterm_with_its_report_and_a_second_one_is_refused_meanwhile(tmp_path):
    with spinning(tmp_path, "--fleet-prometheus=x.prom") as (process, command):
        second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        process.terminate()
        assert process.wait(120) == -signal.SIGTERM
    assert second.returncode == 4
    assert f"is in use by another run: process {process.pid} of " in second.stdout + second.stderr
    (folder,) = (tmp_path / "out").iterdir()
    assert {path.name for path in folder.iterdir()} == FILES
    assert 'verdict="INCOMPLETE"} 1.0' in (tmp_path / "x.prom").read_text()
    assert not any(alive(int(pid)) for pid in (tmp_path / "pids").read_text().split())


# ---------------- what the driver tells of their health, and for physical limits
CLOCKS = """
from pytest_gpufleet.probes.memory import clocks_under_load
from pytest_gpufleet.machine.health import held_clocks

def test_clocks(world, machine):
    for gpu, seen in zip(machine.gpus, world.run(clocks_under_load), strict=True):
        print("CLOCKS", seen, gpu["sm_clock_max_mhz"], gpu["memory_clock_max_mhz"])
        assert held_clocks(gpu, seen) == []
        locked = seen._replace(sm=int(0.7 * gpu["sm_clock_max_mhz"]), reasons=0)
        assert [fault.name for fault in held_clocks(gpu, locked)] == ["clocks_pinned"]
"""

# Rank 0 meets an assertion in a kernel, by which the driver ends its process: XID 43.
ENDED = """
def assertion(rank):
    import torch

    if rank.index == 0:
        numbers = torch.ones(8, device=rank.device)
        numbers[torch.full((1,), 1 << 20, device=rank.device)].sum().item()

def test_is_ended(world):
    world.run(assertion)

def test_that_follows(world):
    world.run(lambda rank: rank.index)
"""


def test_every_counter_can_be_read_or_is_not_there():
    with local_node.opened(environment={}) as node:
        told = node.facts((*COUNTERS, *SLOW_COUNTERS))
    for gpu in told:
        silent = {name: gpu[name] for name in (*COUNTERS, *SLOW_COUNTERS) if isinstance(gpu[name], Missing)}
        print(gpu.index, {name: gpu[name] for name in (*COUNTERS, "spare_rows", "ecc_corrected")}, silent)
        assert not any(not value.absent for value in silent.values()), silent
        assert all(nanoseconds >= 0 for nanoseconds in gpu["slowdown_ns"].values())


def test_lanes_by_the_system_are_those_of_nvml():
    for gpu in GPUS:
        able = gpu.get("pcie_width_able")
        assert able is None or able["gpu"] >= gpu["pcie_width_max"], gpu.identity


def test_clocks_reach_their_maximum_and_locked_ones_would_show(run_pytest):
    run = run_pytest("--gpus=all", "--fleet-dir=runs", "-s", files={"test_inner.py": CLOCKS})
    assert run.check("test_clocks").outcome == "passed", run.text


def test_what_an_ended_process_leaves_behind_speaks_against_no_gpu(run_pytest):
    run = run_pytest("--gpus=all", "--fleet-dir=runs", files={"test_inner.py": ENDED})
    assert run.check("test_is_ended").outcome == "failed", run.text
    assert run.check("test_that_follows").outcome == "passed", run.text
    codes = {fault.name for fault in run.record.faults}
    assert "rank_raised" in codes or "rank_died" in codes
    assert not any(code.startswith("xid_") and code != "xid_of_process" for code in codes), codes


def test_peaks_of_this_machine():
    for gpu in GPUS:
        made = [peak(gpu) for peak in (peaks.memory_bandwidth, peaks.host_link, peaks.product_rate, peaks.power_bound)]
        assert all(peak.value > 0 for peak in made)
        if board := BOARDS.get(gpu.name):
            facts = ("cuda_cores", "memory_bus_bits", "memory_clock_max_mhz", "sm_clock_max_mhz")
            assert {name: gpu.get(name) for name in facts} == {name: board.gpu().get(name) for name in facts}
            assert made[0].value == pytest.approx(board.memory, rel=0.03)

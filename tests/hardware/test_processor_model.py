"""Model and cores of processors as the kernel shows them, and the firmware of a BMC."""

import pytest

from pytest_gpufleet.hardware import bmc, processors
from pytest_gpufleet.hardware.tools import Untold

# The fields of an m6a.metal of AWS: 2 sockets of 48 cores, 192 threads (README of the public repository
# scann_microbench).
CPUINFO = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 7R13 48-Core Processor\nsiblings\t: 96\n\n"


def lay_out(root, sockets, cores, cpuinfo=CPUINFO):
    for number in range(2 * sockets * cores):  # as Linux numbers them: the second threads come last
        core = number % (sockets * cores)
        topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings").write_text(f"{1 << core | 1 << core + sockets * cores:x}\n")
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(cpuinfo)


def test_threads_are_no_cores(tmp_path):
    lay_out(tmp_path, sockets=2, cores=48)
    told = processors.read_model(tmp_path)
    assert told == {"model": "AMD EPYC 7R13 48-Core Processor", "cores": 96}


def test_a_processor_that_does_not_tell_its_model(tmp_path):
    """As of Arm: it has numbers of its maker and part alone (arch/arm64/kernel/cpuinfo.c)."""
    lay_out(tmp_path, sockets=1, cores=2, cpuinfo="processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n")
    assert processors.read_model(tmp_path) == {"model": None, "cores": 2}


def test_a_system_that_tells_nothing_of_its_processors(tmp_path):
    assert processors.read_model(tmp_path) == {"model": None, "cores": None}


def test_the_firmware_of_a_bmc(tmp_path):
    """The path and the form of ipmi_msghandler.c: "%u.%x"."""
    file = tmp_path / "sys/devices/platform/ipmi_bmc.0/firmware_revision"
    file.parent.mkdir(parents=True)
    file.write_text("24.9\n")
    assert bmc.read_firmware(tmp_path) == "24.9"


def test_without_a_bmc_nothing_is_told_of_it(tmp_path):
    with pytest.raises(Untold, match="BMC"):
        bmc.read_firmware(tmp_path)

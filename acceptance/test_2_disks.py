"""The drives of the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpufleet import Judge, LiveMachine, expect_none
from pytest_gpufleet.machine import disks
from pytest_gpufleet.plugin import assertions
from pytest_gpufleet.probes.disk_reads import read_drive

pytestmark = [
    pytest.mark.chapter("Disks", "Are the host's drives healthy, and do they give back what is written?"),
    pytest.mark.proves_sound,
]


@pytest.mark.level("standard")
@pytest.mark.needs(gpus=True)
def test_drives_are_healthy(machine: LiveMachine) -> None:
    """SMART health of drives: no failure, wear-out, media error or over-temperature

    A drive that fails takes checkpoints and data sets along, and one that is slow or hot makes every GPU wait for its
    next batch. Each NVMe and SATA drive is read by `smartctl`, which needs root. Replace the named drive; if it is hot,
    look at the cooling first. Wear of a few per cent and many unsafe shutdowns are no fault. A drive that cannot be
    read is not judged: run as root, or look into the kernel log where it does not answer.
    """
    drives = assertions.of_host(machine.now, disks.DISK_HEALTH)
    expect_none(disks.failing_drives(drives))
    assertions.require_answers(drive.silent for drive in drives)


@pytest.mark.level("burnin")
@pytest.mark.host_alone
@pytest.mark.needs(gpus=True)
@pytest.mark.figures("drive_bandwidth", "drive_iops")
def test_drive_gives_back_what_is_written(disk_folder: Path | None, judge: Judge) -> None:
    """Drive of --fleet-disk-folder: verified write and read, sequential and random

    1 GiB with a checksum for every 4 KiB, past the page cache, in a minute; the file has no name and leaves nothing
    behind. Changed data mean corruption by drive, cable, controller or memory, unnoticed until a checkpoint does not
    load: look at the kernel log and replace the drive. The read rate of one thread is shown; a data sheet has higher
    rates, for many threads on an empty drive. One far slower than another of its kind: look at its PCIe link and
    temperature. Name a folder on each drive in turn to test them all. It needs fio, and room for 2 GiB.
    """
    faults, figures = read_drive(disk_folder)
    judge(*figures, required=False)
    expect_none(faults)

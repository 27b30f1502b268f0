"""The drives of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_gpufleet import expect_none, of_host, sick_drives

pytestmark = [
    pytest.mark.chapter("Disks", "Are the host's drives healthy, and do they give back what is written?"),
    pytest.mark.proves_sound,
]


@pytest.mark.level("standard")
@pytest.mark.needs(gpus=True)
def test_drives_are_healthy(host_now: Callable[[str], Any]) -> None:
    """No drive says of itself that it fails, is used up, had errors of its medium or is too hot

    A drive that fails takes checkpoints and data sets along, and one that is slow or hot makes every GPU wait for its
    next batch. Asked is each NVMe and SATA drive, by `smartctl` or `nvme`, which need root. Replace the drive that is
    named; of a hot one look at the cooling first. Wear of a few per cent and many unsafe shutdowns are no fault.
    """
    expect_none(sick_drives(of_host(host_now, "disk_health")))

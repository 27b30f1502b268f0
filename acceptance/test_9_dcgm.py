"""NVIDIA's own diagnostic."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_gpufleet import expect_none, not_applicable, not_judged
from pytest_gpufleet.machine import dcgm

pytestmark = pytest.mark.chapter("DCGM", "Does NVIDIA's own diagnostic find anything?")


@pytest.mark.level("burnin")
@pytest.mark.host_alone
@pytest.mark.needs(gpus=True)
def test_dcgm_diagnostic_passes(dcgm_diagnosis: Callable[[], dcgm.Diagnosis]) -> None:
    """NVIDIA's own diagnostic (`dcgmi diag`) passes on every GPU

    Vendors ask for its result before they take a GPU back. It runs at level 2, in a few minutes, or at the level of
    --fleet-dcgm: 3 takes half an hour, 4 up to two hours. It needs DCGM with its host engine (`systemctl start
    nvidia-dcgm`) and all GPUs of the machine, which the suite leaves to it meanwhile. Follow the fault's next step; its
    JSON is part of the evidence. Warnings and tests that it skipped are shown beside the verdict. If it could not run,
    or its output is unknown, nothing is judged.
    """
    found = dcgm_diagnosis()
    expect_none(found.faults)
    if found.unseen:
        not_judged(found.unseen[0])
    if found.skipped:
        not_applicable("DCGM skipped every test of the hardware on these GPUs")

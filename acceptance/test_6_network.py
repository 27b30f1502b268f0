"""Network adapters, cables and transceivers of this machine, before another one is asked to answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_gpufleet import expect_none, links_with_errors, module_faults, of_host

pytestmark = [
    pytest.mark.chapter("Network adapters", "Are adapters, cables and transceivers fast and free of errors?"),
    pytest.mark.level("standard"),
]
needs_gpus = pytest.mark.needs(gpus=True)


@needs_gpus
def test_transceivers_are_well(host_now: Callable[[str], Any]) -> None:
    """Transceivers report no fault and work within their own limits

    Temperature, voltage, laser current and light of each lane, against the limits that the module itself has, and the
    flags that it raises. A module that is too hot or gets too little light goes on for weeks, until its link flaps. Too
    little light: clean the connectors, look for a bent fibre, exchange the cable. Too hot: look at the airflow through
    its cage. Copper cables have no light, and pass with what they have. Needs `mlxlink` (MFT) or `mstlink`, and root.
    """
    expect_none(module_faults(of_host(host_now, "optics")))


@needs_gpus
def test_links_have_few_bit_errors(host_now: Callable[[str], Any]) -> None:
    """Network links have no more bit errors than healthy ones, and stay up

    What is left of bit errors after correction, by the limits from which NVIDIA calls a link faulty, and how often the
    link went down since its counters were cleared. Errors cost bandwidth first, and then the job. Clean and reseat the
    connectors at both ends, then exchange the cable, then look at the switch port: `mlxlink -d mlx5_0 -c`. Rates are
    judged once a link was up for 125 minutes. It needs `mlxlink` (MFT) or `mstlink`, and root.
    """
    expect_none(links_with_errors(of_host(host_now, "optics")))

"""Machines without an NVSwitch: each kind can be ACCEPTED, and a fault between its GPUs is found at its place."""

from dataclasses import replace

import pytest

from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import GiB
from pytest_gpufleet.verdict.peaks import NoPeak
from pytest_gpufleet.verdict.physical_limits import physical_limit
from tests.without_switch import HEALTHY, MACHINES, NARROW_SLOT, SLOW_HOP, named, standard_run


@pytest.mark.parametrize("name", MACHINES)
def test_a_healthy_machine_is_accepted(name: str) -> None:
    record = standard_run(name, HEALTHY)
    assert [each for each in record.findings if each.state in ("missed", "not judged")] == []
    assert record.verdict == "ACCEPTED"
    judged = {str(each.measurement.conditions["collective"]) for each in record.findings
              if each.measurement.metric == "busbw" and each.limit and each.limit.grade == "physical"}  # fmt: skip
    assert judged >= {"all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "sendrecv"}


@pytest.mark.parametrize("name", MACHINES)
def test_one_slow_hop_rejects_and_is_named(name: str) -> None:
    assert standard_run(name, SLOW_HOP).verdict == "REJECTED"
    assert {place for _, place in named(name, SLOW_HOP)} == {"gpu0-gpu1", "gpu1-gpu0"}


@pytest.mark.parametrize("name", MACHINES)
def test_one_card_in_a_slot_of_four_lanes_rejects_and_is_named(name: str) -> None:
    assert standard_run(name, NARROW_SLOT).verdict == "REJECTED"
    found = {place for _, place in named(name, NARROW_SLOT)}
    assert "gpu2" in found
    assert [place for place in found if "gpu2" not in place.split("-")] == []


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("collective", ["all_reduce", "sendrecv", "all_to_all"])
def test_a_collective_at_a_tenth_of_a_healthy_one_is_too_slow(name: str, collective: str) -> None:
    """As over sockets in place of peer access or shared memory."""
    every = [each for each in standard_run(name, HEALTHY).findings if each.measurement.metric == "busbw"]
    at_full_speed = [each for each in every if each.measurement.conditions["bytes"] == GiB and each.limit]
    (found,) = [each for each in at_full_speed if each.measurement.conditions["collective"] == collective]
    assert not any(found.limit.met_by(value / 10) for value in found.measurement.values.values())


def test_the_source_of_a_limit_names_the_hop_that_decides() -> None:
    topology = MACHINES["4x L40S"].topology
    ring = Measurement("ring_bandwidth", {"gpu0-gpu1": 25.0, "gpu1-gpu2": 9.5}, {"link": "SYS"})
    both = {"direction": "device to host both ways", "at_once": "all", "method": "lined up"}
    host = Measurement("host_bandwidth", {"gpu0": 14.0, "gpu3": 12.0}, both)
    busbw = Measurement("busbw", {"world": 9.0}, {"collective": "broadcast", "bytes": GiB, "ranks": 4})

    def source(*measured: Measurement) -> str:
        return physical_limit(busbw, topology, measured).source

    assert source(ring, host).endswith(
        "the slowest hop, gpu1-gpu2 over SYS, with all hops of the ring at once, as measured: 9.5 GB/s"
    )
    for left_out in ("host", "NVLink"):  # the driver's own copies; no hop of PCIe
        slow = replace(ring, conditions={"link": left_out})
        assert "gpu3 device to host both ways, with all GPUs at once" in source(slow, host)
    with pytest.raises(NoPeak, match="has not measured"):
        source(replace(host, conditions={**both, "at_once": "one"}))

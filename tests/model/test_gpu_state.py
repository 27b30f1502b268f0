"""What a GPU was like while a figure was measured on it stands beside the figure, in evidence too."""

import math
from typing import Any

import pytest

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.measurement import GpuState, Measurement
from pytest_gpufleet.model.metric import METRICS
from tests import dry_suite
from tests.boards import H200

WARM = GpuState(temperature_c=61.5, sm_clock_mhz=1410.0)


def evidence_of(measurement: Measurement) -> dict[str, Any]:
    return codec.plain(Finding("a check", measurement, "for information"))


def test_it_stands_in_evidence_but_for_that_of_before() -> None:
    measured = Measurement("gemm", {"gpu0": 690.0, "gpu1": 680.0}, {}, gpu_states={"gpu1": WARM})
    written = evidence_of(measured)
    assert codec.typed(written, Finding).measurement == measured
    del written["measurement"]["gpu_states"]
    assert codec.typed(written, Finding).measurement.gpu_states == {}


@pytest.mark.parametrize("wrong", [61.5, {"temperature_c": 61.5}, None])
def test_it_is_a_gpu_state_and_nothing_else(wrong: Any) -> None:
    with pytest.raises(TypeError, match="GpuState"):
        Measurement("gemm", {"gpu0": 690.0}, {}, gpu_states={"gpu0": wrong})


def test_evidence_with_a_state_that_is_no_number_is_not_read() -> None:
    written = evidence_of(Measurement("gemm", {"gpu0": 690.0}, {}, gpu_states={"gpu0": WARM}))
    for value in ("hot", math.inf):
        written["measurement"]["gpu_states"]["gpu0"]["temperature_c"] = value
        with pytest.raises(ValueError, match="temperature_c"):
            codec.typed(written, Finding)


# Made of other figures, of the state itself, or of how much was compared.
DERIVED = {"corruption_bound", "scaling_efficiency", "soak_temperature", "soak_excess", "soak_clock", "soak_power"}


def test_it_stands_beside_every_figure_that_gpus_give_at_level_standard() -> None:
    machine = H200.machine(4, "pcie", memory_bytes=141 << 30)
    measured = dry_suite.measured(H200, machine, 1, False, "standard", METRICS)
    assert {each.metric for each in measured if len(each.gpu_states) < len(each.values)} == DERIVED
    assert {"pair_bandwidth", "ring_bandwidth", "host_bandwidth", "busbw"} <= {each.metric for each in measured}

"""Facts that a GPU must have by its model, and what is said where they cannot be read."""

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpufleet.machine.gpu_facts import MUST_HAVE, TELEMETRY, unreadable_by_model
from pytest_gpufleet.model.gpu import Gpu, Missing
from pytest_gpufleet.verdict.gaps import counted, gaps, without_telemetry
from pytest_gpufleet.verdict.reading import read
from pytest_gpufleet.verdict.verdict import conclude

ABSENT = Missing("NVML: Not Supported", absent=True)
ECC = {"ecc_uncorrected_volatile", "ecc_uncorrected_aggregate", "ecc_corrected_volatile"}
ALWAYS = {"ecc_mode", "pcie_replays", "power_limit_watts", *TELEMETRY}
SERVER, LINKED = ALWAYS | ECC | {"remapped_rows"}, ALWAYS | ECC | {"remapped_rows", "nvlink_errors"}
LINKS = [1] * 18

# Name, what can be read, and the facts that it must have besides.
MODELS = {
    "an H200 of which only the name can be read": ("NVIDIA H200", {}, SERVER),
    "an H200 with links": ("NVIDIA H200", {"nvlink_states": LINKS, "compute_capability": [9, 0]}, LINKED),
    "an unknown model of a data centre": ("NVIDIA H200 NVL", {"compute_capability": [9, 0]}, SERVER),
    "a B300": ("NVIDIA B300 SXM6 AC", {"nvlink_states": LINKS, "compute_capability": [10, 3]}, LINKED),
    "a T4 retires pages": ("Tesla T4", {"compute_capability": [7, 5]}, ALWAYS | ECC | {"retired_pages_pending"}),
    "sold with error correction off": ("NVIDIA RTX A6000", {"ecc_mode": [0, 0]}, ALWAYS - {"ecc_mode"}),
    "a GeForce of a shipped profile": ("NVIDIA GeForce RTX 3090", {"compute_capability": [8, 6]}, set()),
    "a TITAN": ("NVIDIA TITAN V", {"compute_capability": [7, 0]}, set()),
    "an unknown card": ("NVIDIA X9000", {"compute_capability": [8, 6]}, set()),
}


@pytest.mark.parametrize(("model", "facts", "expected"), MODELS.values(), ids=MODELS)
def test_what_a_model_must_have(model, facts, expected):
    gpu = Gpu(5, {**dict.fromkeys(MUST_HAVE, ABSENT), "name": model, **facts})
    lines = unreadable_by_model([gpu], MUST_HAVE)
    missing = [fact for fact in MUST_HAVE if any(f": {fact} cannot be read (NVML: Not" in line for line in lines)]
    assert set(missing) == expected
    assert all(line.startswith(f"GPU 5 {model}, ") for line in lines)


@pytest.fixture
def recorded():
    """A machine that was ACCEPTED."""
    record = read(Path(__file__).parents[1] / "recorded" / "h200x1-e" / "evidence.jsonl")
    return replace(record, verdict=None)


@pytest.mark.parametrize("name", TELEMETRY)
def test_telemetry_without_one_value_is_a_gap(recorded, name):
    assert without_telemetry(recorded) == []
    for sample in recorded.telemetry[1:]:
        sample.gpus[0][name] = None
    assert without_telemetry(recorded) == [], "one value is enough"
    recorded.telemetry[0].gpus[0][name] = None
    identity = recorded.topology.gpus[0].identity
    verdict, reasons = conclude(recorded)
    assert verdict == "INCOMPLETE"
    assert f"{identity}: telemetry never had {name}: no slowdown would have been seen" in reasons
    assert "1 GPU without telemetry" in counted(gaps(recorded))


@pytest.mark.parametrize("kept", ["samples of nothing", "no sample"])
@pytest.mark.parametrize("model", ["NVIDIA H200", "NVIDIA X9000"])
def test_telemetry_that_is_not_there_at_all_is_a_gap(recorded, kept, model):
    (gpu,) = recorded.topology.gpus
    recorded.topology = replace(recorded.topology, gpus=(replace(gpu, facts={**gpu.facts, "name": model}),))
    recorded.telemetry = [replace(sample, gpus=()) for sample in recorded.telemetry if kept == "samples of nothing"]
    assert len(without_telemetry(recorded)) == 1
    assert conclude(recorded)[0] == "INCOMPLETE"

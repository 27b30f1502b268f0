"""What a GPU must tell of itself. Where it does not, what rests on it is not judged: who cannot see a fault has not
found that there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from pytest_gpufleet.model.facts import Unavailable
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.verdict.profiles.profile import for_gpu

if TYPE_CHECKING:
    from pytest_gpufleet.model.record import Record

# Compute capabilities that only GPUs of data centres have: A100 and A30; H100 to H200; B200 and GB200; B300.
DATA_CENTRE = ((8, 0), (9, 0), (10, 0), (10, 3))
# Of the shipped profiles' models, those of which NVIDIA leaves open what NVML tells.
CONSUMER = ("GeForce", "TITAN")
# Telemetry without which no slowdown and no heat would be seen.
TELEMETRY = ("clock_event_reasons", "temperature_c", "power_watts")


def _known(gpu: Gpu) -> bool:
    """Either is enough: a GPU that tells next to nothing still tells its name."""
    consumer = any(word in gpu.name for word in CONSUMER)
    return not consumer and (gpu.compute_capability in DATA_CENTRE or for_gpu(gpu.name) is not None)


def _corrects_errors(gpu: Gpu) -> bool:
    mode = gpu["ecc_mode"]
    return _known(gpu) and not (isinstance(mode, list) and mode[0] == 0)


def _remaps_rows(gpu: Gpu) -> bool:
    """From Ampere on; before, whole pages were retired."""
    return _corrects_errors(gpu) and not gpu.name.startswith("Tesla")


def _retires_pages(gpu: Gpu) -> bool:
    return _corrects_errors(gpu) and not _remaps_rows(gpu)


def _counts_link_errors(gpu: Gpu) -> bool:
    return _known(gpu) and gpu.nvlinks_active > 0 and gpu.compute_capability in DATA_CENTRE


# Fact: which GPUs have it, whatever their driver or nvidia-ml-py says. What is not here, a healthy GPU may lack: the
# SRAM threshold under an older driver, PCIe links and NUMA nodes in a virtual machine.
MUST_TELL: dict[str, Callable[[Gpu], bool]] = {
    "ecc_mode": _known,
    **dict.fromkeys(
        ("ecc_uncorrected_volatile", "ecc_uncorrected_aggregate", "ecc_corrected_volatile"), _corrects_errors
    ),
    "remapped_rows": _remaps_rows,
    "retired_pages_pending": _retires_pages,
    "pcie_replays": _known,
    "nvlink_errors": _counts_link_errors,
    "power_limit_watts": _known,
    **dict.fromkeys(TELEMETRY, _known),
}


def untold(gpus: Iterable[Gpu], facts: Iterable[str]) -> list[str]:
    """Facts that GPUs have by their model and do not tell, one line each that names the GPU and gives the reason."""
    facts = tuple(facts)
    return [
        f"{gpu.identity}: {fact} cannot be read ({gpu[fact]}), and this model has it"
        for gpu in gpus
        for fact in facts
        if fact in MUST_TELL and isinstance(gpu[fact], Unavailable) and MUST_TELL[fact](gpu)
    ]


def without_telemetry(record: Record) -> list[tuple[str, str]]:
    """The GPUs of which a reading of TELEMETRY was never had while the run lasted, with what is missing."""
    if record.run.rehearsal or not record.telemetry:
        return []
    found = []
    for position, gpu in enumerate(record.topology.gpus):
        readings = [taken for sample in record.telemetry for taken in sample["gpus"][position : position + 1]]
        never = [name for name in TELEMETRY if all(taken.get(name) is None for taken in readings)]
        if never and _known(gpu):
            found.append((gpu.identity, f"telemetry never had {_listed(never)}: no slowdown would have been seen"))
    return found


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))

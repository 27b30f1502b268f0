"""Which checks a level requires. A run that leaves one out is INCOMPLETE, whatever the command line selected."""

from __future__ import annotations

LEVELS = ("quick", "standard", "burnin")

# Test file and function of the shipped suite, with the lowest level that requires it; a test holds this list to what
# acceptance/ contains.
CHECKS = {
    "test_1_inventory.py::test_gpu_count": "quick",
    "test_1_inventory.py::test_software_fits_driver": "quick",
    "test_1_inventory.py::test_gpus_are_alike": "quick",
    "test_1_inventory.py::test_no_foreign_process": "quick",
    "test_1_inventory.py::test_every_rank_reaches_its_gpu": "quick",
    "test_2_exactness.py::test_collective_is_exact": "quick",
    "test_3_bandwidth.py::test_bus_bandwidth": "standard",
    "test_4_training.py::test_phase_1_gradients_are_averaged": "standard",
    "test_4_training.py::test_phase_2_loss_falls": "standard",
    "test_4_training.py::test_phase_3_ranks_stay_identical": "standard",
    "test_5_resnet50.py::test_each_gpu_alone": "standard",
    "test_5_resnet50.py::test_throughput_and_scaling": "standard",
}


def includes(level: str, lowest: str) -> bool:
    """Whether a run at `level` contains what is marked with `lowest`."""
    return LEVELS.index(lowest) <= LEVELS.index(level)


def required(level: str) -> list[str]:
    return [check for check, lowest in CHECKS.items() if includes(level, lowest)]


def check_name(node_id: str) -> str:
    """ "acceptance/test_1_inventory.py::test_gpu_count[x]" -> "test_1_inventory.py::test_gpu_count" """
    path, _, function = node_id.partition("::")
    return f"{path.rsplit('/', 1)[-1]}::{function.split('[', 1)[0]}"

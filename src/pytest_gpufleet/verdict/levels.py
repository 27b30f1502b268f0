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
    "test_1_inventory.py::test_no_harmful_variable": "quick",
    "test_1_inventory.py::test_pcie_width_is_full": "quick",
    "test_1_inventory.py::test_pcie_generation_is_full_under_load": "quick",
    "test_1_inventory.py::test_nvlinks_are_up": "quick",
    "test_1_inventory.py::test_nvlinks_are_equally_fast": "quick",
    "test_1_inventory.py::test_fabric_is_ready": "quick",
    "test_1_inventory.py::test_every_pair_reaches_each_other": "quick",
    "test_1_inventory.py::test_ecc_is_on": "quick",
    "test_1_inventory.py::test_mig_is_off": "quick",
    "test_1_inventory.py::test_compute_mode_is_default": "quick",
    "test_1_inventory.py::test_persistence_mode_is_on": "quick",
    "test_1_inventory.py::test_power_limit_is_default": "quick",
    "test_1_inventory.py::test_application_clocks_are_default": "quick",
    "test_1_inventory.py::test_no_recovery_is_pending": "quick",
    "test_1_inventory.py::test_inforom_is_valid": "quick",
    "test_1_inventory.py::test_shared_memory_is_large_enough": "quick",
    "test_1_inventory.py::test_memory_may_be_locked": "quick",
    "test_1_inventory.py::test_every_rank_reaches_its_gpu": "quick",
    "test_2_health.py::test_no_memory_error_is_recorded": "quick",
    "test_2_health.py::test_no_grave_xid_in_the_kernel_log": "quick",
    "test_3_exactness.py::test_collective_is_exact": "quick",
    "test_6_collectives.py::test_bus_bandwidth": "standard",
    "test_7_training.py::test_phase_1_gradients_are_averaged": "standard",
    "test_7_training.py::test_phase_2_loss_falls": "standard",
    "test_7_training.py::test_phase_3_ranks_stay_identical": "standard",
    "test_8_resnet50.py::test_each_gpu_alone": "standard",
    "test_8_resnet50.py::test_throughput_and_scaling": "standard",
    "test_9_endurance.py::test_nvlinks_stayed_clean": "quick",
}


# How many cases a parametrized check has: one alone, picked by its node id, is not the check. The same test holds it.
CASES = {
    "test_1_inventory.py::test_gpus_are_alike": 7,
    "test_3_exactness.py::test_collective_is_exact": 21,
    "test_6_collectives.py::test_bus_bandwidth": 42,
    "test_8_resnet50.py::test_throughput_and_scaling": 3,
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

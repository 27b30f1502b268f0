"""Which checks a level requires. A run that leaves one out is INCOMPLETE, whatever the command line selected."""

from __future__ import annotations

LEVELS = ("quick", "standard", "burnin")
BURN_IN_SECONDS = 900.0  # what level burnin asks for

# Test file and function of the shipped suite, with the lowest level that requires it; a test holds this list to what
# acceptance/ contains.
CHECKS = {
    "test_1_inventory.py::test_gpu_count": "quick",
    "test_1_inventory.py::test_software_fits_driver": "quick",
    "test_1_inventory.py::test_gpus_are_alike": "quick",
    "test_1_inventory.py::test_memory_is_complete": "quick",
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
    "test_1_inventory.py::test_files_may_be_opened": "quick",
    "test_1_inventory.py::test_processors_run_at_full_clock": "quick",
    "test_1_inventory.py::test_processors_near_each_gpu_may_be_used": "quick",
    "test_1_inventory.py::test_network_ports_are_active": "quick",
    "test_1_inventory.py::test_every_rank_reaches_its_gpu": "quick",
    "test_2_health.py::test_no_memory_error_is_recorded": "quick",
    "test_2_health.py::test_no_grave_xid_in_the_kernel_log": "quick",
    "test_3_exactness.py::test_collective_is_exact": "quick",
    "test_3_exactness.py::test_groups_are_exact": "standard",
    "test_3_exactness.py::test_tensors_with_gaps_are_exact": "standard",
    "test_3_exactness.py::test_two_collectives_at_once_are_exact": "standard",
    "test_3_exactness.py::test_largest_all_reduce_is_exact": "standard",
    "test_3_exactness.py::test_all_reduce_stays_exact": "standard",
    "test_4_each_gpu.py::test_matrix_product_is_exact": "quick",
    "test_4_each_gpu.py::test_matrix_product_is_fast": "standard",
    "test_4_each_gpu.py::test_one_gpu_at_a_time": "standard",
    "test_4_each_gpu.py::test_products_repeat_bit_for_bit": "standard",
    "test_4_each_gpu.py::test_memory_bandwidth": "standard",
    "test_4_each_gpu.py::test_memory_holds_patterns": "standard",
    "test_5_links.py::test_data_crosses_every_pair_unharmed": "quick",
    "test_5_links.py::test_host_bandwidth_of_each_gpu": "standard",
    "test_5_links.py::test_host_bandwidth_of_all_gpus": "standard",
    "test_5_links.py::test_pair_bandwidth": "standard",
    "test_5_links.py::test_pair_latency": "standard",
    "test_6_collectives.py::test_latency": "standard",
    "test_6_collectives.py::test_bandwidth_curve": "standard",
    "test_6_collectives.py::test_bus_bandwidth": "standard",
    "test_7_training.py::test_phase_1_gradients_are_averaged": "standard",
    "test_7_training.py::test_gradients_accumulate_without_communication": "standard",
    "test_7_training.py::test_unused_parameters_are_found": "standard",
    "test_7_training.py::test_buffers_come_from_rank_0": "standard",
    "test_7_training.py::test_phase_2_loss_falls": "standard",
    "test_7_training.py::test_phase_3_ranks_stay_identical": "standard",
    "test_7_training.py::test_fsdp_is_exact": "standard",
    "test_7_training.py::test_ddp_and_fsdp_train_as_one_gpu": "standard",
    "test_7_training.py::test_checkpoint_loads_on_fewer_ranks": "standard",
    "test_7_training.py::test_overflow_on_one_rank_skips_the_step_on_all": "standard",
    "test_8_resnet50.py::test_each_gpu_alone": "standard",
    "test_8_resnet50.py::test_throughput_and_scaling": "standard",
    "test_8_resnet50.py::test_peak_throughput_and_scaling": "burnin",
    "test_8_resnet50.py::test_training_fed_by_a_data_loader": "standard",
    "test_8_resnet50.py::test_data_parallel_ddp_and_fsdp": "burnin",
    "test_8_resnet50.py::test_batch_sizes": "burnin",
    "test_8_resnet50.py::test_training_in_full_memory": "burnin",
    "test_9_endurance.py::test_burn_in": "burnin",
    "test_9_endurance.py::test_nvlinks_stayed_clean": "quick",
    "test_9_endurance.py::test_pcie_links_stayed_clean": "quick",
}


# How many cases a parametrized check has: one alone, picked by its node id, is not the check. The same test holds it.
CASES = {
    "test_1_inventory.py::test_gpus_are_alike": 6,
    "test_3_exactness.py::test_collective_is_exact": 21,
    "test_3_exactness.py::test_groups_are_exact": 3,
    "test_4_each_gpu.py::test_matrix_product_is_exact": 6,
    "test_4_each_gpu.py::test_matrix_product_is_fast": 6,
    "test_4_each_gpu.py::test_products_repeat_bit_for_bit": 6,
    "test_5_links.py::test_host_bandwidth_of_each_gpu": 3,
    "test_5_links.py::test_host_bandwidth_of_all_gpus": 3,
    "test_5_links.py::test_pair_bandwidth": 3,
    "test_6_collectives.py::test_latency": 9,
    "test_6_collectives.py::test_bandwidth_curve": 9,
    "test_6_collectives.py::test_bus_bandwidth": 27,
    "test_7_training.py::test_phase_3_ranks_stay_identical": 2,
    "test_7_training.py::test_ddp_and_fsdp_train_as_one_gpu": 2,
    "test_7_training.py::test_overflow_on_one_rank_skips_the_step_on_all": 2,
    "test_8_resnet50.py::test_throughput_and_scaling": 4,
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

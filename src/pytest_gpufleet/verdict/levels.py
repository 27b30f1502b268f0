"""The checks of the shipped suite, and which of them a level requires. A run that leaves one out is INCOMPLETE,
whatever the command line selected."""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("quick", "standard", "burnin")
BURN_IN_SECONDS = 900.0  # what level burnin asks for


@dataclass(frozen=True)
class Required:
    """A check of the suite: the lowest level that requires it, the first line of its docstring, and how many cases it
    has: of one that is parametrized, one case alone, picked by its node id, is not the check."""

    level: str
    title: str
    cases: int = 1


# By test file and function; a test holds this table to what acceptance/ contains. It stands here, since a check that
# never ran cannot tell.
CHECKS = {
    "test_1_inventory.py::test_gpu_count": Required("quick", "As many GPUs as ordered"),
    "test_1_inventory.py::test_software_fits_driver": Required(
        "quick", "Driver, CUDA, cuDNN, NCCL and torch are there and fit together"
    ),
    "test_1_inventory.py::test_gpus_are_alike": Required(
        "quick", "All GPUs are of one model, board, firmware, memory size and slot generation", cases=6
    ),
    "test_1_inventory.py::test_memory_is_complete": Required("quick", "Every GPU has all the memory of its model"),
    "test_1_inventory.py::test_no_foreign_process": Required("quick", "Nobody else computes on these GPUs"),
    "test_1_inventory.py::test_no_harmful_variable": Required(
        "quick", "No variable in the environment slows NCCL or CUDA down"
    ),
    "test_1_inventory.py::test_pcie_width_is_full": Required("quick", "Every GPU's PCIe link has all its lanes"),
    "test_1_inventory.py::test_pcie_generation_is_full_under_load": Required(
        "quick", "Every GPU's PCIe link runs at the highest speed of its model while data flows"
    ),
    "test_1_inventory.py::test_nvlinks_are_up": Required(
        "quick", "Every NVLink is active, and there are as many as this model has"
    ),
    "test_1_inventory.py::test_nvlinks_are_equally_fast": Required(
        "quick", "All NVLinks of all GPUs run at one speed, and at that of this model"
    ),
    "test_1_inventory.py::test_fabric_is_ready": Required("quick", "The NVSwitch fabric has taken in every GPU"),
    "test_1_inventory.py::test_every_pair_reaches_each_other": Required(
        "quick", "Peer access works between all GPUs that NVLinks connect"
    ),
    "test_1_inventory.py::test_ecc_is_on": Required("quick", "Error correction is on, now and after the next boot"),
    "test_1_inventory.py::test_mig_is_off": Required("quick", "No GPU is split into instances"),
    "test_1_inventory.py::test_compute_mode_is_default": Required(
        "quick", "Any process may use the GPUs (compute mode 0)"
    ),
    "test_1_inventory.py::test_persistence_mode_is_on": Required("quick", "The driver stays loaded between programs"),
    "test_1_inventory.py::test_power_limit_is_default": Required("quick", "No GPU's power limit was lowered"),
    "test_1_inventory.py::test_application_clocks_are_default": Required("quick", "No GPU's clocks are pinned"),
    "test_1_inventory.py::test_no_recovery_is_pending": Required(
        "quick", "The driver calls for no recovery of any GPU"
    ),
    "test_1_inventory.py::test_inforom_is_valid": Required("quick", "The board's own records are intact"),
    "test_1_inventory.py::test_shared_memory_is_large_enough": Required("quick", "/dev/shm has at least 8 GiB"),
    "test_1_inventory.py::test_memory_may_be_locked": Required(
        "quick", "Programs may lock as much memory as they need"
    ),
    "test_1_inventory.py::test_files_may_be_opened": Required(
        "quick", "Programs may open at least 16,384 files at once (hard limit)"
    ),
    "test_1_inventory.py::test_processors_run_at_full_clock": Required(
        "quick", "The host's processors are not slowed down to save power"
    ),
    "test_1_inventory.py::test_processors_near_each_gpu_may_be_used": Required(
        "quick", "Programs may run on processors next to every GPU"
    ),
    "test_1_inventory.py::test_network_ports_are_active": Required(
        "quick", "All InfiniBand and RoCE ports are up, at one speed"
    ),
    "test_1_inventory.py::test_every_rank_reaches_its_gpu": Required(
        "quick", "Each process gets its own device and can compute on it"
    ),
    "test_2_health.py::test_no_memory_error_is_recorded": Required(
        "quick", "No GPU has uncorrectable memory errors, and no repair of its memory is pending or has failed"
    ),
    "test_2_health.py::test_no_grave_xid_in_the_kernel_log": Required(
        "quick", "The kernel log holds no XID that condemns a GPU, and no fatal SXid of an NVSwitch"
    ),
    "test_3_exactness.py::test_collective_is_exact": Required(
        "quick", "Every element of a collective's result is exactly right", cases=21
    ),
    "test_3_exactness.py::test_groups_are_exact": Required(
        "standard", "all_reduce is exact in groups of some of the GPUs, as parallel training makes them", cases=3
    ),
    "test_3_exactness.py::test_tensors_with_gaps_are_exact": Required(
        "standard", "Every second element of a tensor is sent exactly, and what lies between stays as it is"
    ),
    "test_3_exactness.py::test_two_collectives_at_once_are_exact": Required(
        "standard", "Two collectives at the same time, in two groups on two streams, do not disturb each other"
    ),
    "test_3_exactness.py::test_largest_all_reduce_is_exact": Required(
        "standard", "Every element of an all_reduce of 8 GiB is exactly right"
    ),
    "test_3_exactness.py::test_all_reduce_stays_exact": Required(
        "standard", "Every one of thousands of large all_reduces in a row is exactly right"
    ),
    "test_4_each_gpu.py::test_matrix_product_is_exact": Required(
        "quick", "Every GPU multiplies small whole numbers without a single wrong element", cases=6
    ),
    "test_4_each_gpu.py::test_matrix_product_is_fast": Required(
        "standard", "Matrix products are as fast as on a healthy GPU, with all GPUs under full load", cases=6
    ),
    "test_4_each_gpu.py::test_one_gpu_at_a_time": Required(
        "standard", "Matrix products are as fast as on a healthy GPU while all other GPUs rest"
    ),
    "test_4_each_gpu.py::test_products_repeat_bit_for_bit": Required(
        "standard",
        "No silent data corruption: the same product always gives the same bits, and the same on all GPUs",
        cases=6,
    ),
    "test_4_each_gpu.py::test_memory_bandwidth": Required(
        "standard", "Every GPU's memory is as fast as on a healthy GPU of its model"
    ),
    "test_4_each_gpu.py::test_memory_holds_patterns": Required(
        "standard",
        "Every GPU's free memory can be allocated, holds what is written into it, and is free again afterwards",
    ),
    "test_5_links.py::test_data_crosses_every_pair_unharmed": Required(
        "quick", "Every GPU reads from every other one exactly what is there"
    ),
    "test_5_links.py::test_host_bandwidth_of_each_gpu": Required(
        "standard", "Bandwidth between host memory and each GPU, while the others rest", cases=3
    ),
    "test_5_links.py::test_host_bandwidth_of_all_gpus": Required(
        "standard", "Bandwidth between host memory and each GPU, all at the same time", cases=3
    ),
    "test_5_links.py::test_pair_bandwidth": Required("standard", "Bandwidth between the GPUs of every pair", cases=3),
    "test_5_links.py::test_pair_latency": Required("standard", "Time of a small copy between the GPUs of every pair"),
    "test_6_collectives.py::test_latency": Required("standard", "How long a collective of a few bytes takes", cases=9),
    "test_6_collectives.py::test_bandwidth_curve": Required(
        "standard", "How the bus bandwidth of a collective grows with the size", cases=9
    ),
    "test_6_collectives.py::test_bus_bandwidth": Required(
        "standard", "Bus bandwidth of a collective over all GPUs", cases=27
    ),
    "test_7_training.py::test_phase_1_gradients_are_averaged": Required(
        "standard", "Training, phase 1: every rank gets the average of all ranks' gradients"
    ),
    "test_7_training.py::test_gradients_accumulate_without_communication": Required(
        "standard",
        "Training, phase 1: under no_sync gradients stay on their rank, and the next step averages all of them",
    ),
    "test_7_training.py::test_unused_parameters_are_found": Required(
        "standard", "Training, phase 1: a layer gets its gradient from the ranks that used it, and none if nobody did"
    ),
    "test_7_training.py::test_buffers_come_from_rank_0": Required(
        "standard", "Training, phase 1: every rank has rank 0's running statistics of batch normalization"
    ),
    "test_7_training.py::test_phase_2_loss_falls": Required("standard", "Training, phase 2: a small network learns"),
    "test_7_training.py::test_phase_3_ranks_stay_identical": Required(
        "standard",
        "Training, phase 3: through several epochs weights, gradients and momentum are the same on "
        "all ranks, bit for bit",
        cases=2,
    ),
    "test_7_training.py::test_fsdp_is_exact": Required(
        "standard", "Training, FSDP: gathered weights and the updated shard of every rank are right to the last bit"
    ),
    "test_7_training.py::test_ddp_and_fsdp_train_as_one_gpu": Required(
        "standard",
        "Training: DDP and FSDP give the losses and weights that one GPU gives with the same global batch",
        cases=2,
    ),
    "test_7_training.py::test_checkpoint_loads_on_fewer_ranks": Required(
        "standard",
        "Training, FSDP: a checkpoint of all GPUs gives half of them, and one, the same weights and "
        "the same next losses",
    ),
    "test_7_training.py::test_overflow_on_one_rank_skips_the_step_on_all": Required(
        "standard",
        "Training: if a gradient overflows on one GPU, all GPUs skip the step and halve the scale; "
        "then training goes on",
        cases=2,
    ),
    "test_8_resnet50.py::test_each_gpu_alone": Required(
        "standard", "ResNet-50 on every GPU by itself, all at the same time"
    ),
    "test_8_resnet50.py::test_throughput_and_scaling": Required(
        "standard", "ResNet-50 throughput on one GPU and on all, and how well it scales", cases=4
    ),
    "test_8_resnet50.py::test_peak_throughput_and_scaling": Required(
        "burnin",
        "ResNet-50 as fast as plain PyTorch can train it: 16-bit weights, compiled, the whole step one CUDA graph",
    ),
    "test_8_resnet50.py::test_training_fed_by_a_data_loader": Required(
        "standard", "ResNet-50 on JPEG files: whether the host decodes them as fast as the GPUs could train"
    ),
    "test_8_resnet50.py::test_data_parallel_ddp_and_fsdp": Required(
        "burnin", "DataParallel, DDP and FSDP at the same global batch: throughput, memory and efficiency"
    ),
    "test_8_resnet50.py::test_batch_sizes": Required(
        "burnin", "ResNet-50 throughput by batch size, up to the largest that fits into the memory of one GPU"
    ),
    "test_8_resnet50.py::test_training_in_full_memory": Required(
        "burnin", "Training with 95 % of every GPU's memory in use: it goes on, and the memory is free again afterwards"
    ),
    "test_9_endurance.py::test_burn_in": Required(
        "burnin", "All GPUs work at full load for as long as was asked for, without a wrong bit, a fault or a slowdown"
    ),
    "test_9_endurance.py::test_nvlinks_stayed_clean": Required(
        "quick", "No NVLink had replays, recoveries, flit errors or a flood of CRC errors while this run used it"
    ),
    "test_9_endurance.py::test_pcie_links_stayed_clean": Required(
        "quick", "No PCIe link of a GPU had more replays than a healthy one while this run used it"
    ),
}


def includes(level: str, lowest: str) -> bool:
    """Whether a run at `level` contains what is marked with `lowest`."""
    return LEVELS.index(lowest) <= LEVELS.index(level)


def required(level: str) -> list[str]:
    return [name for name, check in CHECKS.items() if includes(level, check.level)]


def check_name(node_id: str) -> str:
    """ "acceptance/test_1_inventory.py::test_gpu_count[x]" -> "test_1_inventory.py::test_gpu_count" """
    path, _, function = node_id.partition("::")
    return f"{path.rsplit('/', 1)[-1]}::{function.split('[', 1)[0]}"


def cases(name: str) -> int:
    """How many cases a check has; 1 for those of other suites."""
    return CHECKS[name].cases if name in CHECKS else 1


def titled(check_id: str, title: str = "") -> str:
    """ "Its title (file.py::test_name)" for a person; without any title, only the id."""
    known = CHECKS.get(check_name(check_id))
    title = title or (known.title if known else "")
    return f"{title} ({check_id})" if title else check_id

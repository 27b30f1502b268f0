"""The words of a profile: its facts, and which conditions its limits may name."""

# Figures of the data sheet, and what each of them is. A fact is left out where the GPU has no such thing, or where
# nobody says.
FACTS = {
    "memory_gigabytes": "GB",
    "power_watts": "the default power limit",
    "pcie_generation": "of a link with 16 lanes",
    "pcie_width": "lanes, of machines that were ordered with fewer than the GPU has",
    "nvlinks": "0: it has none",
    "nvlink_gigabytes_per_second": "GB/s in one direction, all NVLinks of one GPU together",
    "hbm_terabytes_per_second": "TB/s of its memory, of whatever kind",
    "peak_tflops_fp64": "TFLOP/s; with tensor cores, where they do fp64",
    "peak_tflops_fp32": "TFLOP/s without tensor cores",
    "peak_tflops_tf32": "TFLOP/s, dense",
    "peak_tflops_fp16": "TFLOP/s, dense",
    "peak_tflops_bf16": "TFLOP/s, dense",
    "peak_tflops_fp8": "TFLOP/s, dense",
}

# What is out of the ordinary is measured under these as well, and only a limit that names them holds for it. A metric
# that is measured another way than before gets a `method`, so that limits and comparisons never mix the two.
# What several nodes do together is under `nodes`: limits of one node with as many ranks do not hold for it.
EXTRAORDINARY = ("optimizer", "workload", "method", "nodes")

# Of figures between nodes: Gb/s of all network ports of a node, and what NCCL makes of them.
BETWEEN_NODES = ("nodes", "network", "nccl", "algorithm")
_TRANSFER = ("collective", "bytes", "dtype", "ranks", "in_place", "nvls", "fabric", "method", *BETWEEN_NODES)
_TRAINING = ("model", "recipe", "ranks", "batch", *EXTRAORDINARY)
_UNDER_LOAD = ("collective", "precision", "bytes", "ranks", "nvls", "method")

# Of the conditions that the probes give with each metric, those that a limit may name, and the fabric of the machine. A
# limit that named one that no probe gives could never hold, and nobody would notice.
MEASURED_UNDER: dict[str, tuple[str, ...]] = {
    "busbw": _TRANSFER,
    "collective_latency": _TRANSFER,
    "node_group_busbw": _TRANSFER,
    "rail_bandwidth": ("at_once", "bytes", "method", *BETWEEN_NODES[1:]),
    "nic_bandwidth": ("bytes", "port_rate", "method"),
    "port_events": (),
    "launch_time": ("collective", "bytes", "ranks", "method"),
    "gemm": ("precision", "at_once", "work", "method"),
    "gemm_relative": ("at_once", "method"),
    "memory_bandwidth": ("operation", "at_once", "method"),
    "host_bandwidth": ("direction", "at_once", "method"),
    "host_memory_bandwidth": ("operation", "method"),
    "drive_bandwidth": ("bytes", "queue_depth"),
    "drive_iops": ("bytes", "queue_depth"),
    "pair_bandwidth": ("direction", "link", "fabric", "method"),
    "pair_latency": ("link", "fabric", "method"),
    "train_throughput": _TRAINING,
    "solo_train_throughput": _TRAINING,
    "train_memory": _TRAINING,
    "scaling_efficiency": _TRAINING,
    "communication_share": _TRAINING,
    "train_utilization": _TRAINING,
    "loader_throughput": _TRAINING,
    "solo_token_throughput": _TRAINING,
    "token_throughput": _TRAINING,
    "model_flops_utilization": _TRAINING,
    "product_retention": _UNDER_LOAD,
    "reduction_retention": _UNDER_LOAD,
    "soak_temperature": ("method",),
    "soak_clock": ("method",),
    "soak_power": ("method",),
    "burn_power": ("method",),
    "burn_peak_power": ("method",),
    "burn_retention": ("work", "method"),
    "step_power": ("method",),
    "power_swing": ("method",),
    "step_skew": ("method",),
    "step_retention": ("method",),
}

"""What is measured under which conditions: each that the suite's probes give, its values, and its words."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Condition = str | int | float | bool
Conditions = Mapping[str, Condition]
# Work that is trained in several ways beside each other, for information. Parts of the sweep had names of their own.
COMPARED_WORK = ("sweep", "comparison", "accumulation")


@dataclass(frozen=True)
class ConditionType:
    """`values`: the type of the value, or the values there are, of which a limit may name one; None: no limit may. A
    reader sees the `words` of a value, else the value in `form`. `leads`: what is measured is named by it, even where
    all figures beside each other have it in common."""

    values: type[int] | type[bool] | type[str] | tuple[str, ...] | None
    form: str = "{}"
    words: Mapping[Any, str] = field(default_factory=dict)
    leads: bool = False


COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "gather", "scatter", "sendrecv",
)  # fmt: skip

DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int8", "uint8", "bool",
)  # fmt: skip

# One direction while the other is as busy. "both" added the two up, before version 0.3.
BOTH_WAYS = {
    "host to device both ways": "host to device, both ways busy",
    "device to host both ways": "device to host, both ways busy",
    "write both ways": "write, both ways busy",
}

METHODS = {"dp": "DataParallel", "ddp": "DDP", "fsdp": "FSDP"}
# What several GPUs are held against: what each of them does alone, all at the same time, added up.
EACH_ALONE = "sum of each alone"
# Of metrics that were measured in another way before: matrix products of one shape, over one window; what a burn-in
# retains of the rate of warm GPUs; host links that all begin to copy at the same moment.
ONE_WINDOW, WARMED_THROUGH, LINED_UP = "one window", "warmed through", "lined up"
# Products and an all_reduce at once: only the time in which both were under way counts.
SHARED_SPAN = "shared span"
# What a GPU does by itself in the steps of DDP that leave communication out (torch's no_sync).
NO_SYNC = "no_sync"

# How a metric is measured that can be measured in several ways.
WAYS = {
    **METHODS,
    EACH_ALONE: f"of the {EACH_ALONE}",
    **{way: way for way in (ONE_WINDOW, WARMED_THROUGH, LINED_UP, SHARED_SPAN)},
    NO_SYNC: "by DDP, without communication",
    # How collectives of a few bytes were launched.
    "replayed": "in a CUDA graph",
    "eager": "launched one by one",
    # How a network adapter sends to itself: by perftest, or by NCCL between two GPUs.
    "ib_write_bw": "by ib_write_bw",
    "nccl": "by NCCL, one adapter at a time",
    "nccl at once": "by NCCL, several adapters at once",
}


def c_number(text: str) -> int:
    """The number that a text begins with, as NCCL reads its variables, strtoll(text, NULL, 0): hexadecimal behind 0x,
    octal behind 0. 0 if it begins with none."""
    if not (found := re.match(r"\s*([+-]?)(0x[0-9a-f]+|0[0-7]*|[1-9]\d*)", text, re.IGNORECASE)):
        return 0
    digits = found[2].lower()
    return int(found[1] + digits, 16 if digits.startswith("0x") else 8 if digits.startswith("0") else 10)


# Those of NCCL, as NCCL_ALGO names them, in lower case.
ALGORITHMS = ("tree", "ring", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat")
RESNETS = ("resnet50", "resnet101", "resnet152")
TRANSFORMERS = ("transformer-0.1b", "transformer-0.6b", "transformer-1.3b", "transformer-1.8b")
# Between two GPUs without NVLinks: the PCIe ancestor in common, or the memory of the host.
PCIE_WAYS = ("PIX", "PXB", "PHB", "NODE", "SYS", "host")
# An NVLink domain.
INSIDE, ACROSS = "inside", "across"
FAR = "triad across NUMA nodes"

# In the order in which a reader wants to hear them.
CONDITIONS: dict[str, ConditionType] = {
    "collective": ConditionType(COLLECTIVES, leads=True),
    "operation": ConditionType(("copy", "triad", "copy and triad", FAR), leads=True),
    "model": ConditionType((*RESNETS, *TRANSFORMERS)),
    "method": ConditionType(tuple(WAYS), words=WAYS),
    "recipe": ConditionType(("fp32", "tf32", "amp", "bf16", "peak"), leads=True),
    "precision": ConditionType(("fp64", "fp32", "tf32", "fp16", "bf16", "fp8"), leads=True),
    "direction": ConditionType(
        ("host to device", "device to host", "read", "write", "both", *BOTH_WAYS), words=BOTH_WAYS, leads=True
    ),
    "link": ConditionType(("NVLink", *PCIE_WAYS), "over {}", leads=True),
    "links": ConditionType(int, "{} NVLinks", {1: "1 NVLink"}, leads=True),
    "bytes": ConditionType(int),
    "dtype": ConditionType(DTYPES),
    "ranks": ConditionType(int, "{} ranks", {1: "1 rank"}),
    "nodes": ConditionType(int, "{} nodes", {1: "1 node"}),
    "in_place": ConditionType(bool, words={True: "in place", False: "out of place"}),
    "at_once": ConditionType(("one", "all"), words={"all": "all GPUs at once", "one": "one GPU at a time"}),
    # Whether half of the GPUs or more draw what they may.
    "at_power_limit": ConditionType(bool, words={True: "at the power limit", False: "below the power limit"}),
    "batch": ConditionType(int, "batch {}"),
    "accumulated": ConditionType(None, "{} batches a step", {1: "1 batch a step"}),  # whose gradients are added up
    "image": ConditionType(None, "{} pixels"),
    "sequence": ConditionType(None, "{} tokens"),
    "optimizer": ConditionType(("sgd", "adam", "adamw")),
    "nvls": ConditionType(bool, "NVLS {}", {True: "NVLS on", False: "NVLS off"}),
    "algorithm": ConditionType(ALGORITHMS, "algorithm {}"),  # that NCCL_ALGO asks for
    # Of what several nodes do: all of them in one NVLink domain, or not although some are in one.
    "domain": ConditionType((INSIDE, ACROSS), words={INSIDE: "over NVLink, inside a domain", ACROSS: "across domains"}),
    "network": ConditionType(int, "{} Gb/s of network a GPU"),
    "port_rate": ConditionType(int, "ports of {} Gb/s"),
    "queue_depth": ConditionType(int, "queue depth {}"),
    "nccl": ConditionType(int, "NCCL {}"),  # as NCCL writes its version: 22809 is 2.28.9
    "workload": ConditionType(("custom", "sweep", "transformer", "inference"), "workload {}"),
    "work": ConditionType(("burn-in", "matrix products", "training"), "work {}", {"burn-in": "work burn-in"}),
    "counter": ConditionType(None, leads=True),  # of a network port, as the kernel names it
    "fabric": ConditionType(("nvswitch", "nvlink", "pcie"), "fabric {}"),
    "part": ConditionType(str, "part number {}"),  # of the boards of all GPUs, where they have one in common
    "metric": ConditionType(None, "metric {}", leads=True),  # of which the samples spread
}

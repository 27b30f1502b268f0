"""The kinds of faults there are. A number is never used again, and lines are only added, each at the end of its block.

1xx what is in the machine and how it is set up, 2xx health, 3xx wrong data, 4xx performance, 5xx processes, 9xx what an
author of checks asserts. 1xx are in inventory_codes.py, 2xx in health_codes.py; of these what the kernel log says of
the host (236 to 249) is in kernel_codes.py, and what DCGM finds (285 to 289) in dcgm_codes.py.
"""

from __future__ import annotations

from pytest_gpufleet.model.dcgm_codes import OF_DCGM
from pytest_gpufleet.model.fault_code import Code
from pytest_gpufleet.model.health_codes import OF_HEALTH
from pytest_gpufleet.model.inventory_codes import OF_INVENTORY
from pytest_gpufleet.model.kernel_codes import OF_THE_KERNEL_LOG

# fmt: off
_OTHERS = (
    # ---------------------------------------------------------------- 3xx wrong data
    Code(301, "product_wrong", "data", "ISOLATE", "this GPU computes wrongly",
         "Replace the GPU; if all GPUs do it, look at the driver and the CUDA libraries first"),
    Code(302, "product_changes", "data", "ISOLATE", "this GPU corrupts results silently", "Replace the GPU"),
    Code(303, "memory_wrong", "data", "ISOLATE", "this GPU's memory does not hold what is written", "Replace the GPU"),
    Code(304, "collective_wrong", "data", "TRIAGE", "a collective delivered wrong data",
         "Look for NVLink and ECC errors of the GPUs that are named (`nvidia-smi nvlink -e`) and replace them"),
    Code(305, "copy_wrong", "data", "TRIAGE", "data arrived wrong over a link",
         "Look at the NVLink errors of the GPUs that are named and for XIDs; over PCIe at IOMMU and ACS settings"),
    Code(309, "computes_otherwise", "data", "TRIAGE", "this GPU computes other bits than the others of its model",
         "Run again: if it is the same GPU, replace it; if two differ and nobody can say which, run the suite on a "
         "machine with the same GPUs and libraries and hold both against each other: `gpufleet compare`"),
    Code(310, "machine_computes_otherwise", "data", "TRIAGE", "this machine computes other bits than its like",
         "Compare its CUDA libraries and environment with the others' (`pip list`, LD_PRELOAD, LD_LIBRARY_PATH) and "
         "install them anew; if its GPUs still compute otherwise, they, or what they share, are bad"),
    Code(306, "training_wrong", "data", "TRIAGE", "a network is not trained right",
         "Replace the GPU if one is named; if all are, look at driver, CUDA libraries and torch first"),
    Code(307, "replicas_differ", "data", "TRIAGE", "after training this GPU has other weights than the others",
         "Look at its memory, ECC and NVLink errors, and run the exact collectives again; replace it if it stays"),
    # ---------------------------------------------------------------- 4xx performance
    Code(401, "limit_missed", "performance", "TRIAGE", "a figure missed its limit", "Do what the check's text says"),
    Code(402, "slower_than_peers", "performance", "TRIAGE", "this place is slower than its peers",
         "Do what the check's text says"),
    Code(403, "rank_comes_late", "performance", "CONFIG", "the process of this GPU makes all others wait",
         "Look for what else runs on the processors that it may use"),
    Code(404, "links_slow", "performance", "TRIAGE", "every link of this GPU is slow",
         "Look at its NVLinks (`nvidia-smi nvlink -s`); reseat or replace it"),
    Code(405, "link_slow", "performance", "TRIAGE", "the link between two GPUs is slow",
         "Look at the NVLinks of both (`nvidia-smi nvlink -s`)"),
    Code(406, "slows_collectives", "performance", "TRIAGE", "only without this GPU collectives are fast",
         "Look at its links, clocks and temperature, and at what else runs on it"),
    Code(407, "cause_unclear", "performance", "TRIAGE", "nothing points to a single GPU or link",
         "Look at what all GPUs share: switches, host, software, settings"),
    Code(408, "node_slow", "performance", "TRIAGE", "this node is slow with every other one",
         "Look at its network adapters, cables and switch ports (`ibstat`, `mlxlink`), and at NCCL's settings there"),
    Code(409, "rail_slow", "performance", "TRIAGE", "one rail of this node is slow",
         "Look at the network adapter that is named, its cable and its switch port (`ibstat`, `mlxlink`)"),
    Code(410, "node_link_slow", "performance", "TRIAGE", "the network between two nodes is slow",
         "Both are fast with others: look at the switches and cables between these two"),
    Code(411, "network_between_nodes_slow", "performance", "TRIAGE", "nothing points to a single node or its network",
         "Look at what all nodes share: switches, routing, congestion control, NCCL's settings"),
    Code(412, "network_adapter_slow", "performance", "TRIAGE", "a network adapter is slow in loopback",
         "Look at its PCIe link, at IOMMU and ACS, and whether GPUDirect RDMA works; then reseat or exchange it"),
    Code(413, "network_adapter_fails", "network", "TRIAGE", "nothing can be sent through a network adapter",
         "Look at the state of its port (`ibstat`), at /dev/infiniband and at the limit of locked memory"),
    Code(415, "above_peak", "performance", "TRIAGE", "a figure is above what this GPU can do",
         "The GPU is not what it says it is, or its clock is wrong: compare model, clocks and SMs with the data sheet"),
    # ---------------------------------------------------------------- 5xx processes
    Code(501, "rank_died", "process", "TRIAGE", "the process of this GPU died",
         "Look at the kernel log for XIDs and for the out-of-memory killer"),
    Code(502, "rank_hung", "process", "TRIAGE", "the process of this GPU did not answer",
         "Look at the kernel log for XIDs of this GPU, and at what its process waited for"),
    Code(503, "rank_raised", "process", "TRIAGE", "the rank of this GPU raised an error",
         "Read its error; look at the kernel log for XIDs of this GPU"),
    # ---------------------------------------------------------------- 9xx an author's own assertions
    Code(901, "check_failed", "check", "TRIAGE", "a check failed", "Do what the check's text says"),
)
# fmt: on

CODES: dict[str, Code] = {
    code.name: code
    for code in sorted(
        (*OF_INVENTORY, *OF_HEALTH, *OF_THE_KERNEL_LOG, *OF_DCGM, *_OTHERS), key=lambda code: code.number
    )
}

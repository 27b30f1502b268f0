"""The kinds of faults that the kernel log tells of the host (host_log_catalogue.py has its lines). As in codes.py, a
number is never used again, and lines are only added."""

from __future__ import annotations

from pytest_gpufleet.model.fault_code import Code

# fmt: off
OF_THE_KERNEL_LOG = (
    Code(236, "machine_check", "host error", "TRIAGE", "a processor reports an error that it could not correct",
         "Read the BMC's event log for the part: a processor, a DIMM or a PCIe device", ("process", "stall")),
    Code(237, "machine_check_corrected", "host error", "MONITOR", "a processor reports errors that were corrected",
         "Nothing, unless they become many; then look at the part that the BMC's event log names"),
    Code(238, "dimm_uncorrected", "host error", "ISOLATE", "memory of the host has errors that nobody can correct",
         "Replace the DIMM that is named (`dmidecode -t memory` has its slot)", ("process", "stall")),
    Code(239, "dimm_corrected", "host error", "MONITOR", "memory of the host has errors that were corrected",
         "Nothing, unless they become many; then replace the DIMM that is named"),
    Code(240, "pcie_error_logged", "host error", "TRIAGE", "a PCIe device or port has an error that was not corrected",
         "Reseat what is below it, its riser or cable; if it comes back, that device or the slot is bad",
         ("link", "link error", "stall")),
    Code(241, "pcie_corrected_logged", "host error", "MONITOR", "a PCIe device or port had errors that were corrected",
         "Nothing, unless they become many; then reseat the device, its riser or cable"),
    Code(242, "host_stalled", "stall", "TRIAGE", "processors or programs of the host stood still",
         "Read the kernel log around that line: what they waited for, and whether an XID or a disk error came before"),
    Code(243, "disk_failing", "disk", "TRIAGE", "a disk does not answer, or cannot be read or written",
         "Look at it with `smartctl -a` or `nvme smart-log`; reseat or replace it", ("file system", "stall")),
    Code(244, "file_system_failed", "file system", "TRIAGE", "a file system has errors or became read-only",
         "Look for errors of its disk first; then unmount and check it"),
    Code(245, "host_out_of_memory", "host memory", "CONFIG", "the host, or the container of the run, ran out of memory",
         "End what else uses the host's memory, or raise the container's limit, and run again", ("process",)),
    Code(246, "nic_underpowered", "network", "TRIAGE", "a network adapter or its transceiver gets too little power",
         "Look at the slot's power in the BIOS, at the riser, and whether the transceiver fits the adapter"),
    Code(247, "nic_too_hot", "network", "TRIAGE", "a network adapter or its transceiver is too hot",
         "Look at its cooling: fans, blocked air, the slot next to it"),
    Code(248, "nic_firmware_failed", "network", "TRIAGE", "the firmware of a network adapter has failed",
         "Look for heat and PCIe errors before it; reset the adapter (`mlxfwreset`), or replace it"),
    Code(249, "processor_throttled", "host cooling", "TRIAGE", "heat slowed processors of the host down",
         "Look at their cooling: fans, heat sinks, blocked air", ("performance",)),
)
# fmt: on

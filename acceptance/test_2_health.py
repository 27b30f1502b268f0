"""What the GPUs and the kernel remember of errors before this run. While it runs, every test is watched as well."""

import pytest

from pytest_gpufleet import Faults
from pytest_gpufleet.hardware.kernel_log import KernelLog
from pytest_gpufleet.hardware.nvml import pci_addresses
from pytest_gpufleet.model.facts import COUNTERS
from pytest_gpufleet.verdict.blind import require_told
from pytest_gpufleet.verdict.health_rules import recorded_errors, sxids, xids_of, xids_of_none


def test_no_memory_error_is_recorded(gpus):
    """No GPU has uncorrectable memory errors, and no repair of its memory is pending or has failed

    An uncorrectable error kills the program that meets it. Pending repairs are done by a reset of the GPU; a repair
    that failed, or hundreds of remapped rows, call for its replacement. A counter that the GPU has and that cannot be
    read proves nothing: see the kernel log, whether this user may use `nvidia-smi -q`, and whether nvidia-ml-py is as
    old as the driver.
    """
    errors = [error for gpu in gpus for error in recorded_errors(gpu)]
    if errors:
        raise Faults(errors)
    require_told(gpus, *COUNTERS)


def test_no_grave_xid_in_the_kernel_log(gpus):
    """The kernel log holds no XID that condemns a GPU, and no fatal SXid of an NVSwitch

    The driver reports GPU errors there as XIDs. Those that speak against the hardware fail this test with the action
    that NVIDIA calls for; others may come from programs that went wrong. An XID of a GPU that NVML no longer lists
    counts too: that GPU has failed since. GPUs that are only hidden from this run are left out. Errors of NVSwitches
    are SXids. All GPUs share the NVSwitches, so every one that calls itself fatal fails this test.
    """
    logged = KernelLog().new()
    if logged.trouble:
        pytest.skip(f"not judged: {logged.trouble}")
    condemning = [xid for xid in logged.xids if xid.condemning]
    here = [*pci_addresses(), *(str(gpu["pci_bus_id"]) for gpu in gpus)]
    grave = xids_of(gpus, condemning) + xids_of_none(here, condemning) + sxids(condemning)
    if grave:
        raise Faults(grave)

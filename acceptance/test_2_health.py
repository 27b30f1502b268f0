"""What the GPUs and the kernel remember of errors before this run. While it runs, every test is watched as well."""

import pytest

from pytest_gpufleet.hardware.xids import KernelLog
from pytest_gpufleet.verdict.health import recorded_errors, xids_of


def test_no_memory_error_is_recorded(gpus):
    """No GPU has uncorrectable memory errors, and no repair of its memory is pending or has failed

    An uncorrectable error kills the program that meets it. Pending repairs are done by a reset of the GPU; a repair
    that failed, or hundreds of remapped rows, call for its replacement.
    """
    errors = [error for gpu in gpus for error in recorded_errors(gpu)]
    assert not errors, "\n".join(errors)


def test_no_grave_xid_in_the_kernel_log(gpus):
    """The kernel log holds no XID that condemns a GPU

    The driver reports GPU errors there as XIDs. Those that speak against the hardware fail this test with the action
    that NVIDIA calls for; others may come from programs that went wrong.
    """
    log = KernelLog()
    xids = log.new()
    if log.trouble:
        pytest.skip(f"not judged: {log.trouble}")
    grave = xids_of(gpus, [xid for xid in xids if xid.condemning])
    assert not grave, "\n".join(grave)

"""The kinds of faults that DCGM's diagnostic finds, a line for each severity that it has. As in codes.py, a number is
never used again, and lines are only added."""

from __future__ import annotations

from pytest_gpufleet.model.fault_code import Code

# fmt: off
OF_DCGM = (
    Code(285, "dcgm_part_broken", "diagnostic", "ISOLATE", "DCGM's diagnostic found an error that calls for isolation",
         "Replace the GPU; the JSON of the diagnostic (`dcgmi diag --json`) goes with it"),
    Code(286, "dcgm_reset_needed", "diagnostic", "RESET", "DCGM's diagnostic found an error that calls for a reset",
         "Drain and reset the GPU, then run again; replace it if it comes back"),
    Code(287, "dcgm_setting", "diagnostic", "CONFIG", "DCGM's diagnostic found a setting or software that is wrong",
         "Do what its text says, then run again"),
    Code(288, "dcgm_test_failed", "diagnostic", "TRIAGE", "a test of DCGM's diagnostic failed",
         "Read its text and /var/log/nvidia-dcgm/nvvs.log; run `dcgmi diag -r 3` on this GPU alone"),
    Code(289, "dcgm_remark", "diagnostic", "MONITOR", "DCGM's diagnostic warned of something, or left it out",
         "Nothing, unless it comes back together with faults of the same GPU"),
)
# fmt: on

"""NVIDIA's own diagnostic as part of a run, on GPUs that the run has left to it."""

from __future__ import annotations

from dataclasses import replace

from pytest_gpufleet.hardware import dcgm
from pytest_gpufleet.hardware.tools import NoAnswer, Untold
from pytest_gpufleet.model.endings import not_applicable, not_judged
from pytest_gpufleet.redaction import throughout
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.verdict.host_rules.dcgm_rules import Diagnosis, diagnosed


def diagnose(run: Run, check: str) -> Diagnosis:
    """What it finds. What it printed is on record from then on, and so is what is only shown. It takes all GPUs of the
    machine, so in a run on some of them it is not applicable: somebody else may work on the others."""
    gpus, present = run.ground.topology.gpus, run.ground.gpus_present
    if present > len(gpus):
        not_applicable(f"DCGM's diagnostic takes all {present} GPUs of the machine, and this run has {len(gpus)}")
    if (pool := run.ranks.in_use) is not None:
        pool.stop()  # a process that holds memory of a GPU is in its way; the next check gets new ranks
    try:
        told = throughout(dcgm.read(run.options.dcgm))
    except NoAnswer as why:
        not_judged(f"{why}: it hangs, or a GPU does")
    except Untold as why:
        not_applicable(str(why))
    run.record_event("host_fact", fact="dcgm", value=told)
    found = diagnosed(told, gpus)
    run.notice(replace(fault, check=check) for fault in found.shown)
    return found

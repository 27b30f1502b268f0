"""Load that lasts in a run: its ranks under load, its health and its progress in one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpufleet.hardware import dcgm
from pytest_gpufleet.hardware.tools import NoAnswer, Untold
from pytest_gpufleet.model.endings import not_applicable, not_judged
from pytest_gpufleet.model.fault import Faults
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.plugin.keys import RUN
from pytest_gpufleet.plugin.terminal import SCREEN
from pytest_gpufleet.probes import burn_in, power_steps
from pytest_gpufleet.redaction import throughout
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.verdict.host_rules.dcgm_rules import Diagnosis, diagnosed
from pytest_gpufleet.world.world import World


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


def sustained_load(item: pytest.Item, world: World) -> list[Measurement]:
    """Keep `world` under full load for the time that was asked for. Raises at the first fault."""
    seconds = item.config.stash[RUN].burn_in_seconds
    return burn_in.burn_in(world, seconds, _after_turn(item, seconds))


def stepped_load(item: pytest.Item, world: World) -> list[Measurement]:
    """Take `world` through the power steps. Raises at the first fault."""
    return power_steps.power_steps(world, _after_turn(item, power_steps.duration(world)))


def _after_turn(item: pytest.Item, seconds: float) -> burn_in.AfterTurn:
    """What is done between turns of a load that takes so many seconds: tell how far it is, and raise at a fault."""
    run, check = item.config.stash[RUN], item.nodeid
    sampling, tell = run.sampling, item.config.stash[SCREEN].progress(seconds)

    def after_turn(doing: str, done: float, resident: list[int]) -> None:
        run.record_event("progress", check=check, done=round(done), of=seconds, doing=doing, resident=resident)
        tell(done, sampling.latest if sampling else None)
        if faults := run.check_health(check):
            raise Faults(faults)

    return after_turn

"""Load that lasts in a run: its ranks under load, its health and its progress in one."""

from __future__ import annotations

import pytest

from pytest_gpufleet.model.fault import Faults
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.plugin.keys import RUN
from pytest_gpufleet.plugin.screen import SCREEN
from pytest_gpufleet.probes import burn_in, power_steps
from pytest_gpufleet.world.world import World


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

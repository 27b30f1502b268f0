"""The burn-in of a run: its ranks under load, its health and its progress in one."""

from __future__ import annotations

import pytest

from pytest_gpufleet.model.fault import Faults
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.plugin.keys import RUN, SCREEN
from pytest_gpufleet.probes import burn_in
from pytest_gpufleet.world.world import World


def sustained_load(item: pytest.Item, world: World) -> list[Measurement]:
    """Keep `world` under full load for the time that was asked for. Raises at the first fault."""
    run, check = item.config.stash[RUN], item.nodeid
    seconds, sampling = run.burn_in_seconds, run.sampling
    tell = item.config.stash[SCREEN].progress(seconds)

    def after_turn(doing: str, done: float, resident: list[int]) -> None:
        run.record_event("progress", check=check, done=round(done), of=seconds, doing=doing, resident=resident)
        tell(done, sampling.latest if sampling else None)
        if faults := run.check_health(check):
            raise Faults(faults)

    return burn_in.burn_in(world, seconds, after_turn)

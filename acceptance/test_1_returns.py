"""Whether a machine that comes back from repair is the one it was, but for what was replaced."""

from __future__ import annotations

import pytest

from pytest_gpufleet import Fault, expect_none, not_applicable
from pytest_gpufleet.model.endings import NO_RETURN, not_judged
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict.across_runs.back_in_service import KINDS, measured_otherwise, not_as_before

pytestmark = pytest.mark.chapter("Back in service", "Is the machine as it was, but for what was replaced?")


@pytest.mark.proves_sound
@pytest.mark.parametrize("kind", KINDS)
def test_only_what_was_replaced_is_new(fleet_returns: Record | None, kind: str) -> None:
    """Parts, firmware and links are as before the repair (--fleet-returns)

    Parts in --fleet-replaced must have another serial number, all others the same one, at the same place, with the same
    firmware. A part with its old serial number was not replaced. A new part that is not named was swapped: ask who
    worked on the machine, or name it. Missing parts or links: reseat what was opened. A part that can no longer be read
    leaves the verdict INCOMPLETE: run as root if the run before did.
    """
    if fleet_returns is None:
        not_applicable(NO_RETURN)
    if (found := not_as_before(fleet_returns, kind)) is None:
        not_applicable("the run before could not read them")
    expect_none(each for each in found if isinstance(each, Fault))
    if found:
        not_judged("\n".join(map(str, found)))


@pytest.mark.at_the_end
@pytest.mark.needs(gpus=True)
def test_measures_as_before(fleet_returns: Record | None) -> None:
    """Measurements and fingerprints are as before the repair (--fleet-returns)

    Each GPU, pair and group of GPUs that stayed is compared with itself in the run before, by the rules of `gpufleet
    compare --same-machine`, and all must compute the same bits. If one got slower, look first at coolers, cables and
    risers touched in the repair.
    """
    if fleet_returns is None:
        not_applicable(NO_RETURN)
    faults, compared = measured_otherwise(fleet_returns)
    expect_none(faults)
    if not compared:
        not_applicable("the run before has no measurement of what is in this machine")

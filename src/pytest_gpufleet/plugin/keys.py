"""What this plugin keeps in the stashes of pytest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpufleet.run.run import Run

if TYPE_CHECKING:
    from pytest_gpufleet.model.events import Check
    from pytest_gpufleet.model.fault import Fault
    from pytest_gpufleet.model.finding import Finding
    from pytest_gpufleet.run.interruption import Supervised

# Of the configuration.
RUN = pytest.StashKey[Run]()
SUPERVISED: pytest.StashKey[Supervised] = pytest.StashKey()
HOST_IS_KEPT = pytest.StashKey[bool]()  # somebody else has the host and does not let it go

# Of a test: what judge() found; of that, what missed and no phase of the test has failed for yet, with the causes that
# were found; and the LimitMissed of a test that did all that it had to do.
MISSED: pytest.StashKey[tuple[list[Finding], list[Fault]]] = pytest.StashKey()
ONLY_LIMITS = pytest.StashKey[BaseException]()
ON_RANKS = pytest.StashKey[bool]()  # whether its body was called there
# Setup, call and teardown: pytest's report of each and what was raised in it. And what they were, once it has ended.
Phases = list[tuple[pytest.TestReport, BaseException | None]]
PHASES = pytest.StashKey[Phases]()
CHECK: pytest.StashKey[Check] = pytest.StashKey()

"""What tests are given: the fixtures of pytest-gpufleet.

Loaded in every pytest run of an environment, so nothing heavy is imported before it is used.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpufleet.session import Fleet

if TYPE_CHECKING:
    from typing import Protocol

    from pytest_gpufleet.hardware.machine import Machine
    from pytest_gpufleet.hardware.topology import GpuTopology
    from pytest_gpufleet.verdict.finding import Finding
    from pytest_gpufleet.verdict.measurement import Measurement
    from pytest_gpufleet.verdict.profile import Profile
    from pytest_gpufleet.world.world import World

    class Judge(Protocol):
        def __call__(
            self,
            *measurements: Measurement,
            shown: Iterable[Measurement] = (),
            required: bool = True,
            on_miss: Callable[[], str] | None = None,
        ) -> None: ...


FLEET = pytest.StashKey[Fleet]()
FINDINGS = pytest.StashKey[list["Finding"]]()


@pytest.fixture(scope="session")
def gpu_topology(pytestconfig: pytest.Config) -> GpuTopology:
    """The GPUs of this run, their links and the software above them (a GpuTopology); no GPUs in a rehearsal."""
    return pytestconfig.stash[FLEET].ground.topology


@pytest.fixture(scope="session")
def machine(pytestconfig: pytest.Config) -> Machine:
    """Every fact of the run's GPUs and of their host (a Machine); `expect` checks facts. No GPUs in a rehearsal."""
    return pytestconfig.stash[FLEET].machine


@pytest.fixture(scope="session")
def machine_now(pytestconfig: pytest.Config) -> Callable[[str], list[Any]]:
    """machine_now(fact): a fact of every GPU as it is at this moment, in the order of machine.gpus."""
    return pytestconfig.stash[FLEET].read_now


@pytest.fixture(scope="session")
def gpu_profile(pytestconfig: pytest.Config) -> Profile | None:
    """The profile with facts and limits for the run's GPU model; None if there is none."""
    return pytestconfig.stash[FLEET].profile


@pytest.fixture(scope="session")
def fleet_level(pytestconfig: pytest.Config) -> str:
    """The level of this run: quick, standard or burnin."""
    return pytestconfig.stash[FLEET].options.level


@pytest.fixture(scope="session")
def world(pytestconfig: pytest.Config) -> World:
    """One warm process a GPU: `world.run(function)` runs function(rank) on each and gives the results by rank."""
    return pytestconfig.stash[FLEET].world(with_group=False)


@pytest.fixture(scope="session")
def nccl_group(pytestconfig: pytest.Config) -> World:
    """As `world`, with a process group ready on every rank: NCCL on GPUs, Gloo in a rehearsal.

    In a test marked spmd it is the torch.distributed.ProcessGroup itself.
    """
    return pytestconfig.stash[FLEET].world(with_group=True)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> object:
    """The rank (a Rank) that runs the body; only in tests marked spmd."""
    if request.node.get_closest_marker("spmd") is None:
        pytest.fail("the fixture rank exists only in tests marked @pytest.mark.spmd", pytrace=False)
    from pytest_gpufleet.spmd import OnRank

    return OnRank()


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Judge:
    """judge(measurement, ...) holds each against its limit and its peers, records all, and raises LimitMissed if one
    missed. With required=False a figure without a limit is only shown and leaves the verdict alone; so are those of
    `shown`. on_miss() looks for the cause when one missed; what it says comes first in the failure."""
    from pytest_gpufleet.verdict.judge import LimitMissed
    from pytest_gpufleet.verdict.measurement import Measurement

    fleet, item = request.config.stash[FLEET], request.node

    def judge(
        *measurements: Measurement,
        shown: Iterable[Measurement] = (),
        required: bool = True,
        on_miss: Callable[[], str] | None = None,
    ) -> None:
        __tracebackhide__ = True
        shown = tuple(shown)
        for each in (*measurements, *shown):
            if not isinstance(each, Measurement):
                raise TypeError(f"judge() takes Measurements, not {reprlib.repr(each)}")
        findings = fleet.judged(item.nodeid, measurements, required) + fleet.judged(item.nodeid, shown, False)
        item.stash.setdefault(FINDINGS, []).extend(findings)
        for finding in findings:
            item.user_properties += finding.properties()
            fleet.record_event("finding", finding=finding.to_json())
            request.config.hook.pytest_gpufleet_finding(finding=finding, config=request.config)
        if missed := [finding for finding in findings if finding.state == "missed"]:
            raise LimitMissed(missed, fleet.ground.topology, on_miss() if on_miss else "")

    return judge


@pytest.fixture
def burn_in(request: pytest.FixtureRequest) -> Callable[[World], list[Measurement]]:
    """burn_in(world) keeps all ranks under full load for as long as --fleet-burn-in says, and gives its measurements.

    It ends with an error as soon as a result is wrong in one bit or the health of a GPU gets worse.
    """
    fleet, check = request.config.stash[FLEET], request.node.nodeid
    return lambda world: fleet.burn_in(check, world)

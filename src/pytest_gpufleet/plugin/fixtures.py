"""What tests are given: the fixtures of pytest-gpufleet, and the ranks behind them.

Loaded in every pytest run of an environment, so nothing heavy is imported before it is used.
"""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpufleet.run.run import Fleet

if TYPE_CHECKING:
    from typing import Protocol

    from pytest_gpufleet.model.finding import Finding
    from pytest_gpufleet.model.gpu import GpuTopology
    from pytest_gpufleet.model.machine import Machine
    from pytest_gpufleet.model.measurement import Measurement
    from pytest_gpufleet.verdict.judgement import LimitMissed
    from pytest_gpufleet.verdict.profiles.profile import Profile
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
# What judge() found to miss its limit and no phase of the test has failed for yet, and the causes that were found.
MISSED = pytest.StashKey[tuple[list["Finding"], list[str]]]()
# The LimitMissed of a test that did all that it had to do.
ONLY_LIMITS = pytest.StashKey["LimitMissed"]()

# What ended a test's body, whatever others make of it; None if nothing did.
ENDED = pytest.StashKey["BaseException | None"]()

# The fixtures behind which there are ranks.
OF_RANKS = ("world", "nccl_group", "rank")


def ours(item: pytest.Item, name: str) -> bool:
    """Whether a test gets the fixture of this name from here, and not one of the same name that is somebody else's."""
    if name not in getattr(item, "fixturenames", ()):
        return False
    for definition in reversed(item._fixtureinfo.name2fixturedefs.get(name, ())):  # type: ignore[attr-defined]
        if definition.func.__module__ == __name__:
            return True
        if name not in definition.argnames:  # else it is made of the one that it hides
            return False
    return False


def is_spmd(item: pytest.Item) -> bool:
    """Whether the body of a test is for the ranks. With none of our options and fixtures the marker is not ours."""
    asked = item.config.stash[FLEET].options.asked
    return item.get_closest_marker("spmd") is not None and (asked or any(ours(item, name) for name in OF_RANKS))


def uses_ranks(item: pytest.Item) -> bool:
    return is_spmd(item) or any(ours(item, name) for name in OF_RANKS)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before a test has its fixtures: what it defines can go to the ranks, and they are as many as it asks for."""
    fleet = item.config.stash[FLEET]
    if fleet.options.listing or not uses_ranks(item):
        return
    from pytest_gpufleet.plugin import spmd
    from pytest_gpufleet.world import shipping

    if is_spmd(item):
        spmd.refuse(item)
    if isinstance(item, pytest.Function):
        shipping.ship_by_value(item.module)
    fleet.pool.limit = spmd.world_size(item, len(fleet.pool.specs))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """A fixture of several tests is made with all ranks, whichever of the tests comes first."""
    pool = request.config.stash[FLEET].pool_in_use
    if pool is None or pool.limit is None or fixturedef.scope == "function":
        return (yield)
    limit, pool.limit = pool.limit, None
    try:
        return (yield)
    finally:
        pool.limit = limit


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
    from pytest_gpufleet.plugin.spmd import OnRank

    return OnRank()


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Generator[Judge]:
    """judge(measurement, ...) holds each against its limit and its peers and records all. It returns; the test fails
    with LimitMissed when its body has ended, if anything missed. With required=False a figure without a limit is only
    shown and leaves the verdict alone; so are those of `shown`. on_miss() looks for the cause when one missed; what it
    says comes first in the failure."""
    from pytest_gpufleet.model.measurement import Measurement

    config, item = request.config, request.node
    fleet = config.stash[FLEET]

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
        if not measurements:
            raise ValueError("judge() was given no measurement: nothing was judged")
        findings = fleet.judged(item.nodeid, measurements, required) + fleet.judged(item.nodeid, shown, False)
        item.stash.setdefault(FINDINGS, []).extend(findings)
        for finding in findings:
            item.user_properties += finding.properties()
            fleet.record_event("finding", finding=finding.to_json())
            _tell(config, finding)
        if now := [finding for finding in findings if finding.state == "missed"]:
            missed, causes = item.stash.setdefault(MISSED, ([], []))
            missed += now
            causes += [on_miss()] if on_miss else []

    yield judge
    # Missed where no body could fail for it: while fixtures are torn down.
    if (error := limit_missed(item)) is not None:
        raise error


def limit_missed(item: pytest.Item) -> LimitMissed | None:
    """The failure that judge() owes a test, once; None if nothing missed."""
    missed, causes = item.stash.get(MISSED, ([], []))
    item.stash[MISSED] = ([], [])
    if not missed:
        return None
    from pytest_gpufleet.verdict.judgement import LimitMissed

    return LimitMissed(missed, item.config.stash[FLEET].ground.topology, "\n".join(filter(None, causes)))


def _tell(config: pytest.Config, finding: Finding) -> None:
    """Call the hooks of others. What goes wrong in them is theirs, and says nothing about the machine."""
    try:
        config.hook.pytest_gpufleet_finding(finding=finding, config=config)
    except (KeyboardInterrupt, pytest.exit.Exception):
        raise
    except BaseException as error:  # pytest.skip and pytest.fail too
        with warnings.catch_warnings():
            warnings.simplefilter("always")  # with -W error it would fail the check after all
            what = f"pytest_gpufleet_finding of a conftest or plugin raised {type(error).__name__}: {error}"
            warnings.warn(
                f"{what}; it may have missed {finding.measurement.metric}", pytest.PytestWarning, stacklevel=3
            )


@pytest.fixture
def burn_in(request: pytest.FixtureRequest) -> Callable[[World], list[Measurement]]:
    """burn_in(world) keeps all ranks under full load for as long as --fleet-burn-in says, and gives its measurements.

    It ends with an error as soon as a result is wrong in one bit or the health of a GPU gets worse.
    """
    fleet, check = request.config.stash[FLEET], request.node.nodeid
    return lambda world: fleet.burn_in(check, world)

"""The fixtures of pytest-gpufleet. Loaded in every pytest run, so what is heavy is imported when it is used."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest

from pytest_gpufleet import lazy
from pytest_gpufleet.model.endings import Refused, not_applicable
from pytest_gpufleet.plugin import compat
from pytest_gpufleet.plugin.compat import RUN
from pytest_gpufleet.plugin.markers import is_spmd, uses_ranks
from pytest_gpufleet.plugin.terminal import SCREEN

if TYPE_CHECKING:
    from pytest_gpufleet.machine import dcgm, host
    from pytest_gpufleet.machine.nccl_log import NcclLog
    from pytest_gpufleet.model import events, fault
    from pytest_gpufleet.model.fault import Fault
    from pytest_gpufleet.model.metric import Measurement
    from pytest_gpufleet.model.place import GpuTopology
    from pytest_gpufleet.nodes import network
    from pytest_gpufleet.plugin import assertions, on_nodes, spmd
    from pytest_gpufleet.probes import endurance
    from pytest_gpufleet.run.run import Run
    from pytest_gpufleet.world import call
    from pytest_gpufleet.world.world import Rank, World
else:
    dcgm, host = lazy("machine", "dcgm", "host")
    events, fault = lazy("model", "events", "fault")
    (network,) = lazy("nodes", "network")
    assertions, on_nodes, spmd = lazy("plugin", "assertions", "on_nodes", "spmd")
    (endurance,) = lazy("probes", "endurance")
    (call,) = lazy("world", "call")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before a test has its fixtures: what it defines can go to the ranks."""
    run = item.config.stash[RUN]
    if run.options.listing or not uses_ranks(item):
        return
    compat.teach_endings()
    if is_spmd(item):
        spmd.refuse(item)
    if isinstance(item, pytest.Function):
        call.ship_by_value(item.module)
    try:
        _ = run.ranks.pool
    except Refused as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def gpu_topology(machine: assertions.LiveMachine, pytestconfig: pytest.Config) -> GpuTopology:
    """The GPUs of this run, their links and the software above them (a GpuTopology); no GPUs in a rehearsal."""
    _ = machine.gpus  # of which a check between nodes has none
    return pytestconfig.stash[RUN].own_machine.topology


def _of_run(read: Callable[[Any], object], text: str) -> Any:
    """The fixture of what a run has, with its text for `pytest --fixtures`."""

    def fixture(pytestconfig: pytest.Config) -> object:
        return read(pytestconfig.stash[RUN])

    fixture.__doc__ = text
    return pytest.fixture(scope="session")(fixture)


machine = _of_run(
    lambda run: assertions.LiveMachine(run),
    "Every fact of the run's GPUs (none in a rehearsal) and of their host when it began (a LiveMachine); `expect` "
    "checks facts. machine.now(fact) reads one again; machine.nodes are those of a check between nodes.",
)
gpu_profile = _of_run(lambda run: run.profile, "Facts and limits of the run's GPU model (a Profile); None if unknown.")
fleet_order = _of_run(lambda run: run.order, "What was bought, as --fleet-order says (an Order); None if nobody said.")
fleet_returns = _of_run(
    lambda run: run.evidence.record if run.evidence and run.evidence.record.before else None,
    "The record of this run, with the one `before` that --fleet-returns gave (a Record); None without that.",
)
fleet_level = _of_run(lambda run: run.options.level, "The level of this run: quick, standard or burnin.")
fleet_network = _of_run(lambda run: run.options.network, "Gbit/s a GPU between nodes by --fleet-network, or none.")
fleet_used = _of_run(lambda run: run.options.used, "Whether --fleet-used says that the hardware is not new.")
disk_folder = _of_run(lambda run: run.options.disk_folder, "Where to test a drive (--fleet-disk-folder), or None.")
world = _of_run(
    lambda run: run.ranks.world(with_group=False),
    "One warm process a GPU: `world.run(function)` runs function(rank) on each and gives the results by rank.",
)
nccl_group = _of_run(
    lambda run: run.ranks.world(with_group=True),
    "As `world`, with a process group (NCCL; Gloo in a rehearsal); in a test marked spmd the ProcessGroup itself.",
)
cut_off = _of_run(
    lambda run: lambda rdma=(): on_nodes.who_cannot_write(run, rdma) if rdma else on_nodes.who_is_cut_off(run),
    "cut_off(): which nodes of a run on several cannot reach each other by TCP; cut_off(rdma=ports): by RDMA, on each "
    "of these ports. The run goes on without them.",
)
rdma_write = _of_run(
    lambda run: partial(network.written, run.cluster),
    "rdma_write(test, ways, ports): what nodes of a run on several write to each other (network.written).",
)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Rank:
    """The rank (a Rank) that runs the body; only in tests marked spmd."""
    if request.node.get_closest_marker("spmd") is None:
        pytest.fail("the fixture rank exists only in tests marked @pytest.mark.spmd", pytrace=False)
    return cast("Rank", spmd.OnRank())  # each rank puts its own in the place of this


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Generator[assertions.Judge]:
    """judge(measurement, ...) holds each against its limit and its peers and records all. Of judge(function), what it
    measures, and once more if that missed. It returns; the test fails with LimitMissed when its body has ended, if
    anything missed. With required=False a figure without a limit is only shown and leaves the verdict alone; so are
    those of `shown`. on_miss() looks for the cause when one missed; what it says comes first in the failure."""
    yield assertions.Judge(request.node)
    # Missed where no body could fail for it: while fixtures are torn down.
    if (error := assertions.limit_missed(request.node)) is not None:
        raise error


@pytest.fixture
def record_fingerprints(request: pytest.FixtureRequest) -> Callable[[Sequence[events.Fingerprint]], None]:
    """record_fingerprints(found): what GPUs computed in this check, for comparisons with other machines."""
    run, check = request.config.stash[RUN], request.node.nodeid
    return lambda found: run.record(events.FingerprintsTaken(check=check, fingerprints=tuple(found)))


@pytest.fixture
def record_transport(request: pytest.FixtureRequest) -> Callable[[NcclLog, int], None]:
    """record_transport(log, ranks): what NCCL did between these ranks; later measurements have its condition nvls."""
    run, check = request.config.stash[RUN], request.node.nodeid
    return lambda log, ranks: run.record(events.TransportRead(check=check, ranks=ranks, nvls=log.nvls, log=log))


@pytest.fixture
def notice(request: pytest.FixtureRequest) -> Callable[[Iterable[Fault]], None]:
    """notice(faults): what this check has seen, is shown beside the verdict, and speaks against nothing."""
    run: Run = request.config.stash[RUN]
    return lambda shown: run.notice(fault.changed(check=request.node.nodeid) for fault in shown)


@pytest.fixture
def burn_in(request: pytest.FixtureRequest) -> Callable[[World], list[Measurement]]:
    """burn_in(world) keeps all ranks under full load for as long as --fleet-burn-in and --fleet-corruption-bound say.
    It gives its measurements. A wrong bit, or health of a GPU that gets worse, ends it with an error."""
    run = request.config.stash[RUN]
    seconds, bound = run.burn_in_seconds, run.options.bound or 0.0
    return lambda world: endurance.burn_in(world, seconds, _after_turn(request.node, seconds), bound)


@pytest.fixture
def power_steps(request: pytest.FixtureRequest) -> Callable[[World], list[Measurement]]:
    """power_steps(world) takes all ranks from idle to full load and back together, at 0.1 to 10 Hz, and gives its
    measurements. It ends as burn_in does."""
    return lambda world: endurance.power_steps(world, _after_turn(request.node, endurance.steps_seconds(world)))


def _after_turn(item: pytest.Item, seconds: float) -> endurance.AfterTurn:
    """What is done between turns of a load that takes so many seconds: show how far it is, and raise at a fault."""
    run, check = item.config.stash[RUN], item.nodeid
    show = item.config.stash[SCREEN].progress(seconds)

    def after_turn(doing: str, done: float) -> None:
        run.record(events.Progress(check=check, done=round(done), of=seconds, doing=doing))
        show(done, run.latest)
        if faults := run.check_health(check):
            raise fault.Faults(faults)

    return after_turn


@pytest.fixture
def dcgm_diagnosis(machine: assertions.LiveMachine, request: pytest.FixtureRequest) -> Callable[[], dcgm.Diagnosis]:
    """dcgm_diagnosis(): what NVIDIA's own diagnostic finds (a Diagnosis) at the level of --fleet-dcgm, on all GPUs of
    this machine, which the ranks have left by then. Not applicable where it cannot run."""
    _ = machine.gpus  # of which a check between nodes has none
    return partial(diagnose, request.config.stash[RUN], request.node.nodeid)


def diagnose(run: Run, check: str) -> dcgm.Diagnosis:
    """What it finds. What it printed is on record from then on, and so is what is only shown. It takes all GPUs of the
    machine, so in a run on some of them it is not applicable: somebody else may work on the others."""
    fact = dcgm.diagnostic(run.options.dcgm)
    if fact.subject in run.options.without:
        not_applicable(str(host.left_out(fact.subject)))
    gpus, present = run.target.topology.gpus, run.target.gpus_present
    if present > len(gpus):
        not_applicable(f"DCGM's diagnostic takes all {present} GPUs of the machine, and this run has {len(gpus)}")
    if (pool := run.ranks.in_use) is not None:
        pool.stop()  # a process that holds memory of a GPU is in its way; the next check gets new ranks
    value = host.plain(fact)
    printed = assertions.of_host({fact.name: value}.get, fact)
    run.record(events.HostFactRead(fact=fact.name, value=value))
    found = dcgm.diagnosed(printed, gpus)
    run.notice(fault.changed(check=check) for fault in found.shown)
    return found

"""The markers of this plugin, as `pytest --markers` shows them, and which tests they and our fixtures make ours: names
like world, rank, judge and level are those of others too."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from pytest_gpufleet.model.endings import not_applicable
from pytest_gpufleet.plugin import compat
from pytest_gpufleet.plugin.compat import HOST_IS_KEPT, RUN

if TYPE_CHECKING:
    from pytest_gpufleet.model.place import GpuTopology


FIXTURES = "pytest_gpufleet.plugin.fixtures"
OF_RANKS = ("world", "nccl_group", "rank")  # behind them there are ranks
MARKERS = (
    "spmd: run the body of this test on every rank; its argument `rank` says which one it is",
    "level(name): run this test at this level and above only (quick, standard, burnin)",
    "fresh_world: start new rank processes for this test",
    "at_the_end: run this test after all others, whatever order was asked for",
    "host_alone: nodes of a run that are one host, and runs beside each other on it, run this test one after the other",
    "needs(ranks=, capability=, gpus=, nodes=): where there are fewer ranks, a GPU of a lower compute capability, no "
    "GPUs but CPU ranks, or fewer nodes, this test does not apply",
)
# Of the suite alone: `pytest --markers` does not show them.
OF_THE_SUITE = (
    # Who passed without them is not done. The rest is said in docs/checks.md: which take several GPUs, must have
    # a limit (`of` which of them), and are held against peers: '' for all, None for none.
    "figures(metric, ..., of_several=(), required=(), of='', peers=''): what this test measures, and how it is judged",
    "chapter(title, question): where this test of the suite stands in the report",
    "proves_sound: a machine of which no test with this mark ran is not known to be good",
)


def ours(item: pytest.Item, name: str) -> bool:
    """Whether a test gets the fixture of this name from here, and not one of the same name that is somebody else's."""
    if name not in getattr(item, "fixturenames", ()):
        return False
    for definition in reversed(compat.fixture_definitions(item).get(name, ())):
        if definition.func.__module__ == FIXTURES:
            return True
        if name not in definition.argnames:  # else it is made of the one that it hides
            return False
    return False


def is_spmd(item: pytest.Item) -> bool:
    """Whether the body of a test is for the ranks. With none of our options and fixtures the marker is not ours."""
    asked = item.config.stash[RUN].options.asked
    return item.get_closest_marker("spmd") is not None and (asked or any(ours(item, name) for name in OF_RANKS))


def uses_ranks(item: pytest.Item) -> bool:
    return is_spmd(item) or any(ours(item, name) for name in OF_RANKS)


def is_between_nodes(item: pytest.Item) -> bool:
    """Whether a test is about several nodes together; all others each node runs by itself."""
    return any(marker.kwargs.get("nodes", 1) > 1 for marker in item.iter_markers("needs"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    run = item.config.stash[RUN]
    markers = [*item.iter_markers("needs")]
    if run.options.listing or not (uses_ranks(item) or (markers and run.options.asked)):
        return  # without our options and fixtures the marker is somebody else's
    needs_any = run.options.asked and (uses_ranks(item) or any(marker.kwargs.get("gpus") for marker in markers))
    if needs_any and not run.target.size:  # the first of them fails for it, and the others do not run
        from pytest_gpufleet.model.fault import Fault, Faults

        if run.absence_reported:
            pytest.skip("no GPU is here")
        run.absence_reported = True
        raise Faults((Fault("gpu_missing", (), f"no GPU is here: {run.target.why}"),))
    for marker in markers:
        if what := lacking(run.target.topology, run.target.size, run.target.nodes, *marker.args, **marker.kwargs):
            not_applicable(what)
        if (wanted := marker.kwargs.get("nodes", 1)) > run.ranks.nodes:
            pytest.skip(f"needs {wanted} nodes, and {run.ranks.nodes} of {run.target.nodes} are left")


def lacking(
    topology: GpuTopology, size: int, nodes_here: int, *, gpus: bool = False, capability: tuple[int, int] = (0, 0),
    ranks: int = 1, nodes: int = 1,
) -> str:  # fmt: skip
    """What is not here, in a sentence; `size` is the number of ranks, on `nodes_here` nodes."""
    if gpus and not topology.gpus:
        return "a rehearsal has no GPUs"
    for gpu in topology.gpus:
        has = tuple(gpu.compute_capability or capability)
        if has < capability:
            wanted, found = (".".join(map(str, each)) for each in (capability, has))
            return f"needs compute capability {wanted}, GPU {gpu.index} has {found}"
    if 0 < size < ranks:  # without any, the test's fixtures say what is wrong
        return f"needs {ranks} ranks, this run has {size}"
    return f"needs {nodes} nodes, this run has {nodes_here}" if nodes_here < nodes else ""


GPUS_A_HOST = 8  # of HGX: as many nodes of a run may be one host, and the last one waits for all others


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the timer of pytest-timeout: waiting is not the test's own time
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Who needs the host alone has a turn: on nodes of a run that are one host, and in runs beside each other there."""
    run, stash = item.config.stash[RUN], item.config.stash
    # Not the run on many nodes, where each node's own run does; nor CPU ranks, which measure nothing that counts.
    on_gpus = run.evidence is not None and run.options.nodes is None and run.target.topology.gpus
    if item.get_closest_marker("host_alone") is None or not on_gpus or HOST_IS_KEPT in stash:
        return (yield)
    from pytest_gpufleet.machine import dcgm, local_node

    # DCGM's diagnostic is the longest such check, and has a deadline of its own.
    most_seconds = GPUS_A_HOST * dcgm.SECONDS[run.options.dcgm]
    waits = f"{item.nodeid} needs this host to itself and waits for"
    with local_node.taken(lambda holder: run.tell(f"{waits} {holder}"), most_seconds) as kept_by:
        if kept_by:
            stash[HOST_IS_KEPT] = True  # nobody waits as long for each of the other tests
            run.written.spoil(f"checks that need this host to themselves had no turn, which was kept by {kept_by}")
        return (yield)

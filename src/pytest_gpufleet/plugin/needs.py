"""What a check needs, by its marker `needs`: where that is not here, the check does not apply."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpufleet.plugin.keys import RUN
from pytest_gpufleet.plugin.markers import uses_ranks

if TYPE_CHECKING:
    from pytest_gpufleet.model.gpu import GpuTopology
    from pytest_gpufleet.run.run import Run


def pytest_runtest_setup(item: pytest.Item) -> None:
    run = item.config.stash[RUN]
    markers = [*item.iter_markers("needs")]
    if run.options.listing or not (uses_ranks(item) or (markers and run.options.asked)):
        return  # without our options and fixtures the marker is somebody else's
    from pytest_gpufleet.model.endings import not_applicable

    if run.options.asked and (uses_ranks(item) or any(marker.kwargs.get("gpus") for marker in markers)):
        _need_any(run)
    for marker in markers:
        if what := lacking(run.ground.topology, run.ground.size, run.ground.nodes, *marker.args, **marker.kwargs):
            not_applicable(what)
        if (wanted := marker.kwargs.get("nodes", 1)) > run.ranks.nodes:
            pytest.skip(f"needs {wanted} nodes, and {run.ranks.nodes} of {run.ground.nodes} are left")


def _need_any(run: Run) -> None:
    """Where there is no GPU at all, the first test that needs one fails for it, and the others do not run."""
    from pytest_gpufleet.model.fault import Fault, Faults

    if run.ground.size:
        return
    if run.told_absent:
        pytest.skip("no GPU is here")
    run.told_absent = True
    raise Faults((Fault("gpu_missing", (), f"no GPU is here: {run.ground.why}"),))


def lacking(
    topology: GpuTopology,
    size: int,
    nodes_here: int,
    *,
    gpus: bool = False,
    capability: tuple[int, int] = (0, 0),
    ranks: int = 1,
    nodes: int = 1,
) -> str:
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
    if nodes_here < nodes:
        return f"needs {nodes} nodes, this run has {nodes_here}"
    return ""

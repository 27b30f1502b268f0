"""What a check needs, by its marker `needs`: where that is not here, the check does not apply."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpufleet.plugin.keys import RUN
from pytest_gpufleet.plugin.ownership import uses_ranks

if TYPE_CHECKING:
    from pytest_gpufleet.model.gpu import GpuTopology


def pytest_runtest_setup(item: pytest.Item) -> None:
    run = item.config.stash[RUN]
    markers = [*item.iter_markers("needs")]
    if not markers or run.options.listing or not (run.options.asked or uses_ranks(item)):
        return  # without our options and fixtures the marker is somebody else's
    from pytest_gpufleet.model.endings import not_applicable

    for marker in markers:
        if what := lacking(run.ground.topology, run.ground.size, run.ground.nodes, *marker.args, **marker.kwargs):
            not_applicable(what)
        if (wanted := marker.kwargs.get("nodes", 1)) > run.ranks.nodes:
            pytest.skip(f"needs {wanted} nodes, and {run.ranks.nodes} of {run.ground.nodes} are left")


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
    """What is not here, in a sentence; `size` is the number of ranks, on `nodes_here` nodes. Raises Faults where GPUs
    were asked for and there is none at all."""
    if gpus and not topology.gpus:
        from pytest_gpufleet.model.fault import Fault, Faults

        if problems := topology.problems:
            raise Faults((Fault("gpu_missing", (), f"no GPU is here: {'; '.join(problems)}"),))
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

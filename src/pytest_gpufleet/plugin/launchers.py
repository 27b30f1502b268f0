"""Launchers that start a command once for each GPU: there a run would be made several times, on the same GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping

# The launcher, the variable by which it tells how many processes it has started on this node, and of which all.
# Open MPI: docs.open-mpi.org, "Environment variables that Open MPI sets". MPICH and Intel MPI: Hydra.
COUNTING = (
    ("mpirun", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun", "MPI_LOCALNRANKS", "PMI_SIZE"),
)
# docs.pytorch.org/docs/stable/elastic/run.html. All of them: schedulers of training jobs set the first two for
# a process a node.
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def started_by(environment: Mapping[str, str], nodes: bool) -> str:
    """The launcher that has started this process as one of several of which each would make the same run; "" if there
    is none. `nodes`: the run is one of many nodes, of which a whole cluster has one.

    One task a node is as it should be: each makes a run of its node alone, or, by `ray symmetric-run`, the head's is
    the only one.
    """
    if all(name in environment for name in OF_TORCHRUN):
        return "torchrun"
    for launcher, here, everywhere in COUNTING:
        if _count(environment.get(everywhere if nodes else here)) > 1 or _count(environment.get(here)) > 1:
            return launcher
    # Not SLURM_NTASKS_PER_NODE: a batch script has it too, whatever it starts. "8(x16)" or "8(x2),4": man srun.
    tasks = re.sub(r"\(x\d+\)", "", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if any(_count(each) > 1 for each in tasks.split(",")) or _count(environment.get("SLURM_LOCALID")) > 0:
        return "srun"
    return ""


def _count(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0

"""Where a run would be made several times on the same GPUs, and where it would not."""

import pytest

from pytest_gpufleet.plugin.options import started_by

TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
A_TASK_A_NODE = {"SLURM_STEP_TASKS_PER_NODE": "1(x16)", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16", "PMIX_RANK": "3"}
BATCH_SCRIPT = {
    "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_TASKS_PER_NODE": "8(x2)",
    "SLURM_LOCALID": "0",
    "SLURM_PROCID": "0",
}


@pytest.mark.parametrize("nodes", [False, True], ids=["one machine", "many nodes"])
@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({}, ""),
        (TORCHRUN, "torchrun"),
        ({"WORLD_SIZE": "8", "RANK": "0"}, ""),  # of a training job's scheduler, which starts one process
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, "mpirun"),
        ({"PMI_SIZE": "16", "PMI_RANK": "8", "MPI_LOCALNRANKS": "8"}, "mpirun"),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "0"}, "srun"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2),2", "SLURM_LOCALID": "0"}, "srun"),
        ({"SLURM_LOCALID": "1"}, "srun"),
        (A_TASK_A_NODE, ""),
        (BATCH_SCRIPT, ""),
    ],
)
def test_who_starts_a_process_for_each_gpu(environment, launcher, nodes):
    assert started_by(environment, nodes) == launcher


def test_one_process_a_node_is_right_for_runs_of_each_alone_and_wrong_for_one_of_all():
    environment = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    assert (started_by(environment, nodes=False), started_by(environment, nodes=True)) == ("", "mpirun")

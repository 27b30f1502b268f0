"""What is in the machine, and whether it fits together. Cheap and disqualifying, so it comes first."""

import pytest
import torch

from pytest_gpufleet import not_applicable


@pytest.fixture
def gpus(gpu_topology, pytestconfig):
    if not gpu_topology.gpus and not isinstance(pytestconfig.getoption("gpus"), int):
        not_applicable("a rehearsal has no GPUs")
    if not gpu_topology.gpus:
        pytest.fail(f"no GPU is here: {'; '.join(gpu_topology.problems)}", pytrace=False)
    return gpu_topology.gpus


def test_gpu_count(gpus, gpu_topology, pytestconfig):
    """As many GPUs as ordered

    A GPU that is missing has failed, is not seated, fell off the bus (XID 79 in the kernel log) or is hidden from this
    container. Compare `nvidia-smi -L` and `lspci | grep -i nvidia` with the serial numbers on the delivery note; reseat
    or replace the one that is not listed.
    """
    asked = pytestconfig.getoption("gpus")
    expected = asked if isinstance(asked, int) else len(gpus)
    assert len(gpus) == expected, f"{len(gpus)} of {expected} GPUs are here: {'; '.join(gpu_topology.problems)}"


def test_software_fits_driver(gpus, gpu_topology):
    """Driver, CUDA, cuDNN, NCCL and torch are there and fit together

    A driver older than the CUDA that torch was built for runs nothing; a missing NCCL leaves GPUs unable to talk to
    each other. Update the driver, or install a torch that was built for it.
    """
    assert not gpu_topology.problems
    versions = {
        name: getattr(gpu_topology, name) for name in ("driver", "cuda_driver", "cuda", "cudnn", "nccl", "torch")
    }
    assert [name for name, version in versions.items() if version is None] == []


@pytest.mark.parametrize("fact", ["name", "vbios", "board_part_number", "memory_bytes", "nvlinks_active"])
def test_gpus_are_alike(gpus, fact):
    """All GPUs are of one model, board, VBIOS, memory size and number of NVLinks

    One that differs was swapped, updated alone or has lost links or memory. It runs at its own pace, and every
    collective at the pace of the slowest. Replace it or bring its firmware to the others' version.
    """
    values = {gpu.identity: getattr(gpu, fact) for gpu in gpus}
    most_common = max(values.values(), key=list(values.values()).count)
    odd = {identity: value for identity, value in values.items() if value != most_common}
    assert not odd, f"{fact} is {most_common} on most GPUs"


def test_no_foreign_process(gpus):
    """Nobody else computes on these GPUs

    A process that was there before this run shares the GPU with every test: it makes figures low and verdicts
    worthless. End it (`nvidia-smi` lists it), or ask who runs it; in a container it may belong to another one.
    """
    busy = {gpu.identity: gpu.processes for gpu in gpus if gpu.processes}
    assert not busy, "; ".join(f"{identity}: {', '.join(processes)}" for identity, processes in busy.items())


@pytest.mark.spmd
def test_every_rank_reaches_its_gpu(rank):
    """Each process gets its own device and can compute on it

    The first real work on the GPU that NVML lists under this number. If it fails, look at the kernel log for XIDs of
    the GPU named, and whether another process holds it (`nvidia-smi`).
    """
    values = torch.arange(1000, device=rank.device)
    assert values.sum().item() == 499500

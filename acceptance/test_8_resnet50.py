"""ResNet-50 trains as fast as on a healthy machine of this model, on one GPU and on all."""

import pytest

from pytest_gpufleet import measure, not_applicable, scaling_efficiency
from pytest_gpufleet.probes.training import RECIPES, train_throughput

pytestmark = pytest.mark.level("standard")


def test_each_gpu_alone(nccl_group, judge):
    """ResNet-50 on every GPU by itself, all at the same time

    GPUs that train together run at the pace of the slowest, so only this test shows which one it is. A GPU that is
    slower than its peers is hot, power-capped, sits on a slow slot, or is used by somebody else: compare its clocks and
    temperature in `nvidia-smi -q -d CLOCK,TEMPERATURE,PERFORMANCE` with the others'.
    """
    judge(measure(nccl_group, train_throughput, "amp", together=False))


@pytest.mark.parametrize("recipe", RECIPES)
def test_throughput_and_scaling(nccl_group, judge, recipe):
    """ResNet-50 throughput on one GPU and on all, and how well it scales

    Low on one GPU already: see the test of each GPU alone. Low on all only: communication (see the bandwidth tests) or
    the host holds the GPUs back (too few cores, CPU governor, another load on the machine).
    """
    capabilities = [gpu.compute_capability for gpu in nccl_group.gpus]
    if recipe == "tf32" and any(capability and capability < (8, 0) for capability in capabilities):
        not_applicable("TF32 came with compute capability 8.0")
    # Strict fp32 is judged where a figure for it was published, which is only where there is no TF32.
    required = recipe != "fp32"
    one = measure(nccl_group.subset([0]), train_throughput, recipe)
    if nccl_group.size == 1:
        judge(one, required=required)
    else:
        every = measure(nccl_group, train_throughput, recipe)
        judge(one, every, scaling_efficiency(one, every), required=required)

"""Each GPU by itself: whether it computes right and fast, and whether its memory is fast and holds what is written."""

from dataclasses import replace

import pytest

from pytest_gpufleet import GiB, MiB, measure_all, not_applicable
from pytest_gpufleet.probes.compute.corruption import dissenters, exact_product, repeat_product
from pytest_gpufleet.probes.compute.rate import PRECISIONS, product_rate
from pytest_gpufleet.probes.memory.bandwidth import bandwidth
from pytest_gpufleet.probes.memory.patterns import hold_patterns

REPEAT_SECONDS = 2  # for each precision
PATTERN_SECONDS = 5
OWN_BYTES = 2 * GiB  # and a tenth: contexts and NCCL's communicators of the tests before; 5 GiB were seen on an H200


def usual_precision(gpus):
    """The one that training uses, and for which figures are published."""
    capabilities = [gpu.compute_capability for gpu in gpus if gpu.compute_capability]
    return "bf16" if all(capability >= PRECISIONS["bf16"].since for capability in capabilities) else "fp16"


def beside_the_peak(measurement, profile):
    """The measurement, with its share of the data-sheet peak among the details where the peak is known."""
    peak = profile and profile.facts.get(f"peak_tflops_{measurement.conditions['precision']}")
    if not peak:
        return measurement
    ends = (f"{edge(measurement.values.values()) / peak:.0%}" for edge in (min, max))
    share = " to ".join(dict.fromkeys(ends))  # said once if it is the same
    return replace(measurement, details={**measurement.details, "share of data-sheet peak": share})


@pytest.mark.parametrize("precision", PRECISIONS)
def test_matrix_product_is_exact(world, precision):
    """Every GPU multiplies small whole numbers without a single wrong element

    The right result is known beforehand, and every precision can hold it. A GPU that gets it wrong computes wrongly
    from the start. If all GPUs do, the driver or the CUDA libraries are at fault; if one does, replace it.
    """
    results = world.run(exact_product, precision)
    wrong = [f"{world.name_of(index)}: {text}" for index, text in enumerate(results) if text]
    assert not wrong, "\n".join(wrong)


@pytest.mark.level("standard")
@pytest.mark.figures("gemm")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_matrix_product_is_fast(world, judge, gpu_profile, precision):
    """Matrix products are as fast as on a healthy GPU, with all GPUs under full load

    This is the speed of training and inference. All GPUs slow: power limit, clocks or cooling of the whole machine, or
    an old driver. One slower than its peers: it is hotter, gets less power, or somebody else uses it; compare
    `nvidia-smi -q -d CLOCK,TEMPERATURE,POWER,PERFORMANCE` of that GPU with the others', look at its heat sink and fans.
    """
    best, *others = measure_all(world, product_rate, precision)
    usual = precision == usual_precision(world.gpus)
    judge(beside_the_peak(best, gpu_profile), shown=others, required=usual)


@pytest.mark.level("standard")
@pytest.mark.figures("gemm")
def test_one_gpu_at_a_time(world, judge, gpu_profile):
    """Matrix products are as fast as on a healthy GPU while all other GPUs rest

    A GPU that is slow here is slow by itself. One that is slow only while all work lacks power or cooling, which the
    machine shares out: look at its power supplies and fans.
    """
    if world.size == 1:
        not_applicable("with one GPU this is what the test before has measured")
    precision = usual_precision(world.gpus)
    alone = [measure_all(world.subset([index]), product_rate, precision, shapes=1)[0] for index in range(world.size)]
    values = {place: value for one in alone for place, value in one.values.items()}
    samples = {place: each for one in alone for place, each in one.samples.items()}
    judge(beside_the_peak(replace(alone[0], values=values, samples=samples), gpu_profile))


@pytest.mark.level("standard")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_products_repeat_bit_for_bit(world, precision):
    """No silent data corruption: the same product always gives the same bits, and the same on all GPUs

    A GPU under full load computes one product for seconds; each result is compared with its first, and the first with
    those of the other GPUs of its model. One wrong bit means that this GPU corrupts results without any error message,
    and training on it goes wrong with nobody noticing. Run once more to see whether it is the same GPU again; replace
    the GPU that is named in any case.
    """
    repetitions = world.run(repeat_product, precision, REPEAT_SECONDS if world.gpus else 0.05)
    problems = [f"{world.name_of(index)}: {each.trouble}" for index, each in enumerate(repetitions) if each.trouble]
    problems += [f"{world.name_of(index)}: {difference}" for index, difference in dissenters(repetitions).items()]
    assert not problems, "\n".join(problems)


@pytest.mark.level("standard")
@pytest.mark.figures("memory_bandwidth")
def test_memory_bandwidth(world, judge):
    """Every GPU's memory is as fast as on a healthy GPU of its model

    Counted as BabelStream does: a copy moves two arrays, a triad three. Low on all GPUs: the memory clock
    (`nvidia-smi -q -d CLOCK`). Low on one: its memory runs hot or slow, or somebody else uses this GPU.
    """
    judge(*measure_all(world, bandwidth))


@pytest.mark.level("standard")
def test_memory_holds_patterns(world):
    """Every GPU's free memory can be allocated, holds what is written into it, and is free again afterwards

    Walking ones, every word's own address, random data, moving inversions; at least 95 % of the free memory. Wrong
    words that error correction has let through corrupt data silently: replace the GPU that is named. If memory is
    missing, another process holds it (`nvidia-smi` lists them); without one, reset the GPU.
    """
    problems = []
    for index, memory in enumerate(world.run(hold_patterns, PATTERN_SECONDS if world.gpus else 0)):
        name = world.name_of(index)
        if memory.trouble:
            problems.append(f"{name}: {memory.trouble}")
        if memory.total - memory.free > 0.10 * memory.total + OWN_BYTES:
            problems.append(
                f"{name}: {memory.free / GiB:.1f} GiB of {memory.total / GiB:.1f} GiB were free at the start"
            )
        if memory.tested < 0.95 * memory.free:
            problems.append(f"{name}: only {memory.tested / memory.free:.1%} of the free memory was tested")
        if memory.kept > 64 * MiB:
            problems.append(f"{name}: {memory.kept / MiB:,.0f} MiB were not free again afterwards")
    assert not problems, "\n".join(problems)

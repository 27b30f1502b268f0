"""Each GPU by itself: whether it computes right and fast, and whether its memory is fast and holds what is written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import starmap

import pytest

from pytest_gpufleet import (
    Fault,
    GiB,
    Judge,
    Measurement,
    MiB,
    Place,
    Profile,
    RankFailure,
    Size,
    World,
    expect_none,
    measure_all,
)
from pytest_gpufleet.probes.collectives.exactness import Kept
from pytest_gpufleet.probes.compute import corruption
from pytest_gpufleet.probes.compute.rate import (
    PRECISIONS,
    full_clock_rates,
    precisions_of,
    relative_rate,
    usual_precision,
    why_below_full_clock,
)
from pytest_gpufleet.probes.memory import PatternTest, hold_patterns, memory_bandwidth

pytestmark = pytest.mark.chapter("Compute", "Does each GPU compute right, and as fast as it should?")
of_memory = pytest.mark.chapter("Memory", "Is each GPU's memory sound, and as fast as it should be?")

SOAK_SECONDS = Size(60.0, rehearsal=0.3)  # of all precisions together
EXCHANGE_SECONDS = Size(0.1, rehearsal=0.0)  # of a collective behind each of them
Turn = list[corruption.Soaked]  # of the soak: what each GPU did in it
Exchanges = list[list[dict[str, Kept]] | RankFailure]
Soaked = Callable[..., Turn]
PATTERN_SECONDS = Size(3.0, rehearsal=0.0)  # whole rounds of all patterns; the burn-in goes on with them
OWN_BYTES = 2 * GiB  # and a tenth: contexts and NCCL's communicators of the tests before; 5 GiB were seen on an H200


def beside_the_peak(measurement: Measurement, profile: Profile | None) -> Measurement:
    """The measurement, with its share of the data-sheet peak among the details where the peak is known."""
    peak = profile.facts.get(f"peak_tflops_{measurement.conditions['precision']}") if profile else None
    if not peak:
        return measurement
    ends = (f"{edge(measurement.values.values()) / peak:.0%}" for edge in (min, max))
    share = " to ".join(dict.fromkeys(ends))  # said once if it is the same
    return replace(measurement, details={**measurement.details, "share of data-sheet peak": share})


@pytest.mark.parametrize("precision", PRECISIONS)
def test_matrix_product_is_exact(world: World, precision: str) -> None:
    """Matmul is exact

    Multiplies matrices of small whole numbers, whose product every precision holds exactly. A wrong element: replace
    that GPU. If all GPUs are wrong, the driver or the CUDA libraries are at fault.
    """
    able = [index for index, each in enumerate(world.run(precisions_of)) if precision in each]
    world.subset(able or range(world.size)).faultless(corruption.exact_matmul, precision, code="matmul_wrong")


@pytest.mark.level("standard")
@pytest.mark.figures("gemm_full_clock")
def test_matmuls_at_full_clock(world: World, judge: Judge) -> None:
    """Matmul throughput at full clock, below the power limit

    Multiplies zeros in fp32, which takes so little power that the clock stays at its highest, where GPUs of one model
    hardly differ. So it finds a GPU that is 1 % slow, and the first line says why. Its clock is lower: something holds
    it down, `nvidia-smi -q -d CLOCK,PERFORMANCE,POWER`. It does less at the same clock: a multiprocessor is off or
    slow, or its L2 cache; replace the GPU. Whether results are right under full load, other checks say.
    """
    rates: list[Measurement] = []

    def measured() -> Measurement:
        rates.append(full_clock_rates(world))
        return rates[-1]

    judge(measured, required=False, on_miss=lambda: why_below_full_clock(rates[-1], world.gpus))


@pytest.fixture(scope="module")
def precisions(world: World) -> list[str]:
    """Those that all GPUs have."""
    every = world.run(precisions_of)
    return [precision for precision in PRECISIONS if all(precision in each for each in every)]


@pytest.fixture(scope="module")
def turns() -> dict[str, list[Turn]]:
    """All turns of the soak, by precision."""
    return defaultdict(list)


@pytest.fixture(scope="module")
def exchanges() -> Exchanges:
    """What each GPU found in the collectives behind each turn of the soak, or why they ended."""
    return []


@pytest.fixture(scope="module")
def soaked(
    world: World, nccl_group: World, precisions: list[str], turns: dict[str, list[Turn]], exchanges: Exchanges
) -> Soaked:
    """soaked(precision): what each GPU did in its first turn of the soak. The check that asks for it first has the GPUs
    work for it; the others look at what came of it. soaked(precision, again=True): what each does in another turn."""
    seconds = SOAK_SECONDS.on(world) / len(precisions)

    def turn(precision: str, again: bool = False) -> Turn:
        if again or not turns[precision]:
            turns[precision].append(world.run(corruption.soak, precision, seconds))
            if world.size > 1 and not any(isinstance(each, RankFailure) for each in exchanges):
                try:
                    exchanges.append(nccl_group.run(corruption.exchanged, EXCHANGE_SECONDS.on(world)))
                except RankFailure as failure:  # matmuls need no collectives: it is the failure of their own check
                    exchanges.append(failure)
        return turns[precision][-1 if again else 0]

    return turn


@pytest.mark.level("standard")
@pytest.mark.figures("soak_temperature", "soak_clock", "soak_power", of_several=("soak_excess",))
def test_soak(world: World, judge: Judge, soaked: Soaked, precisions: list[str]) -> None:
    """Temperature, clock and power under full load

    All GPUs run matmuls at full load for a minute. A GPU that is hotter than all its peers at the same power has dried
    thermal paste, a cold plate that does not sit flat, a dead fan or blocked air; half of the GPUs may be warmer than
    the others, whose air or water they get. A lower clock at the same temperature, or less power, means a bad power
    supply: check the power cables. Thermal slowdown that the driver reports fails this check too.
    """
    *_, last = [soaked(precision) for precision in precisions]

    def again() -> list[Measurement]:  # half as long: the GPUs are still warm
        *_, last = [soaked(precision, again=True) for precision in precisions[len(precisions) // 2 :]]
        return corruption.soak_figures(world, last)

    judge(*corruption.soak_figures(world, last), required=False, again=again)


@pytest.mark.level("standard")
@pytest.mark.figures("gemm", required=("gemm",), of="at bf16, or fp16 where a GPU has no bf16")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_matrix_product_is_fast(
    world: World,
    judge: Judge,
    gpu_profile: Profile | None,
    soaked: Soaked,
    precision: str,
) -> None:
    """Matmul throughput with all GPUs under full load

    This is the speed of training and inference, measured at the end of each precision of the soak. All GPUs slow: check
    power limit, clocks, cooling and driver. One GPU slow: compare `nvidia-smi -q -d
    CLOCK,TEMPERATURE,POWER,PERFORMANCE` with its peers, and check its heat sink and fans.
    """

    def rate(again: bool = False) -> Measurement:
        return beside_the_peak(corruption.rate_of(world, soaked(precision, again)), gpu_profile)

    judge(rate(), required=precision == usual_precision(world.gpus), again=lambda: rate(again=True))


@pytest.mark.level("standard")
@pytest.mark.needs(ranks=2)
@pytest.mark.figures("gemm_relative")
def test_gpus_are_equally_fast(world: World, judge: Judge, soaked: Soaked, precisions: list[str]) -> None:
    """Mean matmul throughput of all precisions, against peers

    The mean has less noise than a single precision, so it shows a GPU that is a few per cent slow in all of them. A GPU
    at its power limit is slower when it is hotter; where the profile says how much, this is taken out. What is left is
    the chip or its power supply: compare `nvidia-smi -q -d CLOCK,POWER,PERFORMANCE` with its peers under load.
    """

    def relative(again: bool = False) -> Measurement:
        return relative_rate([corruption.rate_of(world, soaked(precision, again)) for precision in precisions])

    judge(relative(), required=False, again=lambda: relative(again=True))


@pytest.mark.level("standard")
@pytest.mark.figures("corruption_bound")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_products_repeat_bit_for_bit(
    world: World, judge: Judge, soaked: Soaked, turns: dict[str, list[Turn]], precision: str
) -> None:
    """No silent data corruption in matmuls

    Each GPU multiplies other random matrices every round of the soak. Every result is compared bit for bit with a
    second computation, and by its hash with the other GPUs of its model. The measurement is a bound: with 95 %
    confidence, events are rarer than one per that many GPU-seconds. One wrong bit means that this GPU corrupts results
    without any error message. Replace the named GPU.
    """
    soaked(precision)
    wrong: list[Fault] = []
    for turn in turns[precision]:
        wrong += world.faults("matmul_wrong", corruption.dissenters(world, [each.compared for each in turn]))
        wrong += world.faults("matmul_nondeterministic", [each.compared.trouble for each in turn])
    expect_none(wrong)
    every = [each for turn in turns[precision] for each in turn]
    judge(corruption.bound(world, [each.compared for each in every]), required=False)


@pytest.mark.level("standard")
@pytest.mark.needs(ranks=2)
@pytest.mark.figures("collective_corruption_bound")
def test_collectives_of_the_soak_are_exact(
    nccl_group: World, judge: Judge, soaked: Soaked, precisions: list[str], exchanges: Exchanges
) -> None:
    """No silent data corruption in collectives under load

    Between the precisions of the soak, while the GPUs are hot and their clocks change, all of them add up whole numbers
    and copy to each other over every link. Every element is compared. If one GPU is named, check its NVLink and ECC
    errors; if all are, one of them corrupts the sum of all.
    """
    for precision in precisions:
        soaked(precision)
    every = defaultdict[str, list[Kept]](list)
    for turn in exchanges:
        if isinstance(turn, RankFailure):
            raise turn
        for name in turn[0]:
            every[name] += (each[name] for each in turn)
            expect_none(nccl_group.faults("collective_wrong", [each[name].trouble for each in turn]))
    judge(*starmap(corruption.bound_of_collective, every.items()), required=False)


@of_memory
@pytest.mark.level("standard")
@pytest.mark.figures("memory_bandwidth", required=("memory_bandwidth",))
def test_memory_bandwidth(world: World, judge: Judge) -> None:
    """Memory bandwidth of each GPU

    Counted as BabelStream does: a copy moves two arrays, a triad three. The geometric mean of both is required: it does
    not depend on the revision of the board. Low on all GPUs: check the memory clock (`nvidia-smi -q -d CLOCK`). Low on
    one: its memory is hot or slow, or another process uses this GPU.
    """
    measured = partial(measure_all, world, memory_bandwidth)
    *each, both = measured()
    judge(both, shown=each, again=measured)


@of_memory
@pytest.mark.level("standard")
def test_memory_holds_patterns(world: World) -> None:
    """GPU memory holds test patterns

    Writes walking ones, addresses, random data and moving inversions to at least 95 % of the free memory and compares
    them. Wrong words that ECC did not catch corrupt data silently: replace the named GPU. If memory cannot be allocated
    or is not free afterwards, another process holds it (`nvidia-smi` lists them); without one, reset the GPU.
    """
    tests = zip(world.places, world.run(hold_patterns, PATTERN_SECONDS), strict=True)
    expect_none(fault for place, memory in tests for fault in memory_faults(place, memory))


def memory_faults(place: Place, memory: PatternTest) -> Iterator[Fault]:
    if memory.trouble:
        yield Fault("memory_data_error", (place,), memory.trouble)
    if memory.total - memory.free > 0.10 * memory.total + OWN_BYTES:
        free = f"{memory.free / GiB:.1f} GiB of {memory.total / GiB:.1f} GiB"
        yield Fault("memory_occupied", (place,), f"{free} were free at the start")
    if memory.kept > 64 * MiB:
        yield Fault("memory_occupied", (place,), f"{memory.kept / MiB:,.0f} MiB were not free again afterwards")

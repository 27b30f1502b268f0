"""Matmuls that come out wrong: once, every time, or otherwise than on other GPUs."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from pytest_gpufleet.machine.gpu_facts import consumer
from pytest_gpufleet.machine.telemetry import Watch
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.measurement import GpuState, Measurement, Reading
from pytest_gpufleet.model.place import Where
from pytest_gpufleet.probes.compute import rate
from pytest_gpufleet.probes.measure import together
from pytest_gpufleet.world.rank import Rank
from pytest_gpufleet.world.world import World

ROUND = 4  # matmuls between two looks at what the comparisons say
SHOWN = 3  # wrong elements that are described
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def hexadecimal(value: int, nbytes: int) -> str:
    """The bits of a whole number of so many bytes, be it negative: "0x3f80"."""
    return f"0x{value & (1 << 8 * nbytes) - 1:0{2 * nbytes}x}"


def exact_matmul(rank: Rank, precision: str) -> str:
    """Multiply matrices of -1, 0 and 1, whose product every precision holds exactly; "" if every element is right,
    else how many are wrong and the first of them."""
    rate.must_have(precision, rank.device)
    generator = torch.Generator().manual_seed(0)
    # Sums of 256 terms: bf16 holds whole numbers up to 256.
    a, b = (torch.randint(-1, 2, (512, 256), generator=generator).double() for _ in range(2))
    expected = a @ b.t()
    on_device = [matrix.to(rank.device, torch.float32).to(rate.PRECISIONS[precision].dtype) for matrix in (a, b)]
    with rank.phase(f"{precision} matmul"), rate.strictly(precision):
        result = rate.multiplication(precision, on_device[0], on_device[1].t())().cpu().double()
    wrong = result != expected
    first = [f"{at} is {result[i, j].item():g}, expected {expected[i, j].item():g}" for at, i, j in _first(wrong)]
    return f"{int(wrong.sum()):,} of {wrong.numel():,} elements are wrong: {'; '.join(first)}" if first else ""


@dataclass(frozen=True)
class Repetition:
    """What one rank saw. `kind`: devices of one kind must compute the same bits. Sums are over the bits of each row and
    of each column of the first result, on the CPU: where two devices' sums differ, their results do."""

    kind: str
    trouble: str
    row_sums: Tensor
    column_sums: Tensor


class Repeated:
    """One matmul computed again and again, every result compared bit for bit with the first, on the device, where
    operands and first result stay. It goes on after a wrong result. Neither NaN nor infinity passes: results are
    compared as bits, and the first must be finite. What that should have been only other devices know: compare what is
    `seen`."""

    def __init__(self, device: torch.device, precision: str, shape: rate.Shape | None = None) -> None:
        self.shape = shape or rate.shape_on(device, precision)
        self.precision = precision
        self._matmuls, self._wrong, self._unlike = 1, 0, 0  # computed; wrong elements, and matmuls that have some
        self._descriptions: list[str] = []
        self._multiply = rate.multiplication(precision, *rate.operands(precision, self.shape, device))
        with rate.strictly(precision):
            self._first = self._multiply()
        self._not_finite = int((~self._first.isfinite()).sum())

    def run(self, seconds: float) -> float:
        """Multiply for `seconds`, at least one round; TFLOP/s including the comparisons, which cost a few per cent."""
        began, before, elapsed = time.perf_counter(), self._matmuls, 0.0
        with rate.strictly(self.precision):
            while self._matmuls == before or elapsed < seconds:
                results = [self._multiply() for _ in range(ROUND)]
                # One answer for the round: no waiting between matmuls.
                if torch.stack([self._differs(result) for result in results]).any():
                    self._examine(results)
                self._matmuls += ROUND
                elapsed = time.perf_counter() - began
        m, n, k = self.shape
        return 2 * m * n * k * (self._matmuls - before) / elapsed / 1e12

    def launch(self) -> Tensor:
        """Begin one matmul, within `strictly(precision)`: whether it differs from the first, on the device."""
        return self._differs(self._multiply())

    @property
    def trouble(self) -> str:
        """What was wrong, in one line; "" if nothing was."""
        parts = []
        if self._not_finite:
            parts.append(f"NaN or infinite elements in the first matmul: {self._not_finite:,}")
        if self._wrong:
            parts.append(f"wrong elements: {self._wrong:,}, in {self._unlike:,} of {self._matmuls:,} equal matmuls")
            parts += self._descriptions
        return "; ".join(parts)

    @property
    def seen(self) -> Repetition:
        bits = _bits(self._first)
        rows, columns = (bits.sum(axis, dtype=torch.int64).cpu() for axis in (1, 0))
        return Repetition(kind(bits.device), self.trouble, rows, columns)

    def _differs(self, result: Tensor) -> Tensor:
        # Eight bytes at a time: little traffic.
        return (result.view(torch.int64) != self._first.view(torch.int64)).any()

    def _examine(self, results: list[Tensor]) -> None:
        expected = _bits(self._first)
        for number, result in enumerate(map(_bits, results), self._matmuls + 1):
            wrong = result != expected
            if count := int(wrong.sum()):
                self._wrong += count
                self._unlike += 1
                for at, i, j in _first(wrong)[: SHOWN - len(self._descriptions)]:
                    found, right = (hexadecimal(int(each[i, j]), each.element_size()) for each in (result, expected))
                    self._descriptions.append(f"matmul {number}, {at} is {found}, expected {right}")


def repeat_matmul(rank: Rank, precision: str, seconds: float) -> Repetition:
    with rank.phase(f"{precision} matmul, again and again"):
        work = Repeated(rank.device, precision)
        work.run(seconds)
        return work.seen


def kind(device: torch.device) -> str:
    """What a device must share with another one for both to compute the same bits: cuBLAS promises that for GPUs of one
    architecture with the same number of SMs (cuBLAS documentation, "Results reproducibility")."""
    if device.type == "cpu":
        return "CPU"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.multi_processor_count} SMs"


def dissenters(repetitions: Sequence[Repetition]) -> dict[int, str]:
    """The ranks whose first matmul is not the one that most ranks of their kind have, and how it differs. With two
    ranks of a kind nobody is the majority, and the higher one is named."""
    found = {}
    for alike, ranks in grouped((each.kind, index) for index, each in enumerate(repetitions)).items():
        sums = {index: torch.cat([repetitions[index].row_sums, repetitions[index].column_sums]) for index in ranks}
        keys = {index: each.numpy().tobytes() for index, each in sums.items()}
        usual, count = Counter(keys.values()).most_common(1)[0]
        reference = repetitions[next(index for index in ranks if keys[index] == usual)]
        doubt = "" if 2 * count > len(ranks) else "; nobody can say which is right"
        for index in ranks:
            if keys[index] != usual:
                rows = _lines("row", repetitions[index].row_sums != reference.row_sums)
                columns = _lines("column", repetitions[index].column_sums != reference.column_sums)
                found[index] = (
                    f"its matmul is another one than that of {count} of {len(ranks)} ranks ({alike}) from the same "
                    f"data{doubt}: {rows} and {columns} differ"
                )
    return found


def _lines(noun: str, differ: Tensor) -> str:
    which = differ.nonzero().flatten()
    first = f" (the first is {int(which[0])})" if len(which) else ""
    return f"{len(which):,} {noun}{'' if len(which) == 1 else 's'}{first}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS[tensor.element_size()])


def _first(wrong: Tensor) -> list[tuple[str, int, int]]:
    """Where the first few true elements of a matrix are, in words, by row and by column."""
    places = [divmod(at, wrong.shape[1]) for at in wrong.flatten().nonzero().flatten()[:SHOWN].tolist()]
    return [(f"row {row}, column {column}", row, column) for row, column in places]


# The soak: a GPU under matmuls until it is warm, one precision after the other. Whether it computes the same bits again
# and again, how fast, and what it is like at the end.

# Of matmuls alone, between those that are compared and the window: after a pause of 0.3 s an H200 was up to 8 %
# faster, and after 1.5 s of work within 3 % of what it settled at.
SETTLING_SECONDS = {"cuda": 1.5, "cpu": 0.0}
SOAK_METRICS = {"soak_temperature": "temperature_c", "soak_clock": "sm_clock_mhz", "soak_power": "power_watts"}
AT_POWER_LIMIT = 0.95  # of it: at 700 W, three machines of 4x H200 drew 682 to 702


@dataclass(frozen=True)
class Soaked:
    """What one rank did at one precision. `state`: of its GPU through all of it."""

    repetition: Repetition
    rate: Reading
    state: GpuState | None


def soak(rank: Rank, precision: str, seconds: float) -> Soaked:
    """Compute matmuls at one precision for `seconds` without a rest: first the same one again and again, compared bit
    for bit, which warms the GPU up; then the window of `matmul_rate`."""
    rate.must_have(precision, rank.device)
    settling = SETTLING_SECONDS[rank.device.type]
    with Watch(rank.gpu) as watch:
        repetition = repeat_matmul(rank, precision, seconds - settling - rate.WINDOW_SECONDS[rank.device.type])
        measured = rate.matmul_rate(rank, precision, lead_in=settling)
    return Soaked(repetition, measured, watch.medians)


def rate_of(world: World, soaked: Sequence[Soaked]) -> Measurement:
    (measured,) = together(world, [[each.rate] for each in soaked])
    return measured


def soak_figures(world: World, last: Sequence[Soaked]) -> list[Measurement]:
    """Temperature (C), SM clock (MHz) and power (W) of each GPU at the last precision, as far as NVML has them; of
    several GPUs also by how many kelvin each is too warm (`excess`)."""
    states = {place: each.state for place, each in zip(world.places, last, strict=True) if each.state}
    figures = []
    for metric, reading in SOAK_METRICS.items():
        values = {place: getattr(state, reading) for place, state in states.items()}
        figures.append(Measurement(metric, {at: value for at, value in values.items() if value is not None}, {}))
    temperature, _, power = figures
    limits = {gpu.place: gpu.get("power_limit_watts") or math.inf for gpu in world.gpus}
    at_limit = [power.values[at] >= AT_POWER_LIMIT * limit for at, limit in limits.items() if at in power.values]
    figures[-1] = replace(power, conditions={"at_power_limit": 2 * sum(at_limit) >= len(at_limit) > 0})
    if world.size > 1:
        figures.append(Measurement("soak_excess", excess(temperature.values, power.values, world.gpus), {}))
    return figures


def excess(celsius: Mapping[Where, float], watts: Mapping[Where, float], gpus: Sequence[Gpu]) -> dict[Where, float]:
    """By how many kelvin each GPU is warmer than its like at their power, where both are known; 0 if it is not.

    Nobody knows what air or water a GPU gets: the rear row of a board, and what comes second in a loop, are warmer by
    design, by as much as bad paste costs. But such GPUs are not alone. So a GPU is held against the median of the
    warmer half of the others: of its model, and at its NUMA node where three or more are known to be at one. A bad GPU
    in a cool position that is no warmer than those in the warm ones cannot be told from them, and neither can two bad
    ones of four; of two consumer boards one sits above the other. What it draws more or less than they do is taken out
    by its thermal resistance above theirs, in K/W.
    """
    known = {gpu.place: gpu for gpu in gpus if gpu.place in celsius and watts.get(gpu.place)}
    of_model = grouped((gpu.name, at) for at, gpu in known.items())
    at_node = {at: (gpu.name, str(gpu.get("cpu_affinity"))) for at, gpu in known.items()}
    of_node = grouped((node, at) for at, node in at_node.items())
    found: dict[Where, float] = {}
    for at, gpu in known.items():
        near = of_node[at_node[at]]
        others = sorted({*(near if len(near) > 2 else of_model[gpu.name])} - {at}, key=lambda each: -celsius[each])
        warmer = others[: max(1, len(others) // 2)] if len(others) > 1 or not consumer(gpu) else []
        usual = median(celsius[each] for each in warmer) if warmer else celsius[at]
        resistance = (celsius[at] - usual) / watts[at]
        found[at] = max(0.0, resistance * median(watts[each] for each in warmer or [at]))
    return found

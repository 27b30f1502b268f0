"""Wrong results of matmuls: once, every time, or other than on other GPUs."""

import itertools
import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple

import torch
from torch import Tensor

from pytest_gpufleet.machine import processors
from pytest_gpufleet.machine.gpu_facts import consumer
from pytest_gpufleet.machine.nvml import Watch
from pytest_gpufleet.model.conditions import ONE_WINDOW, Condition
from pytest_gpufleet.model.levels import NO_EVENT
from pytest_gpufleet.model.metric import GpuState, Measurement, Reading
from pytest_gpufleet.model.place import WORLD, Gpu, Where, grouped
from pytest_gpufleet.probes.collectives.exactness import Kept, stays_exact
from pytest_gpufleet.probes.comparison import SHOWN, bits, hexadecimal, unlike, wrong_elements
from pytest_gpufleet.probes.compute import rate
from pytest_gpufleet.probes.measure import together
from pytest_gpufleet.probes.timing import Mark, between, current_stream, mark
from pytest_gpufleet.world.world import Rank, World

ELEMENT = "row {}, column {}"
BLOCK = 512  # rows and columns of what is computed on the CPU to compare with
NEAR = 0.02  # of the usual SM clock: the power controller of a healthy GPU swings by as much
ROUND = 4  # matmuls of the same operands, after which one answer is waited for
# A round's operands are windows of two fixed arrays of random numbers, which costs nothing: to draw them anew takes a
# tenth of the time. They begin at whole multiples of STEP numbers: matmuls of fp8 on others are a fifth slower.
STEP = 4096
STEPS = {"cuda": 4096, "cpu": 64}
# A result is read once: its words of 64 bits are summed at this distance (a prime, so that no row or tile that lies
# elsewhere keeps all sums), and the sums with odd random factors. One wrong bit always changes the hash. On two
# H100 that takes 1 to 3 % of the rate, of fp32 nothing (2026-11-28).
DISTANCE = 4099


def exact_matmul(rank: Rank, precision: str) -> str:
    """Which elements of a matmul of -1, 0 and 1 are wrong, whose product every precision holds exactly. The result is
    as large as where rates are measured, so that every multiprocessor has tiles of it; its blocks repeat."""
    rate.must_have(precision, rank.device)
    m, n, _ = rate.shape_on(rank.device, precision)
    generator, dtype = torch.Generator().manual_seed(0), rate.PRECISIONS[precision].dtype
    # Sums of 256 terms: bf16 holds whole numbers up to 256.
    blocks = [torch.randint(-1, 2, (min(side, BLOCK), 256), generator=generator).float() for side in (m, n)]
    expected = (blocks[0] @ blocks[1].t()).to(rank.device)
    down, right = m // len(blocks[0]), n // len(blocks[1])
    a, b = (block.repeat(by, 1).to(rank.device).to(dtype) for block, by in zip(blocks, (down, right), strict=True))
    with rank.phase(f"{precision} matmul"), rate.strictly(precision):
        result = rate.multiplication(precision, a, b.t())()
        return wrong_elements(result, expected.to(result.dtype).repeat(down, right), at=ELEMENT)


class Amount(NamedTuple):
    seconds: float
    matmuls: int


@dataclass(frozen=True)
class Compared:
    """What one rank computed and compared. `kind`: devices of one kind must compute the same bits. `trouble`: results
    of a round that are not the same bits, "" if all are. `hashes`: one a round (int64), from round `first` on.
    `nbytes`: of one result. `amounts`: by SM clock in MHz, 0 where nobody knows it."""

    kind: str
    precision: str
    shape: rate.Shape
    trouble: str
    first: int
    hashes: Tensor
    nbytes: int
    amounts: Mapping[int, Amount]

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.amounts.values())

    @property
    def tflops(self) -> float:
        return 2.0 * math.prod(self.shape) * sum(each.matmuls for each in self.amounts.values()) / self.seconds / 1e12

    def and_also(self, more: "Compared") -> "Compared":
        """Without hashes: of a rank that goes on for hours."""
        return replace(self, hashes=self.hashes[:0], amounts=_added([self, more]))


def _added(every: Sequence[Compared]) -> dict[int, Amount]:
    """By clock from the lowest on."""
    found = grouped(item for each in every for item in each.amounts.items())
    return {at: Amount(sum(s for s, _ in found[at]), sum(n for _, n in found[at])) for at in sorted(found)}


# A round to be computed: its number, what multiplies, results, hashes, and when it began, multiplied and was done.
_Round = tuple[int, Callable[[], Tensor], list[Tensor], Tensor, tuple[Mark, Mark, Mark]]


class Matmuls:
    """Matmuls whose operands change every round, alike on all devices of one kind: a round can be computed again by its
    number. Every result is compared bit for bit with the others of its round; what they should have been only other
    devices know: `dissenters`. `laps`: when each round of the last run was done, by time.monotonic(), and seconds of
    one of its matmuls, which the hashes are no part of."""

    def __init__(self, device: torch.device, precision: str, shape: rate.Shape | None = None) -> None:
        self.shape = m, n, k = shape or rate.shape_on(device, precision)
        self.precision, self.kind = precision, kind(device)
        self.laps: list[tuple[float, float]] = []
        self._stream, self._steps = current_stream(device), STEPS[device.type]
        more = -(-self._steps * STEP // k)
        a, b = rate.operands(precision, (m + more, n + more, k), device)
        self._arrays = ((a.flatten(), m * k), (b.t().flatten(), n * k))
        generator = torch.Generator().manual_seed(0)
        self._factors = (torch.randint(-(1 << 62), 1 << 62, (DISTANCE,), generator=generator) | 1).to(device)
        self._usual: Tensor | None = None
        with rate.strictly(precision):
            result = self.of(0)()  # the first call may load or choose a kernel, which is no time of matmuls
            self._sums(result).tolist()
        self._nbytes = result.nbytes

    def of(self, number: int) -> Callable[[], Tensor]:
        """What computes the matmul of a round, within `strictly(precision)`."""
        # The same two windows come together again after the square of the steps.
        begins = (number % self._steps, (number + number // self._steps) % self._steps)
        a, b = (
            array[STEP * begin :][:count].view(-1, self.shape[2])
            for begin, (array, count) in zip(begins, self._arrays, strict=True)
        )
        return rate.multiplication(self.precision, a, b.t())

    def run(self, seconds: float, first: int = 0, least: int = 1, clock: Callable[[], int] = lambda: 0) -> Compared:
        """Multiply for `seconds`, at least so many rounds, from round `first` on. `clock`: the SM clock now."""
        hashes, amounts = list[int](), dict[int, Amount]()
        wrong, texts = 0, list[str]()
        done = began = time.monotonic()
        self.laps = []
        with rate.strictly(self.precision):
            ahead: _Round | None = self._launched(first)
            while ahead:
                number, multiply, results, of_round, marks = ahead
                # While a round is looked at the device computes the next one: a pause would let it cool down.
                more = len(hashes) + 1 < least or time.monotonic() - began < seconds
                ahead = self._launched(number + 1) if more else None
                if self._stream is not None:
                    marks[-1].synchronize()
                every = of_round.tolist()
                usual = Counter(every).most_common(1)[0][0]
                if set(every) != {usual}:
                    right, before = results[every.index(usual)], wrong
                    for index, result in enumerate(results):
                        count, elements = _unlike(result, right)
                        wrong += count
                        shown = elements[: max(0, SHOWN - len(texts))]
                        texts += [f"round {number}, matmul {index + 1}, {each}" for each in shown]
                    if not before:
                        again, _ = _unlike(multiply(), right)
                        texts.append(f"computed again {f'{again:,} are wrong' if again else 'it is right'}")
                if not hashes and not (finite := results[0].isfinite()).all():
                    texts.append(f"NaN or infinite elements: {int((~finite).sum()):,}")
                hashes.append(usual)
                done, since, at = time.monotonic(), done, clock()
                spent, matmuls = amounts.get(at, (0.0, 0))
                amounts[at] = Amount(spent + done - since, matmuls + ROUND)
                self.laps.append((done, between(*marks[:2]) / ROUND))
        computed = ROUND * len(hashes)
        text = "; ".join([*([f"wrong elements: {wrong:,}, in {computed:,} matmuls"] if wrong else []), *texts])
        return Compared(self.kind, self.precision, self.shape, text, first, torch.tensor(hashes), self._nbytes, amounts)

    def _launched(self, number: int) -> _Round:
        multiply = self.of(number)
        began = mark(self._stream)
        results = [multiply() for _ in range(ROUND)]
        computed = mark(self._stream)
        sums = torch.stack([self._sums(each) for each in results])
        hashes = (sums * self._factors).sum(1).to("cpu", non_blocking=True)
        return number, multiply, results, hashes, (began, computed, mark(self._stream))

    def launch(self) -> Tensor:
        """Begin the matmul of round 0: whether it differs from the first such one, on the device."""
        sums = self._sums(self.of(0)())
        self._usual = sums if self._usual is None else self._usual
        return (sums != self._usual).any()

    def _sums(self, result: Tensor) -> Tensor:
        words = result.view(torch.int64).flatten()
        whole = len(words) // DISTANCE * DISTANCE
        sums = words[:whole].view(-1, DISTANCE).sum(0)
        sums[: len(words) - whole] += words[whole:]
        return sums


def kind(device: torch.device) -> str:
    """What a device must share with another one for both to compute the same bits: cuBLAS promises that for GPUs of one
    architecture with the same number of SMs (cuBLAS documentation, "Results reproducibility")."""
    if device.type == "cpu":  # its model, and the instructions that torch uses of it
        return f"{processors.read_model().model or 'CPU'}, {torch.backends.cpu.get_cpu_capability()}"
    of = torch.cuda.get_device_properties(device)
    return f"{of.name}, {of.multi_processor_count} SMs, compute capability {of.major}.{of.minor}"


def dissents(every: Sequence[Compared]) -> dict[int, tuple[int, int, int, int]]:
    """Ranks with a hash other than most of their kind have: the first such round, a rank that has the other hash, and
    how many of how many of this kind have it. Without a majority all are."""
    found: dict[int, tuple[int, int, int, int]] = {}
    for ranks in grouped((each.kind, index) for index, each in enumerate(every)).values():
        common = min(len(every[index].hashes) for index in ranks)
        hashes = torch.stack([every[index].hashes[:common] for index in ranks])
        for at in (hashes != hashes[0]).any(0).nonzero().flatten().tolist():
            of_round = hashes[:, at].tolist()
            usual, count = Counter(of_round).most_common(1)[0]
            for index, own in zip(ranks, of_round, strict=True):
                if own != usual or 2 * count <= len(ranks):
                    other = usual if own != usual else next(each for each in of_round if each != own)
                    one, agreeing = ranks[of_round.index(other)], of_round.count(other)
                    found.setdefault(index, (every[index].first + at, one, agreeing, len(ranks)))
    return found


def dissenters(world: World, every: Sequence[Compared]) -> list[str]:
    """By rank, which of its matmuls is another one than that of most ranks, and where, computed again; or ""."""
    found = [""] * world.size
    for index, (number, usual, agreeing, ranks) in dissents(every).items():
        work = ({index, usual}, number, every[index].precision, every[index].shape)
        sums: list[list[Tensor]] = world.run(_again, [], *work)
        rows, columns = ((a != b).nonzero().flatten() for a, b in zip(sums[index], sums[usual], strict=True))
        again = "computed again it is right"
        if len(rows):
            first = rows[:SHOWN].tolist()
            shown: list[list[Tensor]] = world.run(_again, first, *work)

            def at(i: int, j: int, rows: list[int] = first) -> str:
                return ELEMENT.format(rows[i], j)

            _, texts = unlike(shown[index][0], shown[usual][0], at, hexadecimal)
            lines = (f"{len(of):,} {noun}{'s' * (len(of) > 1)}" for of, noun in ((rows, "row"), (columns, "column")))
            again = f"so it is again, in {' and '.join(lines)}: {'; '.join(texts)}"
        doubt = "" if 2 * agreeing > ranks else "; nobody can say which is right"
        found[index] = (
            f"its matmul of round {number} is another one than that of {agreeing} of {ranks} ranks "
            f"({every[index].kind}) from the same data{doubt}: {again}"
        )
    return found


def _again(rank: Rank, rows: list[int], both: set[int], number: int, precision: str, shape: rate.Shape) -> list[Tensor]:
    """These rows of the bits of a round's result; of none the sums of all rows and of all columns."""
    if rank.index not in both:  # they are of one kind: others may not have this precision
        return []
    with rate.strictly(precision), rank.phase(f"{precision} matmul of round {number}, again"):
        result = bits(Matmuls(rank.device, precision, shape).of(number)())
        return [result[rows].cpu()] if rows else [result.sum(axis, dtype=torch.int64).cpu() for axis in (1, 0)]


def bound(world: World, every: Sequence[Compared]) -> Measurement:
    """Of matmuls at one precision without a difference, first one turn of all ranks: silent corruption is rarer than
    one event in so many seconds of a GPU, with 95 %; and the same by SM clock, as the load made it."""
    amounts, kinds = _added(every), Counter(each.kind for each in every[: world.size])

    def said(clocks: Iterable[int]) -> str:
        seconds, matmuls = (sum(column) for column in zip(*(amounts[clock] for clock in clocks), strict=True))
        return amount(seconds, every[0].nbytes * matmuls, 2.0 * math.prod(every[0].shape) * matmuls)

    alone = "; of a GPU that has no like here a fault that always comes is not seen" if 1 in kinds.values() else ""
    details: dict[str, Condition] = {"compared": said(amounts) + alone}
    if clocks := [*filter(None, amounts)]:
        until = [*itertools.accumulate(amounts[clock].seconds for clock in clocks)]
        usual = clocks[bisect_left(until, until[-1] / 2)]
        off = {clock: clock / usual - 1 for clock in clocks}
        names = ("usual" if abs(by) <= NEAR else "lower" if by < 0 else "higher" for by in off.values())
        for name, own in grouped(zip(names, clocks, strict=True)).items():
            span = " to ".join(dict.fromkeys(f"{edge(own):,}" for edge in (min, max)))
            details[f"at {name} SM clocks"] = f"{span} MHz: {said(own)}"
    values: dict[Where, float] = {WORLD: sum(each.seconds for each in every) / NO_EVENT}
    return Measurement("corruption_bound", values, {"precision": every[0].precision}, details=details)


def exchanged(rank: Rank, seconds: float) -> dict[str, Kept]:
    """What a soak does between its turns. The latter copies over the link of each pair."""
    return {name: stays_exact(rank, seconds, name) for name in ("all_reduce", "all_to_all")}


def bound_of_collective(name: str, every: Sequence[Kept]) -> Measurement:
    seconds, nbytes = sum(each.seconds for each in every), sum(each.nbytes for each in every)
    values: dict[Where, float] = {WORLD: seconds / NO_EVENT}
    details = {"compared": amount(seconds, nbytes)}
    return Measurement("collective_corruption_bound", values, {"collective": name}, details=details)


def amount(seconds: float, nbytes: float, flop: float = 0.0) -> str:
    computed = f" {flop / 1e15:,.2f} PFLOP," if flop else ""
    found = f"{seconds:,.1f} GPU-seconds,{computed} {nbytes / 1e12:,.3g} TB, 0 differences"
    return f"{found}: less than one in {seconds / NO_EVENT:,.3g} s at 95 %"


def _unlike(found: Tensor, right: Tensor) -> tuple[int, list[str]]:
    return unlike(bits(found), bits(right), ELEMENT.format, hexadecimal)


# The soak: a GPU under matmuls until it is warm, one precision after the other, what it computes, and what it is like.

AT_POWER_LIMIT = 0.95  # of it: at 700 W, three machines of 4x H200 drew 682 to 702


class Soaked(NamedTuple):
    """What one rank did at one precision."""

    compared: Compared
    rate: Reading
    state: GpuState | None  # of its GPU through all of it


def soak(rank: Rank, precision: str, seconds: float) -> Soaked:
    """Compute and compare matmuls for `seconds` without a rest. The rate is of matmuls alone in a window at the end."""
    rate.must_have(precision, rank.device)
    with Watch(rank.gpu) as watch, rank.phase(f"{precision} matmuls, compared"):
        work = Matmuls(rank.device, precision)
        compared = work.run(seconds, least=rate.PARTS, clock=lambda: watch.sm_clock_mhz)
    begin = work.laps[-1][0] - rate.WINDOW_SECONDS[rank.device.type]
    each = max(1, sum(done > begin for done, _ in work.laps) // rate.PARTS)
    window = work.laps[-each * rate.PARTS :]
    parts = [fmean(took for _, took in window[part * each :][:each]) for part in range(rate.PARTS)]
    *rates, whole = (2 * math.prod(work.shape) / seconds / 1e12 for seconds in (*parts, fmean(parts)))
    conditions = {"precision": precision, "at_once": "all" if rank.size > 1 else "one", "method": ONE_WINDOW}
    details, state = {"shape": " x ".join(map(str, work.shape))}, watch.state(window[0][0])
    return Soaked(compared, Reading("gemm", whole, conditions, tuple(rates), None, details, state), watch.medians)


def rate_of(world: World, soaked: Sequence[Soaked]) -> Measurement:
    return together(world, [[each.rate] for each in soaked])[0]


def soak_figures(world: World, last: Sequence[Soaked]) -> list[Measurement]:
    """Temperature, SM clock and power of each GPU at the last precision; of several also how much too warm each is."""
    states: dict[Where, GpuState] = {at: each.state for at, each in zip(world.places, last, strict=True) if each.state}
    celsius, clocks, watts = (
        {at: value for at, state in states.items() if (value := getattr(state, reading)) is not None}
        for reading in ("temperature_c", "sm_clock_mhz", "power_watts")
    )
    known: dict[str, dict[Where, float]] = {"soak_temperature": celsius, "soak_clock": clocks, "soak_power": watts}
    limits = {gpu.place: gpu.get("power_limit_watts") or math.inf for gpu in world.gpus}
    at_limit = [watts[at] >= AT_POWER_LIMIT * limit for at, limit in limits.items() if at in watts]
    conditions = {"soak_power": {"at_power_limit": 2 * sum(at_limit) >= len(at_limit) > 0}}
    if world.size > 1:
        known["soak_excess"] = excess(celsius, watts, world.gpus)
    return [Measurement(metric, values, conditions.get(metric, {})) for metric, values in known.items()]


def excess(celsius: Mapping[Where, float], watts: Mapping[Where, float], gpus: Sequence[Gpu]) -> dict[Where, float]:
    """By how many kelvin each GPU is warmer than its like at their power, where both are known; 0 if it is not. The
    rear row of a board, and what comes second in a loop, are warmer by design, by as much as bad paste costs, but such
    GPUs are not alone. So a GPU is held against the median of the warmer half of the others: of its model, and at its
    NUMA node where three or more are known to be at one. A bad GPU in a cool position that is no warmer than those in
    the warm ones is not seen, and neither are two bad ones of four; of two consumer boards one sits above the other.
    What it draws more or less than they do is taken out by its thermal resistance above theirs, in K/W."""
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

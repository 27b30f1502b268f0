"""Faults planted into what was recorded of machines: what is said of each is asked of the judge, the checks or the
comparison of nodes when it is needed. `planted_rows` has the table of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import fmean

from pytest_gpufleet.model.conditions import ONE_WINDOW
from pytest_gpufleet.model.metric import METRICS, UNSTEADY_IN_NCCL, GiB, GpuState, Measurement, row_of
from pytest_gpufleet.model.place import WORLD, gpu, where
from pytest_gpufleet.probes.compute.corruption import excess
from pytest_gpufleet.probes.compute.rate import relative_rate
from pytest_gpufleet.probes.search.collective import who_slows_pairs
from pytest_gpufleet.verdict.accusations import accusations, causes, of_finding
from pytest_gpufleet.verdict.across_runs.rejudgement import judge_again
from pytest_gpufleet.verdict.judgement import judge, read, unsteady
from pytest_gpufleet.verdict.profile import choose, for_gpu
from tests.acceptance.checks import outcomes, ranks_answer
from tests.boards import BOARDS
from tests.conftest import EVIDENCE
from tests.machines import recorded
from tests.verdict import test_between_nodes as between
from tests.without_switch import MACHINES, Fault as SlowWay, named as named_there

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
FOUR = ("h200x4-a", "h200x4-b", "h200x4-c")
TWO = ("h200x2-g",)
# What each GPU of three machines lost for each kelvin that it was warmer, over all precisions but fp64 at most.
PER_KELVIN = 0.0022

Named = set[tuple[str, str]]  # the codes of what is said, each with its place, "" for none


@dataclass(frozen=True)
class Case:
    """A fault in one place of one machine: the places that it is at, and what is said of it at a size."""

    at: frozenset[str]
    named: Callable[[float], Named]

    def __post_init__(self):
        object.__setattr__(self, "named", cache(self.named))  # which takes long, and the page asks for each twice


@dataclass(frozen=True)
class Row:
    """What is planted, where one after the other, in which sizes; what looks like it and is healthy. `later`: what it
    takes to find it, where that is not there yet."""

    planted: str
    cases: Sequence[Case]
    code: str
    alike: str = ""
    healthy: Callable[[], Named] = set
    sizes: tuple[float, ...] = ()
    unit: str = "%"
    later: str = ""


# ---------------------------------------------------------------- what is said
def of(faults):
    return {(fault.name, str(place)) for fault in faults for place in fault.subjects or ("",)}


@cache
def run_of(name):
    return read(EVIDENCE / name / "evidence.jsonl")


def said(topology, measurements, model=H200, **how):
    named = Named()
    for each in measurements:
        found = judge(each, for_gpu(model), topology, "check", rehearsal=False, **how)
        for finding in filter(None, (found, unsteady(found, topology))):
            named |= of(of_finding(finding)) if finding.state == "missed" else set()
    return named


def of_run(record):
    """By the limits of today: what is said against places, or that the run is INCOMPLETE, and what kept it from being
    tested."""
    limits = choose(None, {gpu.name for gpu in record.topology.gpus})
    again = record if record.judged_again else judge_again(record, limits)
    if again.verdict == "INCOMPLETE":
        return {("INCOMPLETE", place) for _, place in of(causes(again)) or {("", "")}}
    return of(accusations(again)) or (set() if again.verdict == "ACCEPTED" else {(str(again.verdict), "")})


def of_facts(change, *probe, **more):
    """By all checks of inventory and health of a recorded 4x H200, and where a `probe` is given what its ranks read."""
    world = {"world": ranks_answer(probe[1], probe[0])} if probe else {}
    found = outcomes(recorded(change), **world, **more).values()
    return {named for each in found if each.what == "failed" for named in of(each.faults) or {("check_failed", "")}}


# ---------------------------------------------------------------- figures
def figures(name, metric, **under):
    every = [finding.measurement for finding in run_of(name).findings if not finding.again]
    return [each for each in every if each.metric == metric and under.items() <= each.conditions.items()]


def slowed(measurement, percent, by=None):
    """With all places, or those that one device is part of, slower by so much of what they reached."""
    slow = {at: value * (1 - percent / 100) for at, value in measurement.values.items() if by in (None, at, *at.parts)}
    return replace(measurement, values={**measurement.values, **slow}, samples={})


def gpus(name):
    return [each.place for each in run_of(name).topology.gpus]


@cache
def products(name):
    """Matrix products at each precision as they are measured today, with the temperature that each GPU had."""
    found, record = [], run_of(name)
    for finding in record.findings:
        rate = finding.measurement
        if rate.metric == "gemm" and rate.conditions.get("at_once") == "all":
            _, begin, end = next(span for span in record.spans if span[0] == finding.check)
            samples = [each.gpus for each in record.telemetry if begin <= each.time <= end + 1]
            hottest = [max(every[index]["temperature_c"] for every in samples) for index in range(len(samples[0]))]
            states = {gpu(index): GpuState(temperature_c=each) for index, each in enumerate(hottest)}
            under = {**rate.conditions, "method": ONE_WINDOW}
            found.append(replace(rate, samples={}, gpu_states=rate.gpu_states or states, conditions=under))
    return found


def computing(name, rates):
    return said(run_of(name).topology, [relative_rate(rates), *rates])


def slow_gpu(name, bad, percent):
    training = [slowed(each, percent, bad) for each in figures(name, "solo_train_throughput")]
    rates = [slowed(each, percent, bad) for each in products(name)]
    return computing(name, rates) | said(run_of(name).topology, training)


def slow_beside_peers(name, bad, percent):
    """Of what its peers reach at its temperature, on the average."""
    per_kelvin = row_of(METRICS["gemm_relative"]).per_kelvin
    rates = []
    for rate in products(name):
        warmth = {at: state.temperature_c or 0.0 for at, state in rate.gpu_states.items()}
        others = {at: 1 + per_kelvin * (warmth[at] - warmth[bad]) for at in rate.values if at != bad}
        usual = fmean(rate.values[at] * factor for at, factor in others.items())
        rates.append(replace(rate, values={**rate.values, bad: (1 - percent / 100) * usual}))
    return computing(name, rates)


def warmer(name, hot, kelvin):
    rates = []
    for rate in products(name):
        state = replace(rate.gpu_states[hot], temperature_c=(rate.gpu_states[hot].temperature_c or 0.0) + kelvin)
        rates.append(replace(slowed(rate, 100 * kelvin * PER_KELVIN, hot), gpu_states={**rate.gpu_states, hot: state}))
    return computing(name, rates)


def each_gpu(plant, machines=FOUR):
    return [Case(frozenset({str(bad)}), partial(plant, name, bad)) for name in machines for bad in gpus(name)]


def one(metric, machines=FOUR, whole=False, **under):
    """A figure with one place after the other slower; `whole`: all places that a GPU is part of."""

    def plant(name, each, bad, percent):
        return said(run_of(name).topology, [slowed(each, percent, bad)])

    return [
        Case(frozenset(str(at) for at in each.values if bad in (at, *at.parts)), partial(plant, name, each, bad))
        for name in machines
        for each in figures(name, metric, **under)
        for bad in (gpus(name) if whole else each.values)
    ]


def every(metric, machines=(*FOUR, *TWO), **under):
    def plant(name, each, percent):
        return said(run_of(name).topology, [slowed(each, percent)])

    return [
        Case(frozenset(map(str, each.values)), partial(plant, name, each))
        for name in machines
        for each in (products(name) if metric == "gemm" else figures(name, metric, **under))
    ]


def pairs(case, machines=FOUR, **how):
    return [each for way in ("read", "write") for each in case("pair_bandwidth", machines, direction=way, **how)]


def links(case, machines=FOUR):
    ways = ("host to device", "device to host")
    return [each for way in ways for each in case("host_bandwidth", machines, direction=way, at_once="one")]


def who_has_slow_pairs(name, bad, percent):
    return of(who_slows_pairs([slowed(each, percent, bad).values]) for each in figures(name, "pair_bandwidth"))


def collectives(*machines):
    names = ("all_reduce", "broadcast", "reduce", "sendrecv", "all_to_all")
    sizes = [(each, nbytes) for each in names for nbytes in (GiB, 8 * GiB)]
    return [case for each, size in sizes for case in every("busbw", machines, collective=each, bytes=size)]


def of_eight(unsteady_in_nccl=False):
    """The figures that the limits of 8x H200 were made from."""
    eight, found = BOARDS[H200].machine(8), []
    for limit in for_gpu(H200).limits:
        noisy = limit.conditions.get("collective") in UNSTEADY_IN_NCCL
        of_all = limit.metric == "busbw" and limit.conditions.get("ranks") == 8
        if of_all and limit.reference and noisy == unsteady_in_nccl:
            under = {key: value for key, value in limit.conditions.items() if key != "fabric"}
            figure = Measurement("busbw", {"world": limit.reference.value}, under)
            found.append(Case(frozenset({"world"}), lambda by, figure=figure: said(eight, [slowed(figure, by)])))
    return found


def of_values(metric, usual, at="gpu2", **under):
    """The last of these places of H200 beside the others: so many per cent less."""
    places = [where(f"{at[:-1]}{int(at[-1]) + 1 + index - len(usual)}") for index in range(len(usual))]

    def plant(size):
        values = dict(zip(places, (*usual[:-1], usual[-1] * (1 - size / 100)), strict=True))
        return said(BOARDS[H200].machine(4), [Measurement(metric, values, under)], required=False)

    return [Case(frozenset({at}), plant)]


def load(celsius):
    """What the soak measures of as many GPUs at 690 W."""
    places = {gpu(index): float(each) for index, each in enumerate(celsius)}
    there = BOARDS[H200].machine(8).gpus[: len(celsius)]
    return [Measurement("soak_excess", excess(places, dict.fromkeys(places, 690.0), there), {})]


def soak(celsius):
    """The last of these GPUs is so many K warmer."""
    last = Case(
        frozenset({str(gpu(len(celsius) - 1))}),
        lambda more: said(BOARDS[H200].machine(8), load([*celsius[:-1], celsius[-1] + more])),
    )
    return [last]


def exchanged():
    """Every GPU of a machine exchanged for one of a machine whose boards have another part number."""
    named, here, other = Named(), run_of("h200x4-a").topology, run_of("h200x4-c").topology
    for index, place in enumerate(gpus("h200x4-a")):
        mixed = replace(
            here, gpus=tuple(other.gpus[index] if index == at else each for at, each in enumerate(here.gpus))
        )
        both = zip(*(figures(name, "memory_bandwidth") for name in ("h200x4-a", "h200x4-c")), strict=True)
        named |= said(mixed, [replace(a, values={**a.values, place: c.values[place]}, samples={}) for a, c in both])
    return named


def half_of_the_sockets():
    values = {gpu(index): 53.1 if index < 4 else 55.5 for index in range(8)}
    ways = [{"direction": way, "at_once": "one"} for way in ("host to device", "device to host")]
    return said(BOARDS[H200].machine(8), [Measurement("host_bandwidth", values, way) for way in ways])


def as_recorded(metric):
    """Of every recorded machine as it is."""
    return lambda: set.union(*(case.named(0) for case in every(metric)))


def samples(metric, **under):
    """One of four samples of the H100 is so much lower."""
    (figure,) = figures("h100x1-h", metric, **under)

    def plant(percent):
        ((at, value),) = figure.values.items()
        four = [value, value, value, value * (1 - percent / 100)]
        return said(run_of("h100x1-h").topology, [replace(figure, samples={at: four})], H100)

    return [Case(frozenset({"gpu0"}), plant)]


def without_switch(way, *names):
    """Slow ways of these GPUs, in machines of some kinds, by what was measured of their links."""

    def plant(name, percent):
        return named_there(name, SlowWay(way, 1 - percent / 100), ("host_bandwidth", "pair_bandwidth"))

    found = []
    for name in names:
        pairs = {f"gpu{i}-gpu{j}" for i, row in enumerate(MACHINES[name].links) for j, link in enumerate(row)
                 if i != j and way <= {i, j} and (len(way) == 2 or not link.startswith("NV"))}  # fmt: skip
        found.append(Case(frozenset(pairs | {f"gpu{i}" for i in way if len(way) == 1}), partial(plant, name)))
    return found


def model_row(model, metric, under, value, source, size=30):
    """All GPUs of a machine of which only a healthy figure is known."""
    topology, world = BOARDS[model].machine(8), metric == "busbw"
    at = [WORLD] if world else [gpu(index) for index in range(8)]
    figure = Measurement(metric, dict.fromkeys(at, value), under)
    case = Case(frozenset(map(str, at)), lambda by: said(topology, [slowed(figure, by)], model))
    key = next(key for key in ("precision", "operation", "collective", "direction") if key in under)
    what = f"{model}: {figure.definition.title}, {under[key]}"
    return Row(what, [case], "limit_missed", f"{value:,g} {figure.unit}, {source}", lambda: case.named(0), (size,))


def two_of_eight(reached, nvls):
    """all_reduce of two nodes of 8x H100."""
    figures = between.pairs(2, reached)
    figures = replace(figures, conditions={**figures.conditions, "nvls": nvls})
    return said(between.cluster(2, H100), [figures], H100, required=False, network=400)

"""Limits that a machine's own facts make: every healthy machine that was recorded or published meets them, none with a
fault of 30 % does, and where nothing fair can be said there is none."""

from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.metric import METRICS, GiB, Measurement, MiB
from pytest_gpufleet.model.place import ARCHITECTURES, WORLD, Gpu, Missing
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict import physical_limits as peaks
from pytest_gpufleet.verdict.judgement import judge, judged_by, read
from pytest_gpufleet.verdict.physical_limits import COLLECTIVES, NoPeak, physical_limit
from pytest_gpufleet.verdict.profile import for_gpu, shipped
from tests.boards import BOARDS, H200
from tests.conftest import EVIDENCE, ROOT
from tests.verdict.test_healthy_figures import PUBLISHED
from tests.without_switch import HEALTHY, MACHINES, NARROW_SLOT, SLOW_HOP, named, standard_run

OF_HARDWARE = {"memory_bandwidth", "host_bandwidth", "gemm", "pair_bandwidth", "busbw"}
KINDS = {*OF_HARDWARE, "train_throughput", "solo_train_throughput"}
FAULT = 0.7

BANDWIDTH = {"collective": "all_reduce", "bytes": GiB, "dtype": "float32", "ranks": 8, "nvls": False}
TRAINING = {"model": "resnet50", "recipe": "amp", "ranks": 1, "batch": 256, "image": 224}


def figure(metric, value=1.0, places=("gpu0",), **under):
    return Measurement(metric, dict.fromkeys(places, value), under)


def recorded(name):
    """A recorded run, on whose GPUs the facts were read that its version did not know."""
    record = read(EVIDENCE / name / "evidence.jsonl")
    told = H200.gpu().facts
    gpus = tuple(replace(gpu, facts={**told, **gpu.facts}) for gpu in record.topology.gpus)
    return replace(record, topology=replace(record.topology, gpus=gpus))


# ---------------- recorded machines
@pytest.mark.parametrize("name", ["h200x1-e", "h200x2-f", "h200x4-a", "h200x4-b", "h200x4-c"])
def test_a_recorded_machine_meets_its_physical_limits_and_not_with_a_fault_of_30_percent(name):
    """Slow memory shows in the triad: how fast cudaMemcpy is depends on the driver too."""
    record, found = recorded(name), []
    measured = [finding.measurement for finding in record.findings]
    for each in (finding.measurement for finding in record.findings if finding.required):
        with suppress(NoPeak):
            found.append((each, physical_limit(each, record.topology, measured)))
    assert found
    assert {measurement.metric for measurement, _ in found} == KINDS or "h200x4" not in name
    for measurement, limit in found:
        assert all(limit.met_by(value) for value in measurement.values.values()), (measurement, limit)
        missed = [not limit.met_by(FAULT * value) for value in measurement.values.values()]
        assert all(missed) or measurement.conditions.get("operation") == "copy", (measurement, limit)


# ---------------- published figures
def published():
    """What the sources of the shipped profiles tell of healthy machines, with the figure; gates of operators too."""
    found = [(name, metric, under, value) for name, metric, under, value, _ in (*PUBLISHED, *MORE)]
    for profile in shipped():
        own = [limit for limit in profile.limits if limit.grade == "published" and limit.metric in OF_HARDWARE]
        found += [(profile.match[0], each.metric, each.conditions, each.measured or each.value) for each in own]
    for name, metric, under, value in found:
        places = ("gpu0-gpu1",) if metric == "pair_bandwidth" else ("gpu0",)
        yield BOARDS[name], figure(metric, places=places, **{"at_once": "one", **under}), value


def test_no_published_healthy_figure_falls_below_a_physical_limit():
    held, below = 0, []
    for board, measurement, value in published():
        topology = board.machine(int(measurement.conditions.get("ranks", 8)))
        try:
            limit = physical_limit(measurement, topology, ())
        except NoPeak:
            continue
        held += 1
        if not limit.met_by(value):
            below.append((board.name, measurement.metric, dict(measurement.conditions), value, str(limit)))
    assert below == []
    assert held > 70


# What else was published of such boards, gates of operators too: model, metric, conditions, figure, source.
MORE = [
    ("Tesla T4", "gemm", {"precision": "fp16"}, 24, "forums.developer.nvidia.com/t/264462"),
    ("NVIDIA H100 80GB HBM3", "gemm", {"precision": "bf16"}, 730, "huggingface/gpu-fryer"),
    ("NVIDIA GB200", "gemm", {"precision": "bf16"}, 1822, "stas00/ml-engineering"),
    ("NVIDIA H20", "gemm", {"precision": "bf16"}, 115, "78 % of its data sheet, as a B200 reaches"),
    ("NVIDIA A100-SXM4-80GB", "busbw", {**BANDWIDTH, "bytes": 8 * GiB}, 185, "oracle-quickstart/oci-hpc, a gate"),
    ("NVIDIA H100 80GB HBM3", "pair_bandwidth", {"direction": "read", "link": "NVLink"}, 316, "crusoe, a gate"),
    ("NVIDIA A100-SXM4-40GB", "memory_bandwidth", {"operation": "copy"}, 1330, "FlagOpen/FlagPerf, cudaMemcpy"),
    ("NVIDIA H200", "memory_bandwidth", {"operation": "copy"}, 2232, "H20-3e by this memory, nvbandwidth issue 48"),
    ("Tesla V100-SXM2-16GB", "host_bandwidth", {"direction": "host to device"}, 9, "azurehpc-health-checks, a gate"),
]


# ResNet-50 on one GPU, and what its parts were published at: TFLOP/s, memory GB/s, images/s. In fp16 channels_last, as
# the recipe is; NCHW, as most publish, is another work.
PUBLISHED_TRAINING = [
    ("tf32", 127, 1660, 1066, "A100 SXM 80 GB: stas00/ml-engineering, AI-benchmarking-guide, deeplearning-benchmark"),
    ("tf32", 373, 2930, 1892, "H100 SXM: the same"),
    ("tf32", 870, 5400, 2967, "B200: 77 % of its data sheet; DCGM, deeplearning-benchmark"),
    ("amp", 256, 1660, 2470, "A100 SXM 80 GB: the same, DeepLearningExamples"),
    ("amp", 94, 810, 1200, "V100: gpu_benchmark, gpu-benches, DeepLearningExamples"),
    ("amp", 78, 840, 1218, "RTX 3090: gpu_benchmark, 90 % of its data sheet, pytorch-image-models"),
]


@pytest.mark.parametrize(("recipe", "products", "memory", "images", "source"), PUBLISHED_TRAINING)
def test_published_training_meets_what_its_parts_make(recipe, products, memory, images, source):
    measured = parts(products, memory, "fp16" if recipe == "amp" else "tf32")
    limit = physical_limit(figure("train_throughput", **{**TRAINING, "recipe": recipe}), H200.machine(), measured)
    assert limit.met_by(images), source


def parts(products, memory, precision="fp16"):
    return [
        figure("gemm", products, precision=precision, at_once="all"),
        figure("memory_bandwidth", memory, operation="triad", at_once="all"),
    ]


# Of one GPU, and of several behind an NVSwitch.
OF_ONE = [
    figure("memory_bandwidth", operation="triad", at_once="all"),
    figure("host_bandwidth", direction="host to device", at_once="one"),
    figure("gemm", precision="fp16", at_once="all"),
    figure("train_throughput", **TRAINING),
]
OF_SEVERAL = [
    figure("pair_bandwidth", places=("gpu0-gpu1",), direction="read", link="NVLink"),
    *(figure("busbw", **{**BANDWIDTH, "collective": name}) for name in COLLECTIVES),
]


@pytest.mark.parametrize("capability", ARCHITECTURES, ids=lambda each: ".".join(map(str, each)))
def test_every_architecture_has_a_limit_for_each_figure_that_a_verdict_needs(capability):
    """Or its machines could never be ACCEPTED as shipped."""
    known = ARCHITECTURES[capability]
    topology = replace(H200, capability=capability, links=18 if known.nvlink else 0).machine()
    for each in OF_ONE + (OF_SEVERAL if known.nvlink else []):
        assert physical_limit(each, topology, parts(100.0, 1000.0)).value > 0


# ---------------- what a limit is, and where there is none
def test_a_limit_and_a_peak_say_what_they_follow_from():
    limit = physical_limit(figure("memory_bandwidth", operation="triad", at_once="all"), H200.machine(), ())
    assert (limit.grade, limit.sense, limit.value, limit.unit) == ("physical", "min", 3081.0, "GB/s")
    assert limit.source.endswith("64 % of what the hardware can do at best, 3,201 MHz x 2 x 6,016 bits: 4,814 GB/s")
    limit = physical_limit(figure("gemm", precision="fp16", at_once="one"), BOARDS["Tesla T4"].machine(), ())
    assert limit.value == 19.2  # where the power limit alone decides
    assert "70 W x 0.343 TFLOP a joule" in limit.source
    gpu = H200.gpu()
    assert str(peaks.memory_bandwidth(gpu)) == "3,201 MHz x 2 x 6,016 bits: 4,814 GB/s"
    assert str(peaks.product_rate(gpu)) == "132 SMs x 1,980 MHz x 4,096 operations (H100 white paper): 1,071 TFLOP/s"
    assert str(peaks.nvlinks(gpu, 18)) == "18 NVLinks x 25 GB/s: 450 GB/s"
    assert str(peaks.Peak(12_938.4, "images/s", "2 x 6,469 images/s")) == "2 x 6,469 images/s: 12,940 images/s"


def test_the_least_able_of_several_gpus_decides():
    machine = H200.machine(2)
    slow = Gpu(1, {**machine.gpus[1].facts, "pcie_width_max": 8})
    measurement = figure("host_bandwidth", places=("gpu0", "gpu1"), direction="host to device", at_once="one")
    limit = physical_limit(measurement, replace(machine, gpus=(machine.gpus[0], slow)), ())
    assert limit.value == pytest.approx(0.64 * 31.5, rel=0.001)


@pytest.mark.parametrize("metric", ["solo_train_throughput", "train_throughput"])
def test_training_on_several_is_held_against_one_gpu_of_the_same_run(metric):
    alone = figure(metric, 1000.0, **TRAINING)
    together = figure("train_throughput", **{**TRAINING, "ranks": 8})
    assert physical_limit(together, H200.machine(), [alone]).value == 6000.0
    other = replace(alone, conditions={**TRAINING, "batch": 64})
    with pytest.raises(NoPeak):
        physical_limit(together, H200.machine(), [other])


def test_a_limit_follows_from_no_measurement_that_was_repeated():
    trained, (product, memory) = figure("train_throughput", **TRAINING), parts(700.0, 4000.0)
    slow = Finding("x", replace(memory, values={"gpu0": 400.0}), again="it missed")
    record = Record(topology=H200.machine(), findings=[slow, Finding("x", product), Finding("x", memory)])
    limit = judged_by(record, None)(trained, check="x").limit
    assert limit == physical_limit(trained, record.topology, [product, memory])


NONE = {
    "below 1 GiB": ("busbw", {**BANDWIDTH, "bytes": 64 * MiB}, H200.machine()),
    "no NVLink, no hop measured": ("busbw", BANDWIDTH, BOARDS["NVIDIA L40S"].machine()),
    "no switch, no pair measured": ("busbw", BANDWIDTH, H200.machine(4, "nvlink")),
    "all at once": ("host_bandwidth", {"direction": "host to device", "at_once": "all"}, H200.machine()),
    "burn-in": ("gemm", {"work": "burn-in"}, H200.machine()),
    "nothing measured": ("train_throughput", TRAINING, H200.machine()),
    "another optimizer": ("train_throughput", {**TRAINING, "optimizer": "adam"}, H200.machine()),
    "own metric": ("loader_throughput", TRAINING, H200.machine()),
}


@pytest.mark.parametrize("case", NONE)
def test_where_nothing_fair_can_be_said_the_figure_stays_not_judged(case):
    metric, under, topology = NONE[case]
    measurement = figure(metric, places=("gpu0-gpu1",) if metric == "pair_bandwidth" else ("gpu0",), **under)
    finding = judge(measurement, None, topology, "a.py::b", rehearsal=False)
    assert (finding.state, finding.limit) == ("not judged", None)
    assert "nor do the facts of the hardware make one" in finding.reason


@pytest.mark.parametrize("under", [{}, {"nodes": 2, "collective": "all_reduce"}, {"batch": 1, "bytes": "8 GiB"}])
def test_a_metric_of_the_suite_may_be_measured_under_conditions_of_ones_own(under):
    for metric, required in product(METRICS.keys() - {"spread"}, (True, False)):
        how = {"rehearsal": False, "required": required, "measured": parts(700.0, 4000.0)}
        assert judge(figure(metric, **under), for_gpu("NVIDIA H200"), H200.machine(), "x", **how).state


def test_any_other_limit_goes_before_a_physical_one():
    measurement = figure("memory_bandwidth", 4200.0, operation="copy", at_once="all")

    def judged(profile=None, **how):
        finding = judge(measurement, profile, H200.machine(), "a.py::b", **{"rehearsal": False, **how})
        return finding.state, finding.limit and finding.limit.grade

    assert judged(for_gpu("NVIDIA H200")) == ("met", "calibrated")
    assert judged() == ("met", "physical")
    assert judged(required=False) == ("for information", None)  # which no verdict needs
    assert judged(rehearsal=True) == ("not judged", None)


def test_two_gpus_with_a_bridge_have_limits_of_collectives_too():
    """Somebody asks 208 GB/s of an all_reduce of two H100 NVL (Azure)."""
    under, two = {**BANDWIDTH, "ranks": 2}, BOARDS["NVIDIA H100 NVL"].machine(2, "nvlink")
    limits = [physical_limit(figure("busbw", **under | {"collective": name}), two, ()).value for name in COLLECTIVES]
    assert limits[0] == 180.0


def test_the_documentation_has_every_part():
    text = (ROOT / "docs" / "profiles.md").read_text(encoding="utf-8")
    _, _, section = text.partition("### Theoretical limits")
    section, _, _ = section.partition("### Conditions")
    of, training = peaks, (fraction for fraction, *_ in peaks.TRAINING.values())
    every = [of.MEMORY, of.MEMCPY, of.HOST, of.HOST_PCIE_3, of.PAIR, of.PAIR_PCIE, of.RING, of.EACH, of.PRODUCTS]
    every += [of.POWER, of.TOGETHER, of.RAIL, of.RAILS_TOGETHER]
    every += [*COLLECTIVES.values(), *of.LOOPBACK.values(), *training]
    assert [part for part in every if f"{part:.0%}".replace("%", " %") not in section] == []
    assert [name for name in COLLECTIVES if f"`{name}`" not in section] == []


# ---------------- machines without an NVSwitch: each kind can be ACCEPTED, a fault is found at its place
@pytest.mark.parametrize("name", MACHINES)
def test_a_healthy_machine_is_accepted_and_not_with_collectives_at_a_tenth(name):
    record = standard_run(name, HEALTHY)
    assert [each for each in record.findings if each.state in ("missed", "not judged")] == []
    assert record.verdict == "ACCEPTED"
    judged = {str(each.measurement.conditions["collective"]) for each in record.findings
              if each.measurement.metric == "busbw" and each.limit and each.limit.grade == "physical"}  # fmt: skip
    assert judged >= {"all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "sendrecv"}
    # A collective at a tenth of it, as over sockets in place of peer access or shared memory, is too slow.
    of_busbw = [each for each in record.findings if each.measurement.metric == "busbw" and each.limit]
    for collective in ("all_reduce", "sendrecv", "all_to_all"):
        under = {"collective": collective, "bytes": GiB}
        (found,) = [each for each in of_busbw if under.items() <= dict(each.measurement.conditions).items()]
        assert not any(found.limit.met_by(value / 10) for value in found.measurement.values.values())


@pytest.mark.parametrize("name", MACHINES)
def test_one_slow_hop_and_one_card_in_a_slot_of_four_lanes_reject_and_are_named(name):
    assert standard_run(name, SLOW_HOP).verdict == standard_run(name, NARROW_SLOT).verdict == "REJECTED"
    assert {place for _, place in named(name, SLOW_HOP)} == {"gpu0-gpu1", "gpu1-gpu0"}
    found = {place for _, place in named(name, NARROW_SLOT)}
    assert "gpu2" in found
    assert [place for place in found if "gpu2" not in place.split("-")] == []


def test_the_source_of_a_limit_names_the_hop_that_decides():
    topology = MACHINES["4x L40S"].topology
    ring = Measurement("ring_bandwidth", {"gpu0-gpu1": 25.0, "gpu1-gpu2": 9.5}, {"link": "SYS"})
    both = {"direction": "device to host both ways", "at_once": "all", "method": "lined up"}
    host = Measurement("host_bandwidth", {"gpu0": 14.0, "gpu3": 12.0}, both)
    busbw = Measurement("busbw", {"world": 9.0}, {"collective": "broadcast", "bytes": GiB, "ranks": 4})

    def source(*measured):
        return physical_limit(busbw, topology, measured).source

    assert source(ring, host).endswith(
        "the slowest hop, gpu1-gpu2 over SYS, with all hops of the ring at once, as measured: 9.5 GB/s"
    )
    for left_out in ("host", "NVLink"):  # the driver's own copies; no hop of PCIe
        slow = replace(ring, conditions={"link": left_out})
        assert "gpu3 device to host both ways, with all GPUs at once" in source(slow, host)
    with pytest.raises(NoPeak, match="has not measured"):
        source(replace(host, conditions={**both, "at_once": "one"}))


# ---------------- what a GPU can do at best, the share of it that training uses, and what no GPU can reach
WITHIN = 0.03
DATA_SHEETS = [board for board in BOARDS.values() if board.name != "NVIDIA GB200"]  # has two clocks, and C2C for PCIe


@pytest.mark.parametrize("board", DATA_SHEETS, ids=lambda board: board.name)
def test_peaks_are_those_of_the_data_sheet(board):
    at_boost = board.gpu(sm_clock_max_mhz=board.boost)
    assert peaks.memory_bandwidth(at_boost).value == pytest.approx(board.memory, rel=WITHIN)
    assert peaks.host_link(at_boost).value == pytest.approx(board.host, rel=WITHIN)
    assert peaks.product_rate(at_boost).value == pytest.approx(board.tflops, rel=WITHIN)
    if board.links:
        assert peaks.nvlinks(at_boost, board.links).value == pytest.approx(board.nvlink, rel=WITHIN)


FOLLOWS = {
    peaks.memory_bandwidth: ("memory_bus_bits", "memory_clock_max_mhz"),
    peaks.host_link: ("pcie_generation_max", "pcie_width_max"),
    peaks.product_rate: ("compute_capability", "cuda_cores", "sm_clock_max_mhz"),
    peaks.power_bound: ("power_limit_watts",),
}


@pytest.mark.parametrize(("peak", "fact"), [(peak, fact) for peak, facts in FOLLOWS.items() for fact in facts])
def test_a_fact_that_the_driver_does_not_give_is_not_guessed(peak, fact):
    for untold in (Missing("NVML: Not Supported", absent=True), 0):
        with pytest.raises(NoPeak, match=f"does not give {fact} of GPU 0"):
            peak(H200.gpu(**{fact: untold}))


def test_the_brand_is_asked_for_where_it_decides():
    ada, hopper = BOARDS["NVIDIA L40S"], BOARDS["NVIDIA H200"]
    with pytest.raises(NoPeak, match="brand"):
        peaks.product_rate(ada.gpu(brand=Missing("NVML: Not Supported", absent=True)))
    assert peaks.product_rate(hopper.gpu(brand=0))


@pytest.mark.parametrize(("facts", "why"), [
    ({"mig_mode": [1, 1]}, "cut by MIG"),
    ({"virtualization": 2}, "a virtual one"),
    ({"compute_capability": [99, 0]}, "nobody has looked up the matrix products of compute capability 99.0"),
])  # fmt: skip
def test_parts_of_gpus_and_what_nobody_has_looked_up_have_no_peak(facts, why):
    with pytest.raises(NoPeak, match=why):
        peaks.product_rate(H200.gpu(**facts))


def test_a_virtual_machine_that_does_not_see_the_slot_asks_for_what_the_link_runs_at():
    """A GPU that could do PCIe 5 in a host that cannot is healthy; otherwise it is whole."""
    assert peaks.product_rate(H200.gpu(virtualization=1)) == peaks.product_rate(H200.gpu())
    in_slow_host = H200.gpu(virtualization=1, pcie_generation=4, pcie_width=16)
    assert peaks.host_link(in_slow_host).formula == "PCIe 4 x 16 lanes"
    saves_power = H200.gpu(virtualization=1, pcie_generation=1, pcie_width=16)
    assert peaks.host_link(saves_power).formula == "PCIe 3 x 16 lanes"
    with pytest.raises(NoPeak, match="PCIe of generation 1"):
        peaks.host_link(H200.gpu(pcie_generation_max=1))


# ----------------------------------------------------------------
FLOP, BOARD = 4.2e9, H200.machine(4)


def tokens(values):
    return Measurement("token_throughput", values, {"recipe": "bf16"})


def at(share):
    """Tokens/s of one GPU that makes use of such a share of its peak."""
    return share * peaks.product_rate(BOARD.gpus[0]).value * 1e12 / FLOP


def test_it_is_the_share_of_the_peak_of_the_gpus_that_train_and_above_it_is_a_fault():
    places = [gpu.place for gpu in BOARD.gpus]
    (alone,) = peaks.model_flops_utilization(tokens({place: at(0.5) for place in places}), FLOP, BOARD)
    assert [*alone.values] == places
    assert [*alone.values.values()] == pytest.approx([0.5] * 4)
    (together,) = peaks.model_flops_utilization(tokens({WORLD: 4 * at(0.4)}), FLOP, BOARD)
    assert together.values[WORLD] == pytest.approx(0.4)
    assert peaks.model_flops_utilization(tokens({"cpu0": 1000.0}), FLOP, BOARD) == []  # no peak is known
    half = peaks.product_rate(BOARD.gpus[0]).value / 2
    (published,) = peaks.model_flops_utilization(tokens({WORLD: 4 * at(0.4)}), FLOP, BOARD, half)
    assert published.details["by the data sheet"].startswith("80.0%")
    rates = dict.fromkeys(places, at(0.99)) | {places[2]: at(1.01)}
    (fault,) = peaks.above_peak(tokens(rates), FLOP, BOARD)
    assert (fault.name, fault.subjects) == ("implausible_value", (places[2],))

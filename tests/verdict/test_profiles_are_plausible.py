"""A linter for the shipped profiles: could a healthy GPU meet this limit, and could a broken one miss it?

The loader has already refused unknown words, wrong units and missing sources. This holds the figures against the data
sheet, which finds a GB/s that should be Gb/s, a row from another model's table, or a zero too many.
"""

import math

import pytest

from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import METRICS
from pytest_gpufleet.verdict import toml_table
from pytest_gpufleet.verdict.profile import load, shipped

# GB/s in one direction, 16 lanes, after the encoding of the line (8b/10b up to generation 2, 128b/130b from 3 on).
PCIE = {3: 15.75, 4: 31.5, 5: 63.0}
# ResNet-50, an image forward and backward: arithmetic, and memory traffic with 16-bit activations and all operations
# fused that can be. With 32 bits it is twice that.
FLOP, BYTES = 24.3e9, 331e6
PEAKS = {"fp32": "peak_tflops_fp32", "tf32": "peak_tflops_tf32"}  # all other recipes compute with 16 bits
LOWEST, LONGEST = 0.1, 200.0  # of the peak; microseconds
LEAST, MOST = 0.75, 0.99  # of a healthy figure

# Without these a limit would hold for something that it was not made for: an 8-byte message, a link of another kind.
NEEDED = {
    "busbw": {"collective", "bytes", "dtype", "ranks"},
    "node_group_busbw": {"collective", "bytes", "dtype", "ranks", "nodes", "network"},
    "collective_latency": {"collective", "bytes", "ranks", "method"},
    "gemm": {"precision"},
    "host_bandwidth": {"direction", "at_once"},
    "pair_bandwidth": {"direction", "link"},
    "train_throughput": {"model", "recipe", "ranks"},
    "solo_train_throughput": {"model", "recipe", "ranks"},
}


def lint(profile):
    """What is wrong with a profile, a sentence each."""
    text = profile.path.read_text(encoding="utf-8").split("\n")
    tables = toml_table.read(profile.path).tables("limit")
    problems = []
    for limit, table in zip(profile.limits, tables, strict=True):
        noted = text[table.line() - 2].startswith("#")
        problems += [f"{table.place()}: {limit.metric} {limit}: {what}" for what in complaints(profile, limit, noted)]
    return problems


def complaints(profile, limit, noted):
    inside = limit.conditions.get("domain") == "inside"  # over NVLink
    between = {"network"} if "nodes" in limit.conditions and not inside else set()
    if missing := (NEEDED.get(limit.metric, set()) | between) - limit.conditions.keys():
        yield f"it does not say for which {', '.join(sorted(missing))}"
        return
    if not (limit.reference or limit).date:
        yield "has no date"
    if limit.measured and not LEAST <= better(limit) <= MOST:
        yield f"is {better(limit):.0%} of the healthy figure {limit.measured:g}"
    if limit.sense == "max":
        if limit.unit == "us" and limit.value > LONGEST:
            yield f"is above {LONGEST} us"
        return
    peak = peak_of(profile.facts, limit)
    if peak is None:
        yield "the facts have no peak to hold it against"
    elif limit.value > peak:
        yield f"is above the peak of {peak:g}"
    elif limit.value < LOWEST * peak < math.inf and not noted:
        yield f"is under a tenth of the peak of {peak:g}, and no comment says why"


def better(limit):
    """The part of the healthy figure that a limit asks for."""
    return limit.value / limit.measured if limit.sense == "min" else limit.measured / limit.value


def peak_of(facts, limit):
    """What the data sheet allows, in the unit of the limit; infinite where it says nothing; None for a missing fact."""
    when, hbm = limit.conditions, facts.get("hbm_terabytes_per_second")
    both = 2 if when.get("direction") == "both" else 1
    link = facts.get("nvlink_gigabytes_per_second")
    match limit.metric:
        case "gemm" | "gemm_full_clock":
            return facts.get(f"peak_tflops_{when['precision']}")
        case "memory_bandwidth":
            return hbm and 1000 * hbm
        case "pair_bandwidth" if when["link"] == "NVLink":
            return link and both * link
        case "host_bandwidth" | "pair_bandwidth":
            return both * PCIE[facts["pcie_generation"]] if "pcie_generation" in facts else math.inf
        case "busbw" | "node_group_busbw":
            ranks = when["ranks"]
            # With NVLS a GPU sends 1 + 1/n of the message instead of 2(n-1)/n, which is what busbw counts.
            return link and link * (2 * (ranks - 1) / (ranks + 1) if when.get("nvls") else 1)
        case "train_throughput" | "solo_train_throughput":
            flops = facts.get(PEAKS.get(when["recipe"], "peak_tflops_fp16"))
            wide = 2 if when["recipe"] in PEAKS else 1
            return flops and hbm and when["ranks"] * min(flops * 1e12 / FLOP, hbm * 1e12 / (wide * BYTES))
        case _:
            return 1.0 if METRICS[limit.metric].unit == "ratio" else None


@pytest.mark.parametrize("profile", [*shipped(), shipped()[0].base], ids=lambda profile: profile.path.stem)
def test_the_shipped_limits_are_plausible(profile):
    assert lint(profile) == []


def test_no_gpu_has_two_profiles():
    names = [name for profile in shipped() for name in profile.match]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("profile", shipped(), ids=lambda profile: profile.path.stem)
def test_gpus_together_are_not_asked_for_more_than_each_alone(profile):
    together = [
        limit for limit in profile.limits if limit.metric == "train_throughput" and limit.conditions["ranks"] > 1
    ]
    for limit in together:
        conditions = {**limit.conditions, "ranks": 1}
        alone = profile.limit_for(Measurement("train_throughput", {"world": 1.0}, conditions))
        assert limit.value / limit.conditions["ranks"] < 1.05 * alone.value


CARD = """
name = "Card"
match = ["Card"]
[facts]
pcie_generation = 4
hbm_terabytes_per_second = 2.0
nvlink_gigabytes_per_second = 300
peak_tflops_fp16 = 312
"""
BUSBW = "collective = 'all_reduce', bytes = 8, dtype = 'float32', ranks = 8"
LATENCY = f"{BUSBW}, method = 'replayed'"


@pytest.mark.parametrize(
    ("metric", "value", "when", "note", "problem"),
    [
        ("gemm", 313, "precision = 'fp16'", "", "above the peak of 312"),
        ("gemm", 31, "precision = 'fp16'", "", "under a tenth of the peak of 312"),
        ("gemm", 31, "precision = 'fp16'", "# Held back by its 70 W.", None),
        ("gemm", 32, "precision = 'fp8'", "", "no peak to hold it against"),
        ("gemm", 32, "", "", "does not say for which precision"),
        ("gemm", 313, "precision = 'fp16'", "reference", "above the peak of 312"),
        ("gemm", 300, "precision = 'fp16'", "reference", None),
        ("gemm", 300, "precision = 'fp16'", "undated", "has no date"),
        ("memory_bandwidth", 2001, "", "", "above the peak of 2000"),
        ("memory_bandwidth", 1800, "", "measured = 2000", None),
        ("memory_bandwidth", 1400, "", "measured = 2000", "70% of the healthy figure 2000"),
        ("collective_latency", 55, LATENCY, "measured = 50", None),
        ("collective_latency", 45, LATENCY, "measured = 50", "111% of the healthy figure 50"),
        ("host_bandwidth", 32, "direction = 'host to device', at_once = 'one'", "", "above the peak of 31.5"),
        ("host_bandwidth", 32, "direction = 'both', at_once = 'one'", "", None),
        ("pair_bandwidth", 301, "direction = 'read', link = 'NVLink'", "", "above the peak of 300"),
        ("pair_bandwidth", 32, "direction = 'read', link = 'PIX'", "", "above the peak of 31.5"),
        ("busbw", 301, BUSBW, "", "above the peak of 300"),
        ("busbw", 301, f"{BUSBW}, nvls = true", "", None),
        ("busbw", 100, "collective = 'all_reduce', ranks = 8", "", "for which bytes, dtype"),
        ("busbw", 200, f"{BUSBW}, nodes = 2", "", "for which network"),
        ("node_group_busbw", 200, f"{BUSBW}, network = 400", "", "for which nodes"),
        ("collective_latency", 60000, LATENCY, "", "above 200"),  # ns instead of us
        ("train_throughput", 6043, "model = 'resnet50', recipe = 'amp', ranks = 1", "", "above the peak of 6042"),
        ("train_throughput", 6043, "model = 'resnet50', recipe = 'amp', ranks = 8", "", None),
    ],
)
def test_the_linter_finds_what_is_not_plausible(tmp_path, metric, value, when, note, problem):
    definition = METRICS[metric]
    sense = note if note == "reference" else "min" if definition.better == "higher" else "max"
    made = note if note.startswith("measured") else ""  # the healthy figure that it was made from
    comment = note if note.startswith("#") else ""
    limit = f'{comment}\n[[limit]]\nmetric = "{metric}"\n{sense} = {value}\nunit = "{definition.unit}"\n'
    dated = "" if note == "undated" else 'date = "2026"'
    rest = f'grade = "project"\nsource = "somebody"\n{dated}\n{made}\nwhen = {{ {when} }}\n'
    path = tmp_path / "card.toml"
    path.write_text(CARD + limit + rest, encoding="utf-8")
    found = lint(load(path))
    assert len(found) == bool(problem)
    assert (problem or "") in "".join(found)

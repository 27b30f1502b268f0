"""The tables of figures, the matrices of pairs, and training by the number of GPUs; and figures as broken machines and
broken probes make them, which do not cost the report."""

import math
import re
import time
from dataclasses import replace
from itertools import cycle

import pytest

from pytest_gpufleet.model.conditions import EACH_ALONE
from pytest_gpufleet.model.events import Check, RunHeader
from pytest_gpufleet.model.finding import Finding, Limit
from pytest_gpufleet.model.language import in_language
from pytest_gpufleet.model.metric import GiB, Measurement, MiB, Sample
from pytest_gpufleet.model.place import WORLD, Pair, Place, gpu, read as read_place
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import several_runs, wording
from pytest_gpufleet.report.figures import EPOCH_IMAGES, figure_tables, heat_tables, training_tables
from pytest_gpufleet.report.page import MOST_FAILURES, MOST_FIGURES, MOST_ROWS, page as html_of
from pytest_gpufleet.report.plots import curves, telemetry as drawn_telemetry
from pytest_gpufleet.report.terminal.summary_lines import summary_lines
from pytest_gpufleet.verdict.across_runs.run_comparison import compare, drift
from pytest_gpufleet.verdict.judgement import measured_again
from tests.report.conftest import page_of


def figures(values, metric="gemm", **conditions):
    return Finding("a.py::b", Measurement(metric, values, conditions), "for information")


def test_a_figure_without_a_limit_stands_apart_but_where_it_is_held_against_its_peers(accepted):
    some = [finding for finding in accepted.findings if finding.measurement.metric == "gemm"]
    some = [replace(each, limit=None, state="for information") for each in some]
    (table,) = figure_tables([replace(each, slower_than_peers=None) for each in some], {})
    assert [row.name for row in table.rows if not row.for_information] == ["bf16"]  # which somebody has to have
    assert {row.cells[-1].text for row in table.rows if row.for_information} == {"for information"}
    (table,) = figure_tables(some, {})
    limit, *_, state = next(row for row in table.rows if row.name.startswith("fp32")).cells[-3:]
    (held,) = next(each for each in some if each.measurement.conditions["precision"] == "fp32").tolerances
    worse = f"at most {wording.percent(held.worse)} worse"
    assert (limit.text, limit.below, state.text) == ("peers", worse, "consistent with peers")
    assert not any(row.for_information for row in table.rows)
    (table,) = figure_tables([measured_again(replace(each, state="missed"), "it missed") for each in some], {})
    assert {row.cells[-1].text for row in table.rows} == {"for information"}  # whether required or not


def test_a_method_that_all_figures_share_stands_in_the_caption():
    small = {"collective": "reduce", "method": "replayed"}
    latencies = [figures({"world": 9.0}, "collective_latency", bytes=8 << step, **small) for step in range(3)]
    assert [table.notes[1] for table in figure_tables(latencies, {})] == ["in a CUDA graph"]
    products = [figures({"gpu0": 1.0, "gpu1": 1.0}, precision=name, method="one window") for name in ("fp64", "fp8")]
    (table,) = figure_tables(products, {})
    assert (table.notes[1], [row.name for row in table.rows]) == ("one window", ["fp64", "fp8"])


def test_value_that_rounds_to_its_limit_is_told_apart(bad_gpu):
    finding = next(finding for finding in bad_gpu.findings if finding.missed == (WORLD,))
    near = replace(finding.measurement, values={"world": 286.6499}, samples={})
    limit = replace(finding.limit, value=286.65, reference=None)
    ((row,),) = (table.rows for table in figure_tables([replace(finding, measurement=near, limit=limit)], {}))
    assert (row.cells[0].text, row.cells[1].text) == ("286.6499", "≥ 286.65")


def test_every_form_takes_what_is_missing():
    some = [
        figures({"gpu0": 1.0, "gpu1": 2.0}, precision="fp16"),
        figures({"gpu1": float("nan"), "gpu2": 2.0}, precision="bf16"),
        *(figures({"world": 3.0}, "busbw", bytes=size * MiB) for size in (1, 2, 4)),
        figures({"world": 3.0}, "busbw", bytes=MiB, collective="reduce"),
        figures({}, "busbw"),
    ]
    gemm, busbw = figure_tables(some, {})[1], figure_tables(some, {})[0]
    assert [cell.text for cell in gemm.rows[1].cells[:3]] == ["", "not a number", "2"]
    assert [cell.text for cell in busbw.rows[1].cells[:3]] == ["3", "", ""]
    (pairs,) = figure_tables([figures({"gpu0-gpu1": 400.0, "gpu1-gpu0": float("nan")})], {})
    assert [cell.text for cell in pairs.rows[0].cells[:2]] == ["not a number", "GPU 1 to GPU 0, worst of 2"]


def test_what_is_too_wide_for_a_page_becomes_several_tables():
    some = [figures({f"gpu{index}": 1.0 for index in range(16)}), figures({"gpu3": 2.0, "gpu12": 2.0})]
    some += [figures({"world": 3.0}, "busbw", bytes=8 << step) for step in range(25)]
    *sizes, low, high = figure_tables(some, {})
    ends = [table.columns[:1] + table.columns[-2:-1] for table in sizes]
    assert ends == [("8 B", "1 KiB"), ("2 KiB", "256 KiB"), ("512 KiB", "128 MiB")]
    assert low.columns[:8] == tuple(f"GPU {index}" for index in range(8))
    assert high.columns[:8] == tuple(f"GPU {index}" for index in range(8, 16))
    assert [cell.text for cell in high.rows[1].cells[:6]] == ["", "", "", "", "2", ""]


def test_of_a_figure_measured_twice_the_judged_one_counts(accepted):
    judged = [finding for finding in accepted.findings if finding.measurement.metric == "busbw"]
    again = [replace(each, state="for information", limit=None, missed=(), required=False) for each in judged]
    expected = figure_tables(judged, {})
    assert figure_tables([*judged, *again], {}) == figure_tables([*again, *judged], {}) == expected
    assert curves([*judged, *again]) == curves(judged)


def test_matrix_of_pairs_shows_numbers_heat_and_what_missed(bad_gpu):
    read = next(matrix for matrix in heat_tables(bad_gpu.findings) if matrix.note.startswith("read"))
    assert read.columns == tuple(f"GPU {index}" for index in range(4))
    for row, line in enumerate(read.rows):
        for column, cell in enumerate(line.cells):
            assert (cell.state == "missed") == (row != column and 2 in (row, column))
            assert cell.heat is None if row == column else (cell.heat < 60) == (cell.state == "missed")
    page = page_of("BAD GPU")
    shown = page.table("Bandwidth between two GPUs, GB/s").row("GPU 0")
    assert shown["GPU 2"].startswith("✗")
    assert 390 < float(shown["GPU 1"]) < 400


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0])
def test_matrix_of_broken_figures_and_of_one_direction(value):
    (matrix,) = heat_tables([figures({"gpu0-gpu1": value, "gpu0-gpu10": 5.0}, "pair_bandwidth")])
    assert matrix.columns == ("GPU 0", "GPU 1", "GPU 10")
    assert [cell.text for cell in matrix.rows[2].cells] == ["5", "", ""]  # measured once, for both directions
    assert heat_tables([figures({"gpu0": 1.0})]) == []
    values = {"gpu0-gpu1": math.inf, "gpu0-gpu2": 400.0, "gpu1-gpu2": 200.0}
    (matrix,) = heat_tables([figures(values, "pair_bandwidth")])
    assert [(cell.text, cell.heat) for cell in matrix.rows[0].cells[1:]] == [("inf", 100), ("400", 100)]
    assert (matrix.rows[1].cells[2].heat, matrix.foot[:11]) == (50, "200 to inf;")


def test_rails_of_nodes_are_a_table_with_a_row_a_node_and_a_column_a_rail():
    values = {"rail0": 48.0, "rail1": 47.0, "node1/rail0": 46.0, "node1/rail1": 24.0}
    (table,) = heat_tables([replace(figures(values), missed=(read_place("node1/rail1"),))], {0: "gf1", 1: "gf2"})
    assert table.columns == ("rail 0", "rail 1")
    assert [row.name for row in table.rows] == ["gf1", "gf2"]
    assert [[cell.state for cell in row.cells] for row in table.rows] == [["", ""], ["", "missed"]]
    assert figure_tables([figures(values)], {}, {0: "gf1", 1: "gf2"})[0].columns[:2] == ("Measured", "Where")


def test_few_pairs_of_many_nodes_stand_beside_each_node_the_lowest_first():
    names = {node: f"n{node}" for node in range(60)}
    pairs = {Pair(Place(node, "node"), Place(node + 1, "node")): 400.0 - node for node in range(59)}
    measured = replace(figures({"gpu0": 1.0}).measurement, values=pairs)
    tables = heat_tables([replace(figures({"gpu0": 1.0}), measurement=measured)], names)
    assert [len(table.rows) for table in tables] == [25, 25, 10]
    first, *_ = tables
    assert first.rows[1].cells[0].below == "with n2"
    assert [[cell.text for cell in row.cells] for row in first.rows[:2]] == [["400", ""], ["399", "400"]]


@pytest.mark.parametrize(
    ("state", "why"), [("for information", "at 1 MiB, not judged"), ("missed", "at 1 MiB, above 5 %")]
)
def test_spread_says_of_which_figure_and_why_it_may_be_so_wide(state, why):
    samples = {MiB: (10.0, 12.0, 10.0), 2 * MiB: (10.0, 10.0, 10.1), 4 * MiB: (10.0, 10.0, 10.0)}
    curve = {size: figures({"world": 10.0}, "busbw", bytes=size).measurement for size in samples}
    made = {size: replace(one, samples={WORLD: samples[size]}) for size, one in curve.items()}
    points = [Finding("a.py::b", one, state if size == MiB else "met") for size, one in made.items()]
    (table,) = figure_tables(points, {})
    assert (table.rows[0].cells[-1].text, table.rows[0].cells[-1].below) == ("20 % (n=3)", why)


WORK = {"model": "resnet50", "recipe": "amp", "image": 224}


def finding(metric, value, **conditions):
    values = {gpu(index): value for index in range(8)} if metric == "solo_train_throughput" else {WORLD: value}
    return Finding("a", Measurement(metric, values, {**WORK, **conditions}), "for information")


def cells(table):
    return {row.name: [f"{cell.text} {cell.below}".rstrip() for cell in row.cells] for row in table.rows}


def swept(batch, alone, accumulated=None, **rates):
    conditions = {"batch": batch, "workload": "sweep", **({"accumulated": accumulated} if accumulated else {})}
    found = [finding("solo_train_throughput", alone, ranks=1, **conditions)]
    for name, rate in rates.items():
        ranks = int(name[1:])
        share, apart = rate / ranks / (alone or 1), {"ranks": ranks, "method": EACH_ALONE, **conditions}
        found += [
            finding("train_throughput", rate, ranks=ranks, **conditions),
            finding("scaling_efficiency", share, **apart),
        ]
    return found


@pytest.mark.parametrize(("found", "columns", "rows"), [
    (  # The figures are those of the earlier suite: docs/earlier-suite.md.
        [*swept(128, 753.0, n8=4630.0), *swept(64, 778.0, n2=1400.0, n8=2657.0)],
        ("1 GPU", "2 GPUs", "8 GPUs", "Epoch of ImageNet"),
        {"batch 64": ["778", "1,400 90 %", "2,657 42.7 %", "8 min 2 s"],
         "batch 128": ["753", "", "4,630 76.9 %", "4 min 37 s"]},
    ),
    (
        [*swept(64, 702.0, accumulated=2), *swept(64, 701.0, accumulated=1), *swept(64, 710.0, accumulated=10)],
        ("1 GPU", "Epoch of ImageNet"),
        {"1 batch a step": ["701", "30 min 28 s"], "2 batches a step": ["702", "30 min 25 s"],
         "10 batches a step": ["710", "30 min 4 s"]},
    ),
    (
        [finding("train_throughput", 6000.0, ranks=8, batch=256),
         finding("scaling_efficiency", 0.96, ranks=8, batch=256, method=EACH_ALONE),
         finding("loader_throughput", 3000.0, ranks=8, batch=256)],
        ("1 GPU", "8 GPUs", "Epoch of ImageNet"),
        {"images that stay on the GPU": ["", "6,000 96 %", "3 min 34 s"],
         "fed by a data loader": ["", "3,000", "7 min 7 s"]},
    ),
], ids=["batches", "accumulated gradients", "a loader"])  # fmt: skip
def test_a_row_for_each_way_to_train_and_a_column_for_each_number_of_gpus(found, columns, rows):
    (table,) = training_tables(found)
    assert (table.columns, [*cells(table).items()]) == (columns, [*rows.items()])
    assert round(EPOCH_IMAGES / 2657) == 8 * 60 + 2


def test_methods_are_held_against_the_same_gpus_alone_and_have_their_memory():
    found = swept(64, 425.0)
    for method, rate, memory in (("dp", 1205.0, (25.0, 11.0)), ("ddp", 1598.0, (12.0, 12.0))):
        conditions = {"ranks": 4, "batch": 64, "workload": "sweep", "method": method}
        used = Measurement("train_memory", {gpu(at): gib for at, gib in enumerate(memory)}, {**WORK, **conditions})
        found.append(finding("train_throughput", rate, **conditions))
        found.append(finding("scaling_efficiency", rate / 1700, **conditions))
        found.append(Finding("a", used, "for information"))
    (table,) = training_tables(found)
    assert table.title == "Training by method, batch, accumulated gradients and number of GPUs"
    assert table.columns == ("1 GPU", "4 GPUs", "GPU memory", "Epoch of ImageNet")
    assert cells(table) == {
        "DataParallel": ["425", "1,205 70.9 %", "11 to 25 GiB", "17 min 43 s"],
        "DDP": ["425", "1,598 94 %", "12 GiB", "13 min 22 s"],
    }


def test_nothing_without_an_efficiency_and_in_chinese_no_english_word_of_a_condition():
    assert training_tables([finding("train_throughput", 100.0, ranks=8, batch=64)]) == []
    (table,) = training_tables(swept(64, 0.0, n8=0.0))
    assert table.rows[0].cells[-1].text == ""
    with in_language("zh"):
        (table,) = training_tables([*swept(64, 700.0, accumulated=1), *swept(64, 750.0, accumulated=2)])
    assert not any("batches a step" in row.name for row in table.rows)
    assert "pixels" not in table.notes[1]


def trained(alone, together, share, ranks=4):
    each = {gpu(index): rate for index, rate in enumerate(alone)}
    figures = (
        Measurement("solo_train_throughput", each, {**WORK, "batch": 256, "ranks": 1}),
        Measurement("train_throughput", {WORLD: together}, {**WORK, "batch": 256, "ranks": ranks}),
        Measurement("communication_share", {WORLD: share}, {**WORK, "batch": 256, "ranks": ranks}),
    )
    return [Finding("a", figure, "for information") for figure in figures]


@pytest.mark.parametrize(("figures", "expected", "slowest"), [
    (trained([100.0] * 4, 360.0, 0.1), ["90 %", "10 %", "0 %", "0 %"], 0),
    (trained([100.0, 100.0, 60.0, 100.0], 240.0, 0.0), ["66.7 %", "0 %", "33.3 %", "0 %"], 2),
    (trained([100.0] * 4, 200.0, 0.0), ["50 %", "0 %", "0 %", "50 %"], 0),  # nothing explains it
    # And nothing is derived of figures that lack, or cannot be.
    (trained([100.0] * 4, 360.0, 0.1)[:2], None, 0), (trained([0.0] * 4, 0.0, 0.1), None, 0),
    (trained([100.0] * 4, 360.0, float("nan")), None, 0), (trained([100.0] * 4, 360.0, 1.0), None, 0),
    (trained([100.0] * 2, 360.0, 0.1), None, 0),
])  # fmt: skip
def test_efficiency_is_lost_to_gradients_to_a_slow_gpu_or_to_what_nothing_explains(figures, expected, slowest):
    rows = [[(cell.text, cell.below) for cell in row.cells] for table in training_tables(figures) for row in table.rows]
    below = ["", "", f"of GPU {slowest}", ""]
    assert rows == ([[*zip(expected, below, strict=True)]] if expected else [])


def many(count):
    """A record of so many findings of each kind: of a curve, of GPUs, missed by checks and by cases, not judged."""
    made = {
        "size": lambda at: figures({"world": 1.0 + at}, "busbw", bytes=8 * at + 8),
        "gpus": lambda at: figures({"gpu0": 1.0, "gpu1": 2.0}, n=at),
        "missed": lambda at: replace(figures({"gpu0": 1.0, "gpu1": at}), check=f"a.py::{at}", state="missed"),
        "case": lambda at: replace(figures({"gpu0": 1.5, "gpu1": at}), check=f"a.py::c[{at}]", state="missed"),
        "open": lambda at: replace(figures({"gpu0": 1.0, "gpu1": at}), state="not judged", reason=f"why {at}"),
    }
    return Record(findings=[make(at) for make in made.values() for at in range(count)], verdict="REJECTED")


def test_what_nobody_could_read_is_counted_and_takes_no_longer_than_its_length():
    def drawn(record):
        began = time.process_time()
        return html_of(record), time.process_time() - began

    lots = many(2000)
    (_, of_few), (page, of_lots) = drawn(many(200)), drawn(lots)
    assert page.count("<tr") < MOST_FIGURES + 4 * MOST_ROWS + MOST_FAILURES * 2
    left_out = {int(told) for told in re.findall(r"<p>([\d,]+) more are in evidence.jsonl alone", page)}
    assert left_out > {len(lots.findings) - MOST_FIGURES, 2001 - MOST_FAILURES}
    assert "more are in" not in html_of(many(20))
    assert of_lots < 30 * of_few  # 100 times as long where it grows with the square
    lines = [text for text, _ in summary_lines(lots)]
    assert len(lines) < 1000
    assert any("more, which are in evidence.jsonl" in line for line in lines)


NASTY = (math.inf, -math.inf, math.nan, 1e308, -1e308, 5e-324, 0.0, -0.0, -1.0, 400.0)
PLACES = ("gpu0", "gpu1", "gpu2")


def of_every_form(values):
    """Every form that figures have in the report, all of them filled from `values`."""
    ways = [{**WORK, "method": method} for method in ("ddp", "fsdp")]
    forms = {
        "gemm": (PLACES, [{"precision": "fp16"}]),
        "pair_bandwidth": (("gpu0-gpu1", "gpu0-gpu2", "gpu1-gpu2"), [{"direction": "both"}]),
        "scaling_efficiency": (("world",), [{"ranks": 2}, *ways]),
        "busbw": (("world",), [{"collective": "all_reduce", "bytes": size} for size in (MiB, GiB, 8 * GiB)]),
        "train_throughput": (("world",), [*({**WORK, "ranks": count} for count in (1, 2, 4)), *ways]),
        "train_memory": (PLACES, ways),
    }
    found = []
    for state in ("met", "missed"):
        for metric, (places, every) in forms.items():
            for conditions in every:
                samples = {read_place(place): (1.0, next(values)) for place in places}
                measured = Measurement(metric, {place: next(values) for place in places}, conditions, samples)
                limit = Limit(metric, "min", next(values), measured.unit, "calibrated", "a run", {}, "x.toml")
                first = read_place(places[0])
                slower = {first: next(values)} if state == "missed" else None
                found.append(Finding("a.py::b", measured, state, limit, (first,), slower))
    return found


@pytest.mark.parametrize("values", [*((value,) for value in NASTY), NASTY, NASTY[::-3], NASTY[::7]])
def test_figures_of_broken_machines_can_be_shown_everywhere(values):
    endless = cycle(values)
    telemetry = [Sample(float(at), tuple({"power_watts": next(endless)} for _ in PLACES)) for at in range(4)]
    record = Record(
        run=RunHeader(host="x"), findings=of_every_form(endless), verdict="REJECTED", telemetry=telemetry,
        checks={"a.py::b": Check("a.py::b", "failed", 1.0, message="it missed")},
    )  # fmt: skip
    assert "fleet-verdict" in html_of(record)
    assert drawn_telemetry(telemetry, [read_place(place) for place in PLACES], []) is not None
    assert summary_lines(record)
    runs = {"one": record, "other": record}
    assert several_runs.page(compare(runs))
    assert several_runs.page(drift(runs))

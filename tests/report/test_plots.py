"""The drawings: that they are drawn when there is something to draw, small, readable and always the same."""

import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.measurement import Measurement, Sample
from pytest_gpufleet.model.place import WORLD, gpu
from pytest_gpufleet.report.plots.canvas import ticks
from pytest_gpufleet.report.plots.figure_plots import curves, draw, training_plot
from pytest_gpufleet.report.plots.telemetry_plots import QUANTITIES, svgs
from pytest_gpufleet.verdict.reading import read
from tests.commands.test_monitor import READING
from tests.conftest import EVIDENCE


def words_in(svg):
    return {"".join(each.itertext()).strip() for each in ElementTree.fromstring(svg).iter() if "text" in each.tag}


def by_caption(drawn):
    assert len(dict(drawn)) == len(drawn)
    return dict(drawn)


def test_curves_have_a_panel_a_collective_with_limits_and_what_was_published(standard):
    drawn = by_caption(curves(standard.findings))
    assert [*drawn] == ["Bus bandwidth against message size", "Latency of a collective against message size"]
    bandwidth = drawn["Bus bandwidth against message size"]
    panels = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "sendrecv", "gather", "scatter"}
    assert panels | {"limit", "published for a healthy machine", "1\u2009MiB", "4\u2009GiB"} <= words_in(bandwidth)
    assert "published for a healthy machine" not in words_in(drawn["Latency of a collective against message size"])


def test_a_curve_is_one_line_whether_graphs_or_launches_made_its_points():
    def finding(nbytes, **how):
        conditions = {"collective": "all_reduce", "bytes": nbytes, "ranks": 8, **how}
        return Finding("a", Measurement("busbw", {WORLD: 1.0 + nbytes}, conditions), "for information")

    from_graphs = [finding(8 << step, method="replayed") for step in range(3)]
    launched = [finding(4 << 20 << step) for step in range(3)]
    ((_, svg),) = curves([*from_graphs, *launched])
    assert not {"in a CUDA graph", "launched one by one", "measured"} & words_in(svg)  # a legend tells lines apart
    assert "16\u2009MiB" in words_in(svg)


def test_training_has_its_share_of_each_gpu_alone_and_a_panel_for_each_thing_that_differs(standard):
    ((_, svg),) = training_plot(standard.findings)
    words = words_in(svg)
    (amp,) = (
        each.measurement.values[WORLD]
        for each in standard.findings
        if (each.measurement.metric, each.measurement.conditions.get("recipe")) == ("scaling_efficiency", "amp")
    )
    assert {"recipe", "fp32", "tf32", "amp", "peak", f"{100 * amp:.3g} %"} <= words
    assert {"method", "DataParallel", "DDP", "FSDP", "batch of each GPU", "1,024", "batches a step", "8"} <= words
    assert {"1 GPU", "2 GPUs", "8 GPUs", "images/s a GPU"} <= words
    one = [f for f in standard.findings if f.measurement.conditions.get("method") in (None, "fsdp")]
    assert "method" not in words_in(training_plot(one)[0][1])
    before = read(EVIDENCE / "h200x4-b" / "evidence.jsonl").findings  # of one recipe
    ((_, svg),) = training_plot([each for each in before if each.measurement.conditions.get("recipe") == "amp"])
    assert {"amp", "1 GPU", "2 GPUs", "4 GPUs"} <= words_in(svg)


def assert_well_drawn(drawn):
    """Described, readable in dark mode and on paper, and so that no id is in two of them."""
    ids = [each for _, svg in drawn for each in set(re.findall(r'\bid="([^"]+)"', svg))]
    assert len(ids) == len(set(ids))
    for caption, svg in drawn:
        assert svg.startswith(f'<svg role="img" aria-label="{caption}')
        assert ("currentColor" in svg, "#ffffff" in svg) == (True, False)
        assert set(re.findall(r"url\(#([^)]+)\)", svg)) <= set(re.findall(r'\bid="([^"]+)"', svg))


def test_drawings_are_small_and_repeatable(bad_gpu):
    some = [each for each in bad_gpu.findings if each.measurement.metric in ("gemm", "busbw", "train_throughput")]
    drawn = draw(some)
    assert drawn == draw(some)
    assert max(len(svg) for _, svg in drawn) < 150_000
    assert_well_drawn(drawn)


def test_ticks_of_sizes_that_lie_close_do_not_overlap():
    batches = [16, 32, 64, 128, 256, 512, 1024, 2048, 2361, 2518]
    chosen = ticks(batches, 5)
    assert chosen[0] == 2518
    assert len(chosen) == 4
    assert all(after * 2 <= before for before, after in pairwise(chosen))
    assert ticks([64], 5) == [64]


@pytest.mark.parametrize("plot", [curves, training_plot, draw])
def test_nothing_to_draw_draws_nothing(plot):
    assert plot([]) == []
    nan = float("nan")
    broken = [
        Finding("a", Measurement(metric, {place: nan}, {"bytes": 8 << step, "ranks": step}), "not judged")
        for metric in ("busbw", "train_throughput")
        for place in ("world", "gpu0")
        for step in range(1, 5)
    ]
    assert plot(broken) == []


START = 1795166043.0  # 09:14:03 UTC
PLACES = [gpu(index) for index in range(8)]
TITLES = [quantity.title for quantity in QUANTITIES]


def at_gpu(sample, index, read):
    return replace(sample, gpus=(*sample.gpus[:index], read, *sample.gpus[index + 1 :]))


def samples(count, **changes):
    return [Sample(START + second, ({**READING, **changes},) * len(PLACES)) for second in range(count)]


def checks(files, each, length):
    step = length / files / each
    ids = [f"acceptance/test_{file}_part.py::test_it[{n}]" for file in range(files) for n in range(each)]
    return [(name, START + index * step, START + (index + 1) * step) for index, name in enumerate(ids)]


def test_a_plot_for_each_quantity_with_a_line_for_each_gpu_and_the_files_of_tests():
    drawn = svgs(samples(301), PLACES, checks(7, 12, 300))
    assert [title for title, _ in drawn] == TITLES
    for _, svg in drawn:
        words = words_in(svg)
        assert {f"GPU {index}" for index in range(8)} <= words
        assert sorted(word for word in words if word.endswith("part")) == [f"{file} part" for file in range(7)]
        assert {"0:00", "5:00", "minutes:seconds since 09:14:03 UTC"} <= words
    assert_well_drawn(drawn)
    assert drawn[0] == svgs(samples(301), PLACES, checks(7, 12, 300))[0]  # whenever it is drawn
    labels = [svg.split('"')[3] for _, svg in drawn]
    assert labels[1] == "GPU memory used of 8 GPUs over 5:00 (minutes:seconds): 113 GiB to 113 GiB"


def test_a_long_run_stays_small_and_keeps_its_peaks():
    run = [Sample(START + at, ({"power_watts": 600 + at % 7},) * len(PLACES)) for at in range(40_000)]
    run[12_345] = at_gpu(run[12_345], 5, {"power_watts": 699})
    run[23_456] = at_gpu(run[23_456], 2, {"power_watts": 88})
    svg = dict(svgs(run, PLACES, []))["Power"]
    assert ": 88 W to 699 W" in svg.split('"')[3]
    assert max(path.count("L") for path in re.findall(r' d="([^"]+)"', svg)) <= 600
    assert len(svg) < 250_000
    assert "hours:minutes since 09:14:03 UTC" in words_in(svg)


def test_what_no_gpu_gave_has_no_plot_a_gap_breaks_the_line_and_a_lone_value_is_seen():
    run = samples(12, memory_temperature_c=None)
    assert [title for title, _ in svgs(run, PLACES, [])] == [title for title in TITLES if title != TITLES[3]]
    whole = longest_path(dict(svgs(run, PLACES[:1], []))["Power"])
    for second in range(3, 8):
        run[second] = at_gpu(run[second], 0, dict.fromkeys(READING))
    run[11] = replace(run[11], gpus=())
    broken = longest_path(dict(svgs(run, PLACES[:1], []))["Power"])
    assert (whole.count("M"), broken.count("M")) == (1, 2)
    run = samples(40)
    with_gap = [*run[:10], *run[20:]]  # ten seconds in which nobody looked
    run[11], run[13] = at_gpu(run[11], 0, {}), at_gpu(run[13], 0, {})  # what is between them stands alone
    assert longest_path(dict(svgs(with_gap, PLACES[:1], []))["Power"]).count("M") == 2
    assert longest_path(dict(svgs(run, PLACES[:1], []))["Power"]).count("M") == 3


def longest_path(svg):
    return max(re.findall(r' d="([^"]+)"', svg), key=lambda path: (path.count("M"), len(path)))


def test_a_clock_that_was_set_back_during_the_run():
    run = samples(20)
    run[10:] = [replace(sample, time=sample.time - 3600) for sample in run[10:]]
    drawn = svgs(run, PLACES, checks(3, 2, 19))
    assert [title for title, _ in drawn] == TITLES
    assert " over 0:09 (minutes:seconds)" in drawn[0][1].split('"')[3]
    for too_little in ([run[0], *run[10:]], run[:1], []):  # in the first no time has passed
        assert svgs(too_little, PLACES, checks(3, 2, 19)) == []


def test_any_group_can_be_named_and_of_too_many_the_longest_are():
    many = [*checks(90, 1, 290), ("acceptance/test_long_one.py::test_it", START + 290, START + 300)]
    words = words_in(svgs(samples(301), PLACES[:1], many)[0][1])
    assert 20 < len([word for word in words if word.endswith(" part")]) < 40
    assert "Long one" in words
    hostile = "a/test_<b>&$x^2$\x1b[31m.py::test_x", "test_" + "long_" * 30 + ".py", "", "no_python::x"
    run = [(name, START + second, START + second + 1) for second, name in enumerate(hostile)]
    run += [("test_a.py::x", START - 50, START - 1), ("test_b.py::x", START + 900, START + 999)]  # beyond the samples
    words = words_in(svgs(samples(5), [gpu(index) for index in range(16)], run)[0][1])
    assert {"<b>&$x^2$", "Long long lon...", "GPU 15", "A", "B"} <= words
    suite = [(f"acceptance/{file}::test_x", START, START + 4) for file in ("test_2_host.py", "test_4_each_gpu.py")]
    assert {"Host", "Compute"} <= words_in(svgs(samples(5), PLACES, suite)[0][1])  # as the tables call them

"""The drawings: that they are drawn when there is something to draw, small, readable and always the same."""

import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.metric import Measurement, Sample
from pytest_gpufleet.model.place import WORLD, gpu
from pytest_gpufleet.report.plots import CAPTION, QUANTITIES, curves, telemetry, ticks
from tests.commands.test_monitor import READING
from tests.report.test_figures import swept


def words_in(svg):
    return {"".join(each.itertext()).strip() for each in ElementTree.fromstring(svg).iter() if "text" in each.tag}


def by_caption(drawn):
    assert len(dict(drawn)) == len(drawn)
    return dict(drawn)


def test_curves_have_a_panel_a_collective_with_limits_and_what_was_published(accepted):
    drawn = by_caption(curves(accepted.findings))
    assert {*drawn} == {"Bus bandwidth against message size", "Latency of a collective against message size"}
    bandwidth = drawn["Bus bandwidth against message size"]
    panels = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "sendrecv", "gather", "scatter"}
    assert panels | {"limit", "published for a healthy machine", "4\u2009MiB", "8\u2009GiB"} <= words_in(bandwidth)
    assert "published for a healthy machine" not in words_in(drawn["Latency of a collective against message size"])


def test_a_curve_is_one_line_whether_graphs_or_launches_made_its_points():
    def finding(nbytes, **how):
        conditions = {"collective": "all_reduce", "bytes": nbytes, "ranks": 8, **how}
        return Finding("a", Measurement("busbw", {WORLD: 1.0 + nbytes}, conditions), "for information")

    from_graphs = [finding(8 << step, method="replayed") for step in range(3)]
    ((_, svg),) = curves([*from_graphs, *[finding(4 << 20 << step) for step in range(3)]])
    assert not {"in a CUDA graph", "launched one by one", "measured"} & words_in(svg)  # a legend tells lines apart
    assert "16\u2009MiB" in words_in(svg)


def test_the_sweep_is_a_curve_against_the_batch_with_a_line_for_each_number_of_gpus():
    found = [each for batch in (16, 128, 1024) for each in swept(batch, 700.0, accumulated=1, n2=1400.0, n8=4630.0)]
    svg = by_caption(curves(found))["Training throughput against batch of each GPU"]
    assert {"amp", "16", "1,024", "images/s", "batch of each GPU"} <= words_in(svg)
    assert {word for word in words_in(svg) if "ranks" in word} == {"2 ranks", "8 ranks"}


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
    drawn = curves(some)
    assert drawn == curves(some)
    assert max(len(svg) for _, svg in drawn) < 150_000
    assert_well_drawn(drawn)


def test_ticks_of_sizes_that_lie_close_do_not_overlap():
    chosen = ticks([16, 32, 64, 128, 256, 512, 1024, 2048, 2361, 2518], 5)
    assert chosen[0] == 2518
    assert len(chosen) == 4
    assert all(after * 2 <= before for before, after in pairwise(chosen))
    assert ticks([64], 5) == [64]


def test_nothing_to_draw_draws_nothing():
    assert curves([]) == []
    nan = float("nan")
    broken = [
        Finding("a", Measurement(metric, {place: nan}, {"bytes": 8 << step, "ranks": step}), "not judged")
        for metric in ("busbw", "train_throughput")
        for place in ("world", "gpu0")
        for step in range(1, 5)
    ]
    assert curves(broken) == []


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


def panels_of(svg):
    return [each.title for each in QUANTITIES if f"{each.title}, {each.unit}" in words_in(svg)]


def test_a_panel_for_each_quantity_with_a_line_for_each_gpu_and_the_files_of_tests():
    svg = telemetry(samples(301), PLACES, checks(7, 12, 300))
    assert panels_of(svg) == TITLES
    words = words_in(svg)
    assert {f"GPU {index}" for index in range(8)} <= words
    assert sorted(word for word in words if word.endswith("part")) == [f"{file} part" for file in range(7)]
    assert {"0:00", "5:00", "minutes:seconds since 09:14:03 UTC"} <= words
    assert_well_drawn([(CAPTION, svg)])
    assert svg == telemetry(samples(301), PLACES, checks(7, 12, 300))  # whenever it is drawn
    assert "; GPU memory used 113 GiB; Temperature of the GPU" in svg.split('"')[3]


def test_a_long_run_stays_small_and_keeps_its_peaks():
    run = [Sample(START + at, ({"power_watts": 600 + at % 7},) * len(PLACES)) for at in range(10_000)]
    run[1_234] = at_gpu(run[1_234], 5, {"power_watts": 699})
    run[6_789] = at_gpu(run[6_789], 2, {"power_watts": 88})
    svg = telemetry(run, PLACES, [])
    assert svg.split('"')[3].endswith(": Power 88 to 699 W")
    assert max(path.count("L") for path in re.findall(r' d="([^"]+)"', svg)) <= 600
    assert len(svg) < 250_000
    assert "hours:minutes since 09:14:03 UTC" in words_in(svg)


def test_what_no_gpu_gave_has_no_panel_a_gap_breaks_the_line_and_a_lone_value_is_seen():
    run = samples(12, memory_temperature_c=None)
    assert panels_of(telemetry(run, PLACES, [])) == [title for title in TITLES if title != TITLES[3]]
    assert breaks(run) == 1
    for second in range(3, 8):
        run[second] = at_gpu(run[second], 0, dict.fromkeys(READING))
    run[11] = replace(run[11], gpus=())
    assert breaks(run) == 2
    run = samples(40)
    with_gap = [*run[:10], *run[20:]]  # ten seconds in which nobody looked
    run[11], run[13] = at_gpu(run[11], 0, {}), at_gpu(run[13], 0, {})  # what is between them stands alone
    assert breaks(with_gap) == 2
    assert breaks(run) == 3


def breaks(run):
    return max(path.count("M") for path in re.findall(r' d="([^"]+)"', telemetry(run, PLACES[:1], [])))


def test_a_clock_that_was_set_back_during_the_run():
    run = samples(20)
    run[10:] = [replace(sample, time=sample.time - 3600) for sample in run[10:]]
    svg = telemetry(run, PLACES, checks(3, 2, 19))
    assert panels_of(svg) == TITLES
    assert {"0:00", "0:09"} <= words_in(svg)
    for too_little in ([run[0], *run[10:]], run[:1], []):  # in the first no time has passed
        assert telemetry(too_little, PLACES, checks(3, 2, 19)) == ""


def test_any_group_can_be_named_and_those_that_are_too_short_for_a_name_are_not():
    many = [*checks(90, 1, 280), ("acceptance/test_long_one.py::test_it", START + 280, START + 300)]
    words = words_in(telemetry(samples(301), PLACES[:1], many))
    assert (any(word.endswith(" part") for word in words), "Long one" in words) == (False, True)
    hostile = "a/test_<b>&$x^2$\x1b[31m.py::test_x", "test_" + "long_" * 30 + ".py", "", "no_python::x"
    run = [(name, START + second, START + second + 1) for second, name in enumerate(hostile)]
    run += [("test_a.py::x", START - 50, START - 1), ("test_b.py::x", START + 900, START + 999)]  # beyond the samples
    words = words_in(telemetry(samples(5), [gpu(index) for index in range(16)], run))
    assert {"<b>&$x^2$", "Long long lon...", "GPU 15"} <= words
    suite = [(f"acceptance/{file}::test_x", START, START + 4) for file in ("test_2_host.py", "test_4_each_gpu.py")]
    assert {"Host", "Compute"} <= words_in(telemetry(samples(5), PLACES, suite))  # as the tables call them

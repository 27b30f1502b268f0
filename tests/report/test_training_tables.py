"""Training by the number of GPUs, as tables, and where efficiency is lost: from figures alone."""

import pytest

from pytest_gpufleet.model.conditions import EACH_ALONE
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import WORLD, gpu
from pytest_gpufleet.report.page.training_tables import EPOCH_IMAGES, efficiency_losses, training_tables
from pytest_gpufleet.report.wording import says

WORK = {"model": "resnet50", "recipe": "amp", "image": 224}


def finding(metric, value, **conditions):
    values = {gpu(index): value for index in range(8)} if metric == "solo_train_throughput" else {WORLD: value}
    return Finding("a", Measurement(metric, values, {**WORK, **conditions}), "for information")


def cells(table):
    return {
        row.name: [(cell.below and f"{cell.text} {cell.below}") or cell.text for cell in row.cells]
        for row in table.rows
    }


def swept(batch, alone, accumulated=None, **rates):
    conditions = {"batch": batch, "workload": "sweep", **({"accumulated": accumulated} if accumulated else {})}
    found = [finding("solo_train_throughput", alone, ranks=1, **conditions)]
    for name, rate in rates.items():
        ranks = int(name[1:])
        found.append(finding("train_throughput", rate, ranks=ranks, **conditions))
        found.append(
            finding("scaling_efficiency", rate / ranks / (alone or 1), ranks=ranks, method=EACH_ALONE, **conditions)
        )
    return found


def test_a_row_for_each_batch_and_a_column_for_each_number_of_gpus():
    """The figures are those of the earlier suite: docs/earlier-suite.md."""
    found = [*swept(128, 753.0, n8=4630.0), *swept(64, 778.0, n2=1400.0, n8=2657.0)]
    (table,) = training_tables(found)
    assert table.title == "Training by method, batch, accumulated gradients and number of GPUs"
    assert table.columns == ("1 GPU", "2 GPUs", "8 GPUs", "Epoch of ImageNet")
    assert cells(table) == {
        "batch 64": ["778", "1,400 90 %", "2,657 42.7 %", "8 min 2 s"],
        "batch 128": ["753", "", "4,630 76.9 %", "4 min 37 s"],
    }
    assert round(EPOCH_IMAGES / 2657) == 8 * 60 + 2


def test_rows_are_in_order_with_as_many_gpus_as_batches_a_step():
    found = [
        each
        for accumulated in (1, 2, 4, 8)
        for each in swept(64, 700.0 + accumulated, accumulated=accumulated, n2=1400.0, n8=2657.0)
    ]
    (table,) = training_tables(found)
    assert [row.name for row in table.rows] == [
        "1 batch a step", "2 batches a step", "4 batches a step", "8 batches a step",
    ]  # fmt: skip
    assert [row.cells[0].text for row in table.rows] == ["701", "702", "704", "708"]


def test_of_one_gpu_the_sweep_has_one_column():
    (table,) = training_tables([*swept(16, 800.0), *swept(32, 900.0)])
    assert table.columns == ("1 GPU", "Epoch of ImageNet")
    assert [row.name for row in table.rows] == ["batch 16", "batch 32"]


def test_methods_are_held_against_the_same_gpus_alone_and_have_their_memory():
    found = swept(64, 425.0)
    for method, rate, memory in (("dp", 1205.0, (25.0, 11.0)), ("ddp", 1598.0, (12.0, 12.0))):
        conditions = {"ranks": 4, "batch": 64, "workload": "sweep", "method": method}
        used = dict(zip((gpu(0), gpu(1)), memory, strict=True))
        found.append(finding("train_throughput", rate, **conditions))
        found.append(finding("scaling_efficiency", rate / 1700, **conditions))
        found.append(Finding("a", Measurement("train_memory", used, {**WORK, **conditions}), "for information"))
    (table,) = training_tables(found)
    assert table.columns == ("1 GPU", "4 GPUs", "GPU memory", "Epoch of ImageNet")
    assert cells(table) == {
        "DataParallel": ["425", "1,205 70.9 %", "11 to 25 GiB", "17 min 43 s"],
        "DDP": ["425", "1,598 94 %", "12 GiB", "13 min 22 s"],
    }


def test_a_table_in_chinese_has_no_english_word_of_a_condition():
    (table,) = training_tables([*swept(64, 700.0, accumulated=1), *swept(64, 750.0, accumulated=2)], says("zh"))
    assert not any("batches a step" in row.name for row in table.rows)
    assert "pixels" not in table.shared


def test_a_loader_has_a_row_of_its_own_beside_the_same_recipe():
    usual = [
        finding("train_throughput", 6000.0, ranks=8, batch=256),
        finding("scaling_efficiency", 0.96, ranks=8, batch=256, method=EACH_ALONE),
        finding("loader_throughput", 3000.0, ranks=8, batch=256),
    ]
    (table,) = training_tables(usual)
    assert cells(table) == {
        "images that stay on the GPU": ["", "6,000 96 %", "3 min 34 s"],
        "fed by a data loader": ["", "3,000", "7 min 7 s"],
    }


def test_nothing_without_an_efficiency_and_no_epoch_without_a_rate():
    assert training_tables([finding("train_throughput", 100.0, ranks=8, batch=64)]) == []
    (table,) = training_tables(swept(64, 0.0, n8=0.0))
    assert table.rows[0].cells[-1].text == ""


def trained(alone, together, share, ranks=4):
    each = {gpu(index): rate for index, rate in enumerate(alone)}
    figures = (
        Measurement("solo_train_throughput", each, {**WORK, "batch": 256, "ranks": 1}),
        Measurement("train_throughput", {WORLD: together}, {**WORK, "batch": 256, "ranks": ranks}),
        Measurement("communication_share", {WORLD: share}, {**WORK, "batch": 256, "ranks": ranks}),
    )
    return [Finding("a", figure, "for information") for figure in figures]


def test_gradients_take_what_they_take():
    (losses,) = efficiency_losses(trained([100.0] * 4, 360.0, 0.1))
    assert (losses.delivered, losses.gradients, losses.imbalance) == pytest.approx((0.9, 0.1, 0.0))
    assert losses.rest == pytest.approx(0.0)


def test_a_slow_gpu_is_named_and_is_no_communication():
    (losses,) = efficiency_losses(trained([100.0, 100.0, 60.0, 100.0], 240.0, 0.0))
    assert losses.slowest == gpu(2)
    assert (losses.delivered, losses.gradients, losses.imbalance) == pytest.approx((240 / 360, 0.0, 120 / 360))
    (table,) = training_tables(trained([100.0, 100.0, 60.0, 100.0], 240.0, 0.0))
    assert [cell.below for cell in table.rows[0].cells] == ["", "", "of GPU 2", ""]


def test_what_nothing_explains_is_said_to_be_so():
    (losses,) = efficiency_losses(trained([100.0] * 4, 200.0, 0.0))
    assert losses.rest == pytest.approx(0.5)


@pytest.mark.parametrize(
    "figures",
    [trained([100.0] * 4, 360.0, 0.1)[:2], trained([0.0] * 4, 0.0, 0.1), trained([100.0] * 4, 360.0, float("nan")),
     trained([100.0] * 4, 360.0, 1.0), trained([100.0] * 2, 360.0, 0.1)],
)  # fmt: skip
def test_nothing_is_derived_of_figures_that_lack_or_cannot_be(figures):
    assert efficiency_losses(figures) == []

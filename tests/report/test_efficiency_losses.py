"""Where efficiency is lost, and who gives data to whom: from figures alone."""

import pytest

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import WORLD, gpu
from pytest_gpufleet.report.page.training_tables import efficiency_losses, training_tables
from pytest_gpufleet.report.plots.collective_pictures import PICTURES, collective_pictures

WORK = {"model": "resnet50", "recipe": "amp", "batch": 256, "image": 224}


def trained(alone, together, share, ranks=4):
    each = {gpu(index): rate for index, rate in enumerate(alone)}
    figures = (
        Measurement("solo_train_throughput", each, {**WORK, "ranks": 1}),
        Measurement("train_throughput", {WORLD: together}, {**WORK, "ranks": ranks}),
        Measurement("communication_share", {WORLD: share}, {**WORK, "ranks": ranks}),
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


def busbw(collective, **conditions):
    return Finding("a", Measurement("busbw", {WORLD: 1.0}, {"collective": collective, **conditions}), "not judged")


def test_a_picture_of_each_collective_that_was_measured():
    ((caption, svg),) = collective_pictures([busbw("all_reduce", bytes=8), busbw("broadcast", bytes=8)])
    assert "not the way that NCCL takes" in caption
    assert all(name in svg for name in ("broadcast", "all_reduce"))
    assert "all_gather" not in svg
    assert collective_pictures([]) == []
    assert collective_pictures([busbw("all_reduce", nodes=2)]) == []


def test_who_gives_to_whom():
    assert PICTURES["broadcast"][0] == {(0, 1), (0, 2), (0, 3)}
    assert PICTURES["gather"][0] == {(1, 0), (2, 0), (3, 0)}
    assert PICTURES["sendrecv"][0] == {(0, 1), (1, 2), (2, 3), (3, 0)}
    assert len(PICTURES["all_to_all"][0]) == 12

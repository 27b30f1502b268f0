"""MFU by the peaks of a GPU, and figures that no GPU can reach."""

from __future__ import annotations

import pytest

from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.verdict import peaks
from pytest_gpufleet.verdict.peaks import above_peak, model_flops_utilization
from tests.boards import H200

FLOP = 4.2e9


@pytest.fixture
def board():
    return H200.machine(4)


def tokens(values):
    return Measurement("token_throughput", values, {"recipe": "bf16"})


def at(board, share):
    """Tokens/s of one GPU that makes use of such a share of its peak."""
    return share * peaks.product_rate(board.gpus[0]).value * 1e12 / FLOP


def test_it_is_the_share_of_the_peak_of_the_gpus_that_train(board):
    places = [gpu.place for gpu in board.gpus]
    (alone,) = model_flops_utilization(tokens({place: at(board, 0.5) for place in places}), FLOP, board)
    assert [*alone.values] == places
    assert [*alone.values.values()] == pytest.approx([0.5] * 4)
    (together,) = model_flops_utilization(tokens({WORLD: 4 * at(board, 0.4)}), FLOP, board)
    assert together.values[WORLD] == pytest.approx(0.4)


def test_where_no_peak_is_known_there_is_none(board):
    assert model_flops_utilization(tokens({"cpu0": 1000.0}), FLOP, board) == []


def test_what_no_gpu_can_reach_is_a_fault_of_that_place(board):
    places = [gpu.place for gpu in board.gpus]
    rates = dict.fromkeys(places, at(board, 0.99)) | {places[2]: at(board, 1.01)}
    (fault,) = above_peak(tokens(rates), FLOP, board)
    assert (fault.code, fault.subjects) == ("above_peak", (places[2],))

"""Figures, sizes and conditions in words."""

from __future__ import annotations

import pytest

from pytest_gpufleet.model.metric import GiB, MiB
from pytest_gpufleet.model.place import WORLD, read
from pytest_gpufleet.report import wording


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (366.94, "366.9"),
        (58095, "58,100"),
        (9999.9, "10,000"),
        (1234567.0, "1,235,000"),
        (0.01234567, "0.01235"),
        (-12.5, "-12.5"),
        (700.0, "700"),
        (float("nan"), "not a number"),
        (float("inf"), "inf"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert wording.number(value) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (8, "8 B"), (64 * MiB, "64 MiB"), (8 * GiB, "8 GiB"), (1536, "1.5 KiB")]
)
def test_size(nbytes: int, text: str) -> None:
    assert wording.size(nbytes) == text


def test_conditions_come_in_the_order_of_speech_and_unknown_ones_are_named() -> None:
    conditions = {"fan_speed": 3, "nvls": True, "ranks": 1, "bytes": 64 * MiB, "collective": "broadcast"}
    assert wording.words(conditions) == ["broadcast", "64 MiB", "1 rank", "NVLS on", "fan speed 3"]


def test_places() -> None:
    assert wording.place(read("gpu0-gpu5")) == "GPU 0 to GPU 5"
    assert wording.place(WORLD) == "all ranks together"
    assert wording.place(read("cpu3")) == "CPU rank 3"


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("gpu3", "gf1 GPU 3"),
        ("node2/gpu3", "gf10 GPU 3"),
        ("node1/gpu0-node1/gpu5", "gf2 GPU 0 to GPU 5"),
        ("gpu0-node2/gpu0", "gf1 GPU 0 to gf10 GPU 0"),
        ("node", "gf1"),
        ("node1-node2", "gf2 to gf10"),
        ("node2/rail1", "gf10 rail 1"),
        ("group3", "group 3"),
        ("world", "all ranks together"),
        ("node7/cpu1", "node 7 CPU rank 1"),
    ],
)
def test_places_of_several_nodes_are_told_with_their_hosts(where: str, text: str) -> None:
    assert wording.place(read(where), {0: "gf1", 1: "gf2", 2: "gf10"}) == text


def test_places_of_the_only_node_are_told_without_it() -> None:
    assert wording.place(read("gpu3"), {0: "gf1"}) == "GPU 3"
    assert wording.place(read("node"), {0: "gf1"}) == "node"

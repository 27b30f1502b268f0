"""A project that has names like ours and never heard of this plugin: its fixtures, parameters and marks are its own."""

import pytest


@pytest.fixture
def world():
    return "a map"


@pytest.fixture
def rank(world):
    return f"the highest of {world}"


@pytest.fixture(scope="session")
def judge():
    return "a person"


@pytest.fixture
def machine():
    return "an engine"


@pytest.mark.level(3)
@pytest.mark.needs("coffee")
@pytest.mark.figures("ten")
@pytest.mark.chapter(1)
@pytest.mark.proves_sound(False)
@pytest.mark.at_the_end("of the world")
@pytest.mark.fresh_world("a map")
@pytest.mark.world_size("large")
@pytest.mark.spmd("s", p="m", d=None)
def test_fixtures_and_marks(world, rank, judge, machine):
    assert (world, rank, judge, machine) == ("a map", "the highest of a map", "a person", "an engine")


@pytest.mark.level(1)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("rank", "level"), [(0, "ground floor")])
@pytest.mark.parametrize("nccl_group", ["none"])
def test_parameters(world_size, rank, level, nccl_group):
    assert (world_size in (1, 2), rank, level, nccl_group) == (True, 0, "ground floor", "none")


@pytest.mark.spmd
@pytest.mark.parametrize("rank", [3])
def test_a_parameter_beside_a_mark_of_the_same_name(rank):
    assert rank == 3

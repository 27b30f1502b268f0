"""Losses that an author's check tells: they are on record with its name and place, whatever becomes of the check."""

MODULE = """
    import pytest

    def train(rank):
        rank.record_losses({"model": "mine", "ranks": 1}, {1: 2.0 + rank.index, 2: float("nan"), 3: 1.5})

    def test_alone(world):
        world.run(train)

    @pytest.mark.spmd
    def test_fails_afterwards(rank):
        from pytest_gpufleet import WORLD

        if rank.index == 0:
            rank.record_losses({"model": "mine", "ranks": rank.size}, {10: 0.5}, WORLD)
        assert False

    @pytest.mark.spmd
    def test_tells_nonsense(rank):
        rank.record_losses({"model": "mine"}, {1: "low"})

    def test_tells_nothing(world):
        world.run(lambda rank: None)
"""


def test_losses_are_on_record(fleet):
    run = fleet(MODULE)
    told = [
        (each.check.rsplit("::", 1)[-1], str(each.curve.place), each.curve.steps, each.curve.losses)
        for each in run.record.losses
    ]
    assert told == [
        ("test_alone", "cpu0", (1, 3), (2.0, 1.5)),
        ("test_alone", "cpu1", (1, 3), (3.0, 1.5)),
        ("test_fails_afterwards", "world", (10,), (0.5,)),
    ]
    assert run.record.losses[2].curve.training == {"model": "mine", "ranks": 2}
    assert "a loss must be a number, not 'low'" in run.check("test_tells_nonsense").message
    assert run.outcomes["test_alone"] == "passed"

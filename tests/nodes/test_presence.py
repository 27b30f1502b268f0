"""Who is lost when."""

from pytest_gpufleet.nodes.cluster import Presence


def presence(nodes: int = 2) -> Presence:
    made = Presence(lost_after=10.0, turn=1.0)
    made.look(0.0)
    made.heard(range(nodes))
    return made


def listen(to: Presence, seconds: range, *talking: int) -> None:
    for second in seconds:
        to.look(float(second))
        to.heard(talking)


def test_a_node_is_lost_after_so_much_silence_and_not_before():
    one = presence()
    listen(one, range(1, 10), 0)
    assert one.lost() == []
    listen(one, range(10, 11), 0)
    assert (one.lost(), one.silence(1)) == ([1], 10.0)


def test_a_node_that_is_heard_again_in_time_is_not_lost():
    one = presence()
    listen(one, range(1, 10), 0)
    listen(one, range(10, 11), 0, 1)
    listen(one, range(11, 20), 0)
    assert one.lost() == []


def test_a_controller_that_was_frozen_loses_nobody_and_still_finds_who_is_silent():
    one = presence()
    one.look(500.0)
    assert one.lost() == []
    listen(one, range(501, 509), 0)
    assert one.lost() == []
    listen(one, range(509, 511), 0)
    assert one.lost() == [1]


def test_a_clock_that_runs_backwards_does_no_harm():
    one = presence()
    for second in (5.0, 3.0, 4.0):
        one.look(second)
    assert one.silence(0) == 2.0


def test_silence_of_a_node_that_was_never_heard_or_is_forgotten_means_nothing():
    one = presence()
    one.forget(1)
    one.forget(7)
    listen(one, range(1, 12), 0)
    assert one.lost() == []

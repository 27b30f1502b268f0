"""Which deadline ends a hang, and that it is told by rank."""

import pytest

HANG = """
import pytest, time

def test_before(world):  # starting the ranks is not part of any limit below
    world.run(lambda rank: None)

def hang(rank):
    if rank.index == 1:
        time.sleep(3600)

def test_hang(world):
    world.run(hang)

@pytest.mark.timeout(1)
def test_marker(world):
    world.run(hang)

def test_call(world):
    world.run(hang, timeout=1.25)

def test_after(world):
    assert world.run(lambda rank: rank.index) == [0, 1]
"""


@pytest.mark.parametrize(
    ("selected", "arguments", "limit"),
    [
        ("test_hang", ["--fleet-timeout=1.5"], "1.5 s"),
        ("test_call", ["--fleet-timeout=60"], "1.25 s"),
        ("test_hang", ["--timeout=3"], "no answer within"),
        ("test_marker", [], "no answer within"),
    ],
    ids=["--fleet-timeout", "timeout=", "--timeout", "marker"],
)
def test_the_rank_that_hangs_is_named(fleet, selected, arguments, limit):
    run = fleet(HANG, *arguments, "-k", f"test_before or {selected} or test_after")
    assert run.outcomes == {"test_before": "passed", selected: "failed", "test_after": "passed"}, run.text
    message = run.check(selected).message
    assert message.startswith("rank 1 of 2")
    assert limit in message
    assert "in hang" in message


def test_a_hang_in_the_controller_is_left_to_pytest_timeout(fleet):
    module = "def test_hang(world):\n    world.run(lambda rank: None)\n    while True: pass\n"
    run = fleet(module, "--timeout=4")
    assert run.outcomes == {"test_hang": "failed"}
    assert "Timeout" in run.check("test_hang").message

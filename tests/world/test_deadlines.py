"""Which deadline of pytest's and of ours ends a hang, and that the rank is named."""

import pytest

HANG = """
import pytest, time

@pytest.mark.timeout(0)
def test_before(world):  # starting the ranks is not part of any limit below
    world.run(lambda rank: None)

def hang(rank):
    if rank.index == 1:
        time.sleep(3600)

@pytest.mark.timeout(1)
def test_marker(world):
    world.run(hang)

def test_of_all_tests(world):
    world.run(hang, timeout=60)

@pytest.mark.timeout(1)
def test_controller(world):
    time.sleep(3600)

@pytest.mark.timeout(0)
def test_after(world):
    assert world.run(lambda rank: rank.index) == [0, 1]
"""


@pytest.fixture(scope="module")
def hangs(fleet):
    patience = "from pytest_gpufleet.plugin import supervision\nsupervision.GRACE_SECONDS = 1.0\n"
    return fleet(HANG, "--timeout=2", files={"conftest.py": patience})


@pytest.mark.parametrize("name", ["test_of_all_tests", "test_marker"])
def test_the_rank_that_hangs_is_named(hangs, name):
    message = hangs.check(name).message
    assert message.startswith("rank 1 of 2")
    assert "no answer within" in message
    assert "in hang" in message
    assert (hangs.check("test_before").outcome, hangs.check("test_after").outcome) == ("passed", "passed")


def test_a_hang_in_the_controller_is_left_to_pytest_timeout(hangs):
    assert "Timeout (>1.0s)" in hangs.check("test_controller").message


OWN = "def test_own(world):\n    assert world.run(lambda rank: rank.index) == [0, 1]\n"


@pytest.mark.parametrize("origin", ["timeout in {}/pytest.ini", "PYTEST_TIMEOUT", "--timeout in addopts"])
def test_a_limit_for_all_tests_of_a_project_fails_no_check_and_is_reported(fleet, origin):
    name, _, place = origin.partition(" in ")
    ini = {"{}/pytest.ini": "timeout = 0.001", "addopts": "addopts = --timeout=0.001"}.get(place, "")
    variables = {} if ini else {name: "0.001"}
    run = fleet(OWN, files={"pytest.ini": f"[pytest]\n{ini}\n"}, **variables)
    assert (run.check("test_own").outcome, run.record.spoiled) == ("passed", []), run.text
    assert f"limit of 0.001 s a test ({origin.format(run.root)}" in run.text

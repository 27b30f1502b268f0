"""Whose deadlines end a test of a run."""

OWN = """
import time

import pytest

def test_own(world):
    time.sleep(0.1)
    assert world.run(lambda rank: rank.index) == [0, 1]

@pytest.mark.timeout(1)
def test_with_a_limit_of_its_own():
    time.sleep(60)
"""


def test_a_limit_of_pytest_timeout_fails_no_check_and_is_reported(fleet):
    run = fleet(OWN, files={"pytest.ini": "[pytest]\ntimeout = 0.01\n"})
    assert (run.check("test_own").outcome, run.record.spoiled) == ("passed", []), run.text
    assert "limit of 0.01 s a test is left out" in run.text
    assert run.check("test_with_a_limit_of_its_own").outcome == "failed", run.text

"""When ranks end: while the report is written, but not before fixtures are done with them."""

import pytest

SESSION = """
    import os, pytest

    def remember(rank):
        rank.kept["word"] = rank.index
        return os.getpid()

    @pytest.fixture(scope="session")
    def remembered(world):
        pids = world.run(remember)
        yield pids
        print("still known:", world.run(lambda rank: rank.kept["word"]))
"""


def test_ranks_are_gone_before_the_report_is_done(fleet):
    conftest = (
        SESSION
        + """
    PIDS = []

    @pytest.fixture(autouse=True)
    def told(remembered):
        PIDS[:] = remembered

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary():
        from tests.nodes.controller import wait_until_gone
        wait_until_gone(PIDS)  # which hangs if nobody ends them before the session is closed
    """
    )
    run = fleet("def test_one(): pass\n", "-s", files={"conftest.py": conftest})
    assert run.status == 0, run.text
    assert "still known: [0, 1]" in run.text


@pytest.mark.parametrize("status", [0, 2])
def test_fixtures_of_a_session_that_was_ended_are_taken_down_on_the_same_ranks(fleet, status):
    module = (
        SESSION
        + f"""
    def test_ends(remembered):
        pytest.exit("enough", {status})
    """
    )
    assert "still known: [0, 1]" in fleet(module, "-s").text
